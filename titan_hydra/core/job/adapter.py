"""The linears with an adapter, and the adapters' parameters."""

from titan_hydra.core.job.config.family import Linear, family_of
from titan_hydra.core.job.config.registry import ADAPTERS
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import sparse


def adapts(job: Job) -> bool:
    """Whether adapters are trained beside a frozen model."""
    return ADAPTERS[job.adapter.name].adapt is not None


def adapted(job: Job) -> list[Linear]:
    """Return the linears of a block that get an adapter; none without adapters."""
    if not adapts(job):
        return []
    wanted = job.adapter.linears
    return [linear for linear in family_of(job.model).linears(job.model) if not wanted or linear.name in wanted]


def adapts_experts(job: Job) -> bool:
    """Whether routed experts get adapters."""
    return adapts(job) and job.model.sparse and bool(getattr(job.adapter, "experts", False))


def expert_adapter(job: Job) -> float:
    """Return the number of parameters of one expert's adapters; 0 without them."""
    if not adapts_experts(job):
        return 0
    count, model = ADAPTERS[job.adapter.name].parameters, sparse(job)
    return 2 * count(job.adapter, model.dim, model.expert_dim) + count(job.adapter, model.expert_dim, model.dim)


def adapter_parameters(job: Job) -> int:
    """Return the number of trained parameters of the adapters."""
    count = ADAPTERS[job.adapter.name].parameters
    each = job.model.n_layers * int(sum(count(job.adapter, linear.inputs, linear.outputs) for linear in adapted(job)))
    if not adapts_experts(job):
        return each
    blocks = job.model.n_layers - sparse(job).first_k_dense_replace
    return each + blocks * sparse(job).n_experts * int(expert_adapter(job))
