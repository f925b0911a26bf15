"""The ranks of a job, the degrees over which its experts can be split, and the devices of this machine."""

import glob
import math
import os
from typing import Any

from titan_hydra.core.job.config.fault import divisors
from titan_hydra.core.job.config.registry import CP_ROTATIONS, EXECUTORS, RotationKind
from titan_hydra.core.job.config.schema import Job

# the degrees in the order of the mesh; tp is last, so that its ranks share a node and its fast links
DEGREES = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
)


def world_size(job: Job) -> int:
    """Return the ranks of one replica group: the product of the degrees."""
    return math.prod(getattr(job.parallelism, name) for name in DEGREES)


def rotation(job: Job) -> RotationKind:
    """Return the record (core/job/config/registry.py) of the job's parallelism.cp_rotate."""
    return CP_ROTATIONS[job.parallelism.cp_rotate]


def has_ring(job: Job) -> bool:
    """Whether context-parallel ranks compute attention in a ring."""
    return job.parallelism.cp > 1 and rotation(job).ring


def all_ranks(job: Job) -> int:
    """Return the ranks of all replica groups together."""
    return job.fault_tolerance.replicas * world_size(job)


def processes(job: Job) -> int:
    """Return the number of processes of a job: one for each rank or, with comm=fake, a single one that simulates the
    other ranks.
    """
    return 1 if job.comm.name == "fake" else all_ranks(job)


def data_parallel(job: Job) -> int:
    """Return the ranks of a replica group that see different samples: dp_replicate x dp_shard."""
    return job.parallelism.dp_replicate * job.parallelism.dp_shard


def runs_here(job: Job) -> bool:
    """Whether the ranks are processes of this machine, whose devices and memory can be counted."""
    return EXECUTORS[job.cluster.executor].here


def devices_here() -> int:
    """Count the CUDA devices of this machine that are visible to this user, without importing torch."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices of this machine that are visible to this user, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for device in visible.split(",") if (name := device.strip()) not in ("", "-1")]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def sparse(job: Job) -> Any:
    """Return the model section of a job with experts. Its type is Any, as job/ does not import the families' keys."""
    return job.model


def expert_degrees(job: Job, ranks: int) -> tuple[int, ...]:
    """Return the expert-parallel degrees that divide both `ranks` and the number of experts; (1,) without experts."""
    return divisors(math.gcd(ranks, job.model.expert_count)) if job.model.expert_count else (1,)
