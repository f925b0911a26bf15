"""The linears with an adapter, and the adapters' parameters."""

from titan_hydra.config.family import Linear, family_of
from titan_hydra.config.schema import Job


def adapted(job: Job) -> list[Linear]:
    """Return the linears of a block that get an adapter; none without adapters."""
    if job.adapter.name == "none":
        return []
    wanted = job.adapter.linears
    return [linear for linear in family_of(job.model).linears(job.model) if not wanted or linear.name in wanted]


def adapter_parameters(job: Job) -> int:
    """Return the number of trained parameters of the adapters."""
    return job.model.n_layers * sum(job.adapter.rank * (linear.inputs + linear.outputs) for linear in adapted(job))
