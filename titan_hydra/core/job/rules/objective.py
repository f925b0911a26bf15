"""The rules of objectives: what a job's objective cannot be combined with, according to its record."""

from collections.abc import Iterator

from titan_hydra.core.job.config.family import FAMILIES, family_of
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.registry import DATA_SOURCES, OBJECTIVES, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.config.source import data_sources


def sources_give_what_the_objective_needs(job: Job) -> Iterator[Fault]:
    """The samples of every data source have the arrays that the objective uses."""
    needs = OBJECTIVES[job.objective.name].needs
    suitable = tuple(name for name, record in DATA_SOURCES.items() if set(needs) <= set(record.gives))
    for key, source in data_sources(job.data).items():
        if lacking := [name for name in needs if name not in DATA_SOURCES[source.name].gives]:
            yield Fault(
                f"{key}.name",
                source.name,
                f"objective={job.objective.name} needs {' and '.join(lacking)} of each sample, which this source does not give",
                legal=suitable,
            )


def objective_suits_the_model(job: Job) -> Iterator[Fault]:
    """An objective gives a model the input that its family takes: tokens, or another input that a recipe adds."""
    makes, takes = OBJECTIVES[job.objective.name].makes, family_of(job.model).takes
    if makes != takes:
        legal = tuple(name for name, record in OBJECTIVES.items() if record.makes == takes)
        suited = " or ".join(name for name, family in FAMILIES.items() if family.takes == makes)
        reason = (
            f"makes {makes} of samples, for model.family={suited}, and model.family={job.model.family} takes {takes}"
        )
        yield fault_at(job, "objective.name", reason, *legal)


def objective_computes_its_loss(job: Job) -> Iterator[Fault]:
    """Not every objective's loss can be computed in the head, or from logits that are split over the vocabulary. Its
    ObjectiveKind states in `head_loss` and `split_logits` whether it can.
    """
    record = OBJECTIVES[job.objective.name]
    if job.loss.name == "linear_cross_entropy" and not record.head_loss:
        yield fault_at(job, "loss.name", f"objective={record.name} needs the logits", "cross_entropy")
    if job.parallelism.tp > 1 and job.parallelism.loss_parallel and not record.split_logits:
        yield fault_at(job, "parallelism.loss_parallel", f"objective={record.name} needs whole logits", False)
    yield from resolve(record.faults)(job)


RULES = [
    sources_give_what_the_objective_needs,
    objective_computes_its_loss,
]
VALUES = [objective_suits_the_model]
