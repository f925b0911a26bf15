"""The rules of objectives: what a job's objective cannot be combined with, as its record tells."""

from collections.abc import Iterator
from dataclasses import fields

from titan_hydra.config.family import families, family_of
from titan_hydra.config.fault import Fault
from titan_hydra.config.registry import DATA_SOURCES, OBJECTIVES, resolve
from titan_hydra.config.schema import Job, default_of
from titan_hydra.job.sources import data_sources


def sources_give_what_the_objective_needs(job: Job) -> Iterator[Fault]:
    """The samples of every data source have the arrays that the objective uses."""
    needs = OBJECTIVES[job.train.objective].needs
    suitable = tuple(name for name, record in DATA_SOURCES.items() if set(needs) <= set(record.gives))
    for key, source in data_sources(job.data).items():
        if lacking := [name for name in needs if name not in DATA_SOURCES[source.name].gives]:
            yield Fault(
                f"{key}.name",
                source.name,
                f"train.objective={job.train.objective} needs {' and '.join(lacking)} of each sample, which this source does not give",
                legal=suitable,
            )


def objective_suits_the_model(job: Job) -> Iterator[Fault]:
    """An objective gives a model what its family takes: tokens, or latents of images."""
    makes, takes = OBJECTIVES[job.train.objective].makes, family_of(job.model).takes
    if makes != takes:
        legal = tuple(name for name, record in OBJECTIVES.items() if record.makes == takes)
        yield Fault(
            "train.objective",
            job.train.objective,
            f"makes {makes} of samples, and model.family={job.model.family} takes {takes}",
            legal=legal,
        )


def objective_computes_its_loss(job: Job) -> Iterator[Fault]:
    """Only some losses can be computed in the head, or from logits that are split over the vocabulary: the objective's
    record tells.
    """
    record = OBJECTIVES[job.train.objective]
    if job.loss.name == "linear_cross_entropy" and not record.head_loss:
        yield Fault("loss.name", job.loss.name, f"train.objective={record.name} needs the logits", legal=("cross_entropy",))
    if job.parallelism.tp > 1 and job.parallelism.loss_parallel and not record.split_logits:
        yield Fault("parallelism.loss_parallel", True, f"train.objective={record.name} needs whole logits", legal=(False,))
    yield from resolve(record.faults)(job)


def objective_sees_whole_documents(job: Job) -> Iterator[Fault]:
    """A loss of whole documents needs their numbers and all of their tokens on one rank. The balance loss of experts
    counts tokens.
    """
    record = OBJECTIVES[job.train.objective]
    if record.documents and not job.data.document_mask:
        yield Fault("data.document_mask", False, f"train.objective={record.name} compares documents", legal=(True,))
    if record.sequences and job.parallelism.cp > 1:
        yield Fault("parallelism.cp", job.parallelism.cp, f"train.objective={record.name} sums over whole documents", legal=(1,))
    if record.sequences and (balance := getattr(job.model, "sequence_balance", 0)):
        yield Fault(
            "model.sequence_balance", balance, f"it is scaled like a token's loss, and train.objective={record.name} has none", legal=(0,)
        )


def objective_reads_its_keys(job: Job) -> Iterator[Fault]:
    """A key of another objective would change nothing."""
    record, keys = OBJECTIVES[job.train.objective], {name for other in OBJECTIVES.values() for name in other.reads}
    for spec in fields(job.train):
        if spec.name in keys - set(record.reads) and (value := getattr(job.train, spec.name)) != default_of(spec):
            readers = " or ".join(name for name, other in OBJECTIVES.items() if spec.name in other.reads)
            yield Fault(
                f"train.{spec.name}", value, f"train.objective={record.name} does not read it; {readers} would", legal=(default_of(spec),)
            )


def images_go_with_a_tower(job: Job) -> Iterator[Fault]:
    """Images need a model that reads them, whose tower no other objective trains; that tower is plain, and sharded by
    FSDP2.
    """
    reading = tuple(name for name, record in OBJECTIVES.items() if "patches" in record.needs)
    if not hasattr(job.model, "vision"):
        if job.train.objective in reading:
            able = tuple(name for name, family in families().items() if "vision" in {spec.name for spec in fields(family.config)})
            yield Fault("model.family", job.model.family, f"train.objective={job.train.objective} needs a tower for images", legal=able)
        return
    tower = f"the tower of model.family={job.model.family}"
    if job.train.objective not in reading:
        yield Fault("train.objective", job.train.objective, f"{tower} learns from images alone", legal=reading)
    if job.precision.converter:
        yield Fault("precision.converter", job.precision.converter, f"{tower} needs plain linears", legal=("null",))
    if job.adapter.name != "none":
        yield Fault("adapter.name", job.adapter.name, f"{tower} has no adapters", legal=("none",))
    if job.parallelism.backend != "fsdp2":
        yield Fault("parallelism.backend", job.parallelism.backend, f"{tower} is sharded by FSDP2", legal=("fsdp2",))


RULES = [
    sources_give_what_the_objective_needs,
    objective_computes_its_loss,
    objective_sees_whole_documents,
    objective_reads_its_keys,
    images_go_with_a_tower,
]
VALUES = [objective_suits_the_model]
