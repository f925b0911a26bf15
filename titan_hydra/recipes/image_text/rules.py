"""With which options the objective `image_text` and its tower cannot be combined."""

from collections.abc import Iterator
from typing import Any

from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.schema import Job


def faults(job: Job) -> Iterator[Fault]:
    """A sample has room for any image. The tower has neither number formats nor adapters, and only FSDP2 shards it."""
    objective: Any = job.objective
    if objective.image_patches > objective.patches:
        reason = f"more than objective.patches={objective.patches} of a sample"
        yield fault_at(job, "objective.image_patches", reason, objective.patches)
    tower = f"the tower of model.family={job.model.family}"
    if job.precision.converter:
        yield fault_at(job, "precision.converter", f"{tower} has no number format", "null")
    if adapts(job):
        yield fault_at(job, "adapter.name", f"{tower} has no adapters", "none")
    if job.parallelism.backend != "fsdp2":
        yield fault_at(job, "parallelism.backend", f"{tower} can only be sharded by FSDP2", "fsdp2")
