"""How tensor parallelism splits Qwen3 with experts: attention is split as in Qwen3; the router is replicated, and each
rank routes its own tokens.
"""

from __future__ import annotations

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.models.qwen3 import sharding as qwen3
from titan_hydra.core.parallel.plans import Linears, Plan, with_experts
from titan_hydra.core.parallel.whole import Norm


def plan(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Megatron's split of attention. Tokens stay split over the sequence on their way to the experts
    (core/parallel/experts.py).
    """
    return with_experts(qwen3.plan(config, norm, linears), norm)
