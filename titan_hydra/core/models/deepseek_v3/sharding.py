"""How tensor parallelism splits DeepSeek-V3: each rank has some of the heads; every rank computes the latents, which
all heads share.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.models.llama3 import sharding as llama3
from titan_hydra.core.parallel.plans import Linears, Plan, with_experts
from titan_hydra.core.parallel.whole import Norm, SplitTokens, SummedGradient, Whole


def plan(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Megatron's split as for Llama 3, with attention from latents. A latent's gradient is summed over ranks at
    the place where the heads read the latent, so that the weights that compute the latent have the same gradient on
    every rank.
    """
    like = llama3.plan(config, norm, linears)
    residual = Shard(1) if config.sequence_parallel else Replicate()
    same = Norm(False, norm.reduce_dtype)
    attention = {
        "attention": PrepareModuleInput(
            input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=True
        ),
        "attention.wq": linears.colwise(),
        "attention.wq_a": Whole(),
        "attention.q_norm": same,
        "attention.wq_b": linears.colwise(),
        "attention.wkv_a": Whole(),
        "attention.kv_norm": same,
        "attention.wkv_b": linears.colwise(),
        "attention.shared_key": SummedGradient(),
    }
    further = {
        "enorm": norm,
        "hnorm": norm,
        "eh_proj": SplitTokens(norm.reduce_dtype) if config.sequence_parallel else Whole(),
        "head_norm": norm,
    }
    block = {name: style for name, style in like.block.items() if name not in ("attention.wk", "attention.wv")}
    return with_experts(Plan(like.around, block | attention | further), norm)
