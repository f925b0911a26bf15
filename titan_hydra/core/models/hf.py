"""Translate a family to and from Hugging Face: the names of its weights, and its config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.load import give_types, leaves
from titan_hydra.core.job.config.ranges import Interval, range_of
from titan_hydra.core.job.parametrization import Rules

from . import Model, build, family_of

DECODER = {  # Hugging Face's names for the modules of layers.py's decoder
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
UNSUPPORTED = (  # keys of a config.json that change what a decoder computes; false, 0 and 1 change nothing
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "qk_layernorm",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "sliding_window_pattern",
    "transformers_weights",  # names another file of weights
    "use_bidirectional_attention",
    "use_qk_norm",
)
EXPERTS = {  # further names for a feed-forward of experts (moe.py)
    "feed_forward.router": "mlp.gate",
    "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj.weight",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj.weight",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj.weight",
    "feed_forward.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared_experts.w2": "mlp.shared_experts.down_proj",
    "feed_forward.shared_experts.w3": "mlp.shared_experts.up_proj",
}


PACKED = {  # an expert's matrix: (tensor with this matrix of all experts, index of its part, number of parts by rows)
    "gate_proj.weight": ("gate_up_proj", 0, 2),
    "up_proj.weight": ("gate_up_proj", 1, 2),
    "down_proj.weight": ("down_proj", 0, 1),
}


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor of the model, and where a folder stores it."""

    name: str  # of the stored tensor
    shape: tuple[int, ...]  # of the stored tensor; the matrix of one expert has no dimension of experts
    box: tuple[slice, ...]  # in the model's tensor
    start: tuple[int, ...]  # where the box begins in the stored tensor


@dataclass(frozen=True)
class HuggingFace:
    """A family in Hugging Face's format. Weights are copied unchanged: one to one, or a stack of experts to one tensor
    per expert.
    """

    model_type: str  # value of model_type or _class_name in config.json
    # Maps our names to Hugging Face's: of modules outside the blocks, of modules in a block, and of tensors other than
    # a module's `weight`.
    names: dict[str, str]
    # (model section, dtype of the weights) -> config.json without token ids
    to_config: Callable[[Any, torch.dtype], dict]
    # (config.json, its file) -> the model section; raises ConfigError for unsupported values
    from_config: Callable[[dict, Path], Model]
    files: str = "model"  # prefix of the names of its weight files

    def of(self, config: Any) -> HuggingFace:
        """Return the HuggingFace record for this model. A family whose names depend on the model overrides this."""
        return self

    def name(self, fqn: str) -> str:
        """Return Hugging Face's name of the tensor `fqn`. For a stack of experts, this is the name of one expert's
        tensor, with {} in place of the expert's number. Raises ConfigError if `names` lacks it.
        """
        block, part = "", fqn
        if fqn.startswith("layers."):
            _, layer, part = fqn.split(".", 2)
            block = f"model.layers.{layer}."
        module = self.names.get(part.removesuffix(".weight")) if part.endswith(".weight") else None
        if (theirs := self.names.get(part) or (f"{module}.weight" if module else None)) is None:
            raise ConfigError(f"{fqn}: model_type={self.model_type} has no name for this tensor in its `names`")
        return block + theirs

    def pieces(self, fqn: str, shape: Sequence[int], there: Collection[str] = ()) -> list[StoredPart]:
        """Return the pieces that make up the tensor `fqn`, for a folder with the tensors `there`: the tensor itself, or the
        experts of a stack, each in a tensor of its own or, as transformers 5 has them in memory, packed into one.
        """
        name, box = self.name(fqn), tuple(slice(0, size) for size in shape)
        experts, _, kind = name.partition("{}.")
        if kind in PACKED and experts + PACKED[kind][0] in there:
            packed, part, parts = PACKED[kind]
            return [StoredPart(experts + packed, (shape[0], parts * shape[1], shape[2]), box, (0, part * shape[1], 0))]
        if "{}" in name:
            return [
                StoredPart(
                    name.format(expert), tuple(shape[1:]), (slice(expert, expert + 1), *box[1:]), (0,) * len(box[1:])
                )
                for expert in range(shape[0])
            ]
        return [StoredPart(name, tuple(shape), box, (0,) * len(box))]

    def parts(self, fqn: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors that are written for `fqn`, by name."""
        return {piece.name: tensor[piece.box].reshape(piece.shape) for piece in self.pieces(fqn, tensor.shape)}


def hf_of(config: Model) -> HuggingFace:
    """Return the HuggingFace record of a model's family. Raises ConfigError if it has none."""
    side = family_of(config).part("hf")
    if side is None:
        raise ConfigError(f"model.family={config.family}: has no Hugging Face format")
    return side.of(config)


def meta_state(config: Model) -> dict[str, Tensor]:
    """Return the tensors of a model's checkpoint on the meta device: parameters and buffers, from the embedding to the
    head.
    """
    with torch.device("meta"):
        return build(config, 1).state_dict(keep_vars=True)


def folded(names: Collection[str], rules: Rules) -> dict[str, float]:
    """Return factors for a decoder's weights, by name. With its weights multiplied by these factors, the decoder
    computes without the scales of a parametrization what it computes with them. A scale is the factor of a preceding
    weight in which the scaled values are linear. Raises ConfigError if there is no such weight.
    """
    normed = any(name.endswith(".attention.q_norm.weight") for name in names)
    scales = (
        ("output", rules.output, ("norm.weight",)),
        ("branch", rules.branch, (".attention.wo.weight", ".w2.weight", ".experts.w2")),
        ("attention", rules.attention, (".attention.q_norm.weight" if normed else ".attention.wq.weight",)),
    )
    factors: dict[str, float] = {}
    for scale_name, scale, ends in scales:
        scaled = (
            [name for name in names if name.endswith(ends) and (scale_name != "output" or name in ends)]
            if scale != 1
            else []
        )
        if scale != 1 and not scaled:
            raise ConfigError(f"its {scale_name} scale of {scale:g} cannot be multiplied into any weight")
        factors |= dict.fromkeys(scaled, scale)
    return factors


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a tensor of `meta_state` is converted: `dtype` for a parameter. A buffer keeps its own
    dtype, as buffers accumulate changes that are too small for 16 bits.
    """
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype


def only_these(config: Model, only: dict[str, Any]) -> None:
    """Raise ConfigError if a key of the model differs from its value in `only`, as the format cannot express other
    values.
    """
    for key, value in only.items():
        if getattr(config, key) != value:
            raise ConfigError(f"model.{key}={getattr(config, key)}: only {value} can be converted")


def only_values(data: dict, file: Path, only: dict[str, Any]) -> None:
    """Raise ConfigError if a key of a config.json differs from its value in `only`, as other values are not supported."""
    for key, value in only.items():
        if data.get(key, value) != value:
            raise ConfigError(f"{file}: {key}={data[key]}: only {value} can be converted")


def decoder_to_config(config: Model, dtype: torch.dtype) -> dict:
    """Return the keys that every decoder's config.json has, without the model's type and token ids."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def decoder_from_config(
    data: dict, file: Path, only: dict[str, Any], scaling: str | None = None, known: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keys of every decoder from a config.json, which may have the old or the new spelling of RoPE. Raises
    ConfigError if a value in it differs from `only`, and for rotary positions other than plain ones and those of the
    kind `scaling`, which have the keys `known` (`rope_of` returns them).
    """
    only_values(data, file, {"hidden_act": "silu", "attention_bias": False, "is_causal": True, **only})
    if data.get("use_sliding_window", True):  # Qwen's configurations name a window that they do not use
        only_values(data, file, {"sliding_window": None})
    if (kinds := set(data.get("layer_types") or ())) - {"full_attention"}:
        raise ConfigError(f"{file}: layer_types={sorted(kinds)}: only full_attention can be converted")
    for key in UNSUPPORTED:
        if (value := data.get(key)) and (value is True or value != 1):
            raise ConfigError(f"{file}: {key}={value}: only null can be converted")
    dim, heads, rope = data["hidden_size"], data["num_attention_heads"], rope_of(data, file)
    _check_scaling(rope, file, scaling, known)
    head_dim = data.get("head_dim")
    return {
        "name": file.parent.name,
        "vocab_size": data["vocab_size"],
        "dim": dim,
        "n_layers": data["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": None if head_dim and head_dim * heads == dim else head_dim,
        "ffn_dim": data["intermediate_size"],
        "norm_eps": data["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_seq_len": data["max_position_embeddings"],
        "tie_embeddings": data.get("tie_word_embeddings", False),
    }


def typed_model(model: Model, file: Path) -> Model:
    """Return the model section that a config.json gives, with the types of its keys. Raises ConfigError for a value of
    another type, such as null, or outside the key's range, and for values that do not fit together.
    """
    held = to_dict(model)
    for fault in give_types(type(model), held, "model."):
        raise ConfigError(f"{file}: {fault}")
    typed: Model = from_dict(type(model), held)
    for name, spec, value, _ in leaves(typed, "model."):
        legal = range_of(spec)
        if value is not None and isinstance(legal, Interval) and (reason := legal.objection(value)):
            raise ConfigError(f"{file}: {Fault(name, value, reason, legal.nearest(value))}")
    for fault in typed.faults():
        raise ConfigError(f"{file}: {fault}")
    return typed


def rope_of(data: dict, file: Path) -> dict[str, Any]:
    """Return what a config.json says about rotary positions, in whichever spelling: `rope_scaling` or `rope_parameters`,
    with `rope_type` or `type`, and the base in it or beside it. The result always has `rope_type`. Raises ConfigError
    if the spellings contradict each other, if scaling has no type, or if only a part of a head is rotated.
    """
    beside = {key: data[key] for key in ("rope_theta", "partial_rotary_factor") if data.get(key) is not None}
    rope: dict[str, Any] = {}
    for part in (data.get("rope_scaling"), data.get("rope_parameters"), beside):
        if part and not isinstance(part, dict):
            raise ConfigError(f"{file}: rotary positions of {part!r}: only a table or null can be converted")
        for spelled, value in (part or {}).items():
            key = "rope_type" if spelled == "type" else spelled
            if value is not None and rope.setdefault(key, value) != value:
                raise ConfigError(f"{file}: {key} of the rotary positions is {rope[key]} and also {value}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"{file}: rotary positions of {nested[0]} alone: only one kind for all blocks can be converted"
        )
    only_values(rope, file, {"partial_rotary_factor": 1.0})
    if "rope_type" not in rope and (others := rope.keys() - {"rope_theta", "partial_rotary_factor"}):
        raise ConfigError(f"{file}: {min(others)}={rope[min(others)]} of the rotary positions, without a rope_type")
    return {"rope_type": "default"} | rope


def _check_scaling(rope: dict[str, Any], file: Path, kind: str | None, known: Collection[str]) -> None:
    """Raise ConfigError if rotary positions are neither plain nor scaled as `kind` (None: a family supports no scaling),
    and for keys that are not `known`.
    """
    rope_type = rope["rope_type"]
    if rope_type not in ("default", kind):
        legal = f"{kind} or default" if kind else "default"
        raise ConfigError(f"{file}: rope_type={rope_type}: only {legal} can be converted")
    for key in sorted(rope.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}):
        if rope_type == "default" or key not in known:
            raise ConfigError(
                f"{file}: {key}={rope[key]} of the rotary positions, with rope_type={rope_type}: not known"
            )
