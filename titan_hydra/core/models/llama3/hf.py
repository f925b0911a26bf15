"""Llama 3 at Hugging Face: LlamaForCausalLM. Weights need no permutation, as both models use the same RoPE layout."""

from __future__ import annotations

from pathlib import Path

import torch

from titan_hydra.core.models.hf import DECODER, HuggingFace, decoder_from_config, decoder_to_config, rope_of

from .config import Llama3Config, RopeScaling

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def to_config(config: Llama3Config, dtype: torch.dtype) -> dict:
    """Return the config.json of a LlamaForCausalLM, without token ids."""
    scaling = config.rope_scaling
    stretched = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
    of_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    return of_llama | decoder_to_config(config, dtype) | {"rope_scaling": None if scaling.factor == 1 else stretched}


def from_config(data: dict, file: Path) -> Llama3Config:
    """Return the model section for a Llama's config.json. Raises ConfigError for features that Llama 3 does not
    have.
    """
    common = decoder_from_config(data, file, {"model_type": "llama", "mlp_bias": False}, "llama3", LLAMA3)
    return Llama3Config(**common, family="llama3", rope_scaling=_scaling(rope_of(data, file)))


def _scaling(rope: dict) -> RopeScaling:
    """Return the scaling of rotary positions that a config.json describes; factor 1 is none."""
    if rope["rope_type"] == "default":
        return RopeScaling(factor=1.0)
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


HF = HuggingFace("llama", DECODER, to_config, from_config)
