"""The linears with an adapter, and the adapters' parameters."""

from titan_hydra.core.job.config.family import Linear, family_of
from titan_hydra.core.job.config.registry import ADAPTERS
from titan_hydra.core.job.config.schema import Job


def adapts(job: Job) -> bool:
    """Whether adapters are trained beside a frozen model."""
    return ADAPTERS[job.adapter.name].adapt is not None


def adapted(job: Job) -> list[Linear]:
    """Return the linears of a block that get an adapter; none without adapters."""
    if not adapts(job):
        return []
    wanted = job.adapter.linears
    return [linear for linear in family_of(job.model).linears(job.model) if not wanted or linear.name in wanted]


def adapter_parameters(job: Job) -> int:
    """Return the number of trained parameters of the adapters."""
    count = ADAPTERS[job.adapter.name].parameters
    return job.model.n_layers * int(sum(count(job.adapter, linear.inputs, linear.outputs) for linear in adapted(job)))
