"""Translate Llama 3 to and from Hugging Face: names of weights, and config.json. Weights need no permutation, as both use the same RoPE
layout.
"""
from pathlib import Path

import torch

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.load import ffn_width
from titan_hydra.config.schema import Model, RopeScaling

from .. import build

NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}


def hf_name(fqn: str) -> str:
    """Return Hugging Face's name of the parameter `fqn`."""
    if not fqn.startswith("layers."):
        return f"{NAMES[fqn.removesuffix('.weight')]}.weight"
    _, layer, part = fqn.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def parameter_shapes(config: Model) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, from the embedding to the head. Raises ConfigError for a family other than Llama."""
    if config.family != "llama3":
        raise ConfigError(f"model.family={config.family}: has no Hugging Face format here; legal: llama3")
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build(config, 1).named_parameters()}


def to_hf_config(config: Model, dtype: torch.dtype) -> dict:
    """Return the config.json of a LlamaForCausalLM, without token ids."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": ffn_width(config),
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.dim // config.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling.factor == 1 else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def from_hf_config(data: dict, file: Path) -> Model:
    """Return the model section for a Llama's config.json (old and new spelling of RoPE). Raises ConfigError for features that Llama 3 does
    not have.
    """
    for key, only in [("model_type", "llama"), ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)]:
        if data.get(key, only) != only:
            raise ConfigError(f"{file}: {key}={data[key]}: only {only} can be converted")
    dim, heads, width = data["hidden_size"], data["num_attention_heads"], data["intermediate_size"]
    if (data.get("head_dim") or dim // heads) * heads != dim:
        raise ConfigError(f"{file}: head_dim={data['head_dim']}: only hidden_size / num_attention_heads can be converted")
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return Model(
        name=file.parent.name,
        vocab_size=data["vocab_size"],
        dim=dim,
        n_layers=data["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=data.get("num_key_value_heads") or heads,
        # Reproduces any width: at most `width`, rounded up to a multiple of it.
        ffn_dim_multiplier=min(1.0, width / int(8 * dim / 3)),
        multiple_of=width,
        norm_eps=data["rms_norm_eps"],
        rope_theta=float(data.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, file),
        max_seq_len=data["max_position_embeddings"],
        tie_embeddings=data.get("tie_word_embeddings", False),
    )


def _rope_scaling(rope: dict, file: Path) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling(factor=1.0)
    if kind != "llama3":
        raise ConfigError(f"{file}: rope_type={kind}: only llama3 or default can be converted")
    return RopeScaling(factor=rope["factor"], low_freq_factor=rope["low_freq_factor"], high_freq_factor=rope["high_freq_factor"],
                       original_max_seq_len=rope["original_max_position_embeddings"])
