"""Llama 3 (arXiv 2407.21783)."""

from titan_hydra.core.job.config.family import (
    Family,
    causal_keys,
    decoder_clipped,
    decoder_parameters,
    decoder_role,
    register,
)

from .config import Llama3Config

register(
    Family(
        "llama3",
        Llama3Config,
        model="titan_hydra.core.models.llama3.model:Llama3",
        sharding="titan_hydra.core.models.llama3.sharding:plan",
        hf="titan_hydra.core.models.llama3.hf:HF",
        parameters=decoder_parameters,
        role=decoder_role,
        attended=causal_keys,
        clipped=decoder_clipped,
    )
)
