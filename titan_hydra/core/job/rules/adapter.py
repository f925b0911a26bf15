"""The rules of adapters: which linears can have one, and what they cannot be combined with."""

from collections.abc import Iterator

from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at, required
from titan_hydra.core.job.config.operation import LOADED
from titan_hydra.core.job.config.schema import Job


def adapted_linears_exist(job: Job) -> Iterator[Fault]:
    """Every entry of adapter.linears names a linear of the family's blocks."""
    if not job.adapter.linears:
        return
    known = [linear.name for linear in family_of(job.model).linears(job.model)]
    if wrong := [name for name in job.adapter.linears if name not in known]:
        yield fault_at(job, "adapter.linears", f"{job.model.family} has no linear {wrong[0]}", f"[{','.join(known)}]")


def adapters_go_with_plain_weights(job: Job) -> Iterator[Fault]:
    """Adapters leave the weights as they are, so the weights must be plain and sharded by FSDP2."""
    if not adapts(job):
        return
    adapter = f"adapter={job.adapter.name}"
    if job.model.sparse:
        yield fault_at(job, "adapter.name", f"experts of {job.model.family} have no adapters", "none")
    yield from required(
        job,
        ("precision.converter", None, f"{adapter} needs plain linears"),
        ("parallelism.backend", "fsdp2", f"{adapter} has frozen weights, which this backend does not shard"),
        ("loss.name", "cross_entropy", f"it computes the gradient of the head, which {adapter} freezes"),
        ("fault_tolerance.name", "off", f"replica groups exchange all weights, and {adapter} trains only its own"),
        ("checkpoint.export_dtype", None, f"{adapter} is exported by titan checkpoint export"),
    )
    if not set(job.checkpoint.exclude_from_loading) >= set(LOADED):
        yield fault_at(
            job,
            "checkpoint.exclude_from_loading",
            f"{adapter} takes its base from initial_load_path, and nothing else",
            f"[{','.join(LOADED)}]",
        )


RULES = [adapted_linears_exist, adapters_go_with_plain_weights]
