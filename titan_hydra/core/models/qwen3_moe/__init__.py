"""Qwen3, the models with experts (arXiv 2505.09388)."""

from titan_hydra.core.job.config.family import Family, causal_keys, decoder_role, register

from .config import Qwen3MoeConfig, flops, linears, parameters

register(
    Family(
        "qwen3_moe",
        Qwen3MoeConfig,
        model="titan_hydra.core.models.qwen3_moe.model:Qwen3Moe",
        sharding="titan_hydra.core.models.qwen3_moe.sharding:plan",
        hf="titan_hydra.core.models.qwen3_moe.hf:HF",
        parameters=parameters,
        flops=flops,
        linears=linears,
        role=decoder_role,
        attended=causal_keys,
    )
)
