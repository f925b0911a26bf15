"""Qwen3 at Hugging Face: Qwen3ForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch

from titan_hydra.core.models.hf import DECODER, HuggingFace, decoder_from_config, decoder_to_config

from .config import Qwen3Config

NAMES = DECODER | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


def to_config(config: Qwen3Config, dtype: torch.dtype) -> dict:
    """Return the config.json of a Qwen3ForCausalLM, without token ids."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    } | decoder_to_config(config, dtype)


def from_config(data: dict, file: Path) -> Qwen3Config:
    """Return the model section for a Qwen3's config.json. Raises ConfigError for sliding windows and stretched
    positions.
    """
    only = {"model_type": "qwen3", "use_sliding_window": False}
    return Qwen3Config(**decoder_from_config(data, file, only), family="qwen3")


HF = HuggingFace("qwen3", NAMES, to_config, from_config)
