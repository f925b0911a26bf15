"""Qwen3, the dense models (arXiv 2505.09388)."""

from titan_hydra.core.job.config.family import Family, causal_keys, decoder_role, register

from .config import Qwen3Config, parameters

register(
    Family(
        "qwen3",
        Qwen3Config,
        model="titan_hydra.core.models.qwen3.model:Qwen3",
        sharding="titan_hydra.core.models.qwen3.sharding:plan",
        hf="titan_hydra.core.models.qwen3.hf:HF",
        parameters=parameters,
        role=decoder_role,
        attended=causal_keys,
    )
)
