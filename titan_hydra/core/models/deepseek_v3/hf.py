"""DeepSeek-V3 in Hugging Face's format, DeepseekV3ForCausalLM. Weights need no permutation, as both models rotate
neighbouring pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.hf import (
    DECODER,
    EXPERTS,
    HuggingFace,
    decoder_from_config,
    decoder_to_config,
    only_these,
    only_values,
    rope_of,
)

from .config import DeepSeekV3Config, Yarn

NAMES = (
    DECODER
    | EXPERTS
    | {
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "head_norm": "shared_head.norm",
    }
)
SAME = (  # keys that have Hugging Face's names
    "first_k_dense_replace",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
KEYS = {
    "n_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
}
KEYS |= {name: name for name in SAME}
ONLY = {
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
YARN += ("attention_factor", "truncate")  # only their usual values
BIAS_UPDATE_RATE = 1e-3  # the paper's rate, as config.json has none


def to_config(config: DeepSeekV3Config, dtype: torch.dtype) -> dict:
    """Return the config.json of a DeepseekV3ForCausalLM, without token ids. Raises ConfigError for routers that Hugging
    Face's class does not support.
    """
    only_these(config, {"router": "sigmoid"})
    if not config.router_bias_update_rate:
        raise ConfigError("model.router_bias_update_rate=0: only routers with a bias can be converted")
    return (
        {"architectures": ["DeepseekV3ForCausalLM"]}
        | ONLY
        | decoder_to_config(config, dtype)
        | {
            **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
            "n_shared_experts": config.n_shared_experts,
            "q_lora_rank": config.q_lora_rank or None,
            "head_dim": config.qk_rope_head_dim,
            "num_nextn_predict_layers": config.mtp,
            "rope_scaling": None if config.yarn.factor == 1 else _scaling(config.yarn),
        }
    )


def _scaling(yarn: Yarn) -> dict:
    """Return the fields of config.json for YaRN; the reverse of `_yarn`."""
    if not yarn.temperature:
        raise ConfigError("model.yarn.temperature=0: only a positive one can be converted")
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.temperature,
        "mscale_all_dim": yarn.temperature,
        "original_max_position_embeddings": yarn.original_max_seq_len,
    }


def from_config(data: dict, file: Path) -> DeepSeekV3Config:
    """Return the model section for a DeepSeek-V3's config.json. Raises ConfigError for features that this model does
    not support.
    """
    common = decoder_from_config(data, file, ONLY, "yarn", YARN) | {"head_dim": None}
    return DeepSeekV3Config(
        **common,
        **{ours: data[theirs] for ours, theirs in KEYS.items()},
        family="deepseek_v3",
        router="sigmoid",
        n_shared_experts=data.get("n_shared_experts") or 0,
        q_lora_rank=data.get("q_lora_rank") or 0,
        mtp=data.get("num_nextn_predict_layers") or 0,
        router_bias_update_rate=BIAS_UPDATE_RATE,
        yarn=_yarn(rope_of(data, file), file),
    )


def _yarn(rope: dict, file: Path) -> Yarn:
    """Return the keys of YaRN from the positions in config.json. Raises ConfigError for a form of it that we lack."""
    if rope["rope_type"] == "default":
        return Yarn()
    temperature = rope.get("mscale_all_dim")
    if not temperature or rope.get("mscale") != temperature:
        raise ConfigError(
            f"{file}: mscale={rope.get('mscale')}: only the value of mscale_all_dim can be converted, which is {temperature}"
        )
    only_values(rope, file, {"attention_factor": None, "truncate": True})
    return Yarn(
        factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast", 32)),
        beta_slow=float(rope.get("beta_slow", 1)),
        temperature=float(temperature),
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


@dataclass(frozen=True)
class DeepSeekFormat(HuggingFace):
    """DeepSeek's own format: each block of multi-token prediction, after the model's blocks, has copies of embedding and
    head. An import reads the model's.
    """

    further: tuple[int, ...] = ()  # the numbers of these blocks
    head: str = "output.weight"  # the parameter that is the head

    def of(self, config: DeepSeekV3Config) -> HuggingFace:
        """Return the record with the numbers of the model's further blocks."""
        head = "tok_embeddings.weight" if config.tie_embeddings else "output.weight"
        return replace(self, further=tuple(range(config.n_layers, config.blocks)), head=head)

    def parts(self, fqn: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors that are written for `fqn`, by name, with the copies of embedding and head."""
        tensors = super().parts(fqn, tensor)
        for name, source in (("embed_tokens", "tok_embeddings.weight"), ("shared_head.head", self.head)):
            if fqn == source:
                tensors |= {f"model.layers.{number}.{name}.weight": tensor.clone() for number in self.further}
        return tensors


HF = DeepSeekFormat("deepseek_v3", NAMES, to_config, from_config)
