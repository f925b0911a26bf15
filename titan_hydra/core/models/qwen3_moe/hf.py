"""Qwen3 with experts at Hugging Face: Qwen3MoeForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.hf import EXPERTS, HuggingFace, decoder_from_config, decoder_to_config, only_these
from titan_hydra.core.models.qwen3.hf import NAMES

from .config import Qwen3MoeConfig

PLAIN = {
    "router": "softmax",
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "router_bias_update_rate": 0.0,
}


def to_config(config: Qwen3MoeConfig, dtype: torch.dtype) -> dict:
    """Return the config.json of a Qwen3MoeForCausalLM, without token ids. Raises ConfigError for experts that Hugging
    Face's class does not support.
    """
    only_these(config, PLAIN)
    return (
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "use_sliding_window": False}
        | decoder_to_config(config, dtype)
        | {
            "num_experts": config.n_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_dim,
            "norm_topk_prob": config.norm_topk_prob,
            "mlp_only_layers": list(range(config.first_k_dense_replace)),
            "decoder_sparse_step": 1,
        }
    )


def from_config(data: dict, file: Path) -> Qwen3MoeConfig:
    """Return the model section for a Qwen3-MoE's config.json. Raises ConfigError for sliding windows, RoPE scaling, and
    dense blocks after sparse ones.
    """
    dense = data.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ConfigError(f"{file}: mlp_only_layers={dense}: only the first blocks may be dense")
    only = {"model_type": "qwen3_moe", "use_sliding_window": False, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(
        **decoder_from_config(data, file, only),
        family="qwen3_moe",
        n_experts=data.get("num_experts") or data["num_local_experts"],
        experts_per_token=data["num_experts_per_tok"],
        expert_dim=data["moe_intermediate_size"],
        first_k_dense_replace=len(dense),
        norm_topk_prob=data["norm_topk_prob"],
    )


HF = HuggingFace("qwen3_moe", NAMES | EXPERTS, to_config, from_config)
