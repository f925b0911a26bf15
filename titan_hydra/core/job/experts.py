"""The model section of a job with experts, and the ranks over which its experts can be split."""

from math import gcd
from typing import Any

from titan_hydra.core.job.config.fault import divisors
from titan_hydra.core.job.config.schema import Job


def sparse(job: Job) -> Any:
    """Return the model section of a job with experts. Its type is Any, as job/ does not import the families' keys."""
    return job.model


def expert_degrees(job: Job, ranks: int) -> tuple[int, ...]:
    """Return the expert-parallel degrees that divide both `ranks` and the number of experts; (1,) without experts."""
    return divisors(gcd(ranks, sparse(job).n_experts)) if job.model.sparse else (1,)
