"""How tensor parallelism splits Qwen3: like Llama 3, with styles for the norms of the heads in addition."""

from __future__ import annotations

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.models.llama3 import sharding as llama3
from titan_hydra.core.parallel.plans import Linears, Plan
from titan_hydra.core.parallel.whole import Norm


def plan(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Megatron's split. Each rank has other heads, so on each rank the gradient of the heads' norms is only a
    part of the sum, with or without sequence parallelism.
    """
    whole, heads = llama3.plan(config, norm, linears), Norm(True, norm.reduce_dtype)
    return Plan(whole.around, whole.block | {"attention.q_norm": heads, "attention.k_norm": heads})
