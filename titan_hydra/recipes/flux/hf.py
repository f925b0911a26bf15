"""FLUX.1 in Hugging Face's format: the folder `transformer` of black-forest-labs/FLUX.1-schnell and -dev, diffusers'
FluxTransformer2DModel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titan_hydra.core.models.hf import HuggingFace, only_these, only_values

from .config import FluxConfig

AROUND = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "modulation": "norm_out.linear",
    "output": "proj_out",
    **{
        f"{ours}_in.w{number}": f"time_text_embed.{theirs}_embedder.linear_{number}"
        for number in (1, 2)
        for ours, theirs in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
    },
}
DOUBLE = {
    "modulation": "norm1.linear",
    "txt_modulation": "norm1_context.linear",
    "heads.wq": "attn.to_q",
    "heads.wk": "attn.to_k",
    "heads.wv": "attn.to_v",
    "heads.wo": "attn.to_out.0",
    "heads.q_norm": "attn.norm_q",
    "heads.k_norm": "attn.norm_k",
    "txt_heads.wq": "attn.add_q_proj",
    "txt_heads.wk": "attn.add_k_proj",
    "txt_heads.wv": "attn.add_v_proj",
    "txt_heads.wo": "attn.to_add_out",
    "txt_heads.q_norm": "attn.norm_added_q",
    "txt_heads.k_norm": "attn.norm_added_k",
    "feed_forward.w1": "ff.net.0.proj",
    "feed_forward.w2": "ff.net.2",
    "txt_feed_forward.w1": "ff_context.net.0.proj",
    "txt_feed_forward.w2": "ff_context.net.2",
}
SINGLE = {
    "modulation": "norm.linear",
    "heads.wq": "attn.to_q",
    "heads.wk": "attn.to_k",
    "heads.wv": "attn.to_v",
    "heads.q_norm": "attn.norm_q",
    "heads.k_norm": "attn.norm_k",
    "w1": "proj_mlp",
    "w2": "proj_out",
}


@dataclass(frozen=True)
class FluxNames(HuggingFace):
    """The names of FLUX's weights. They depend on the number of double-stream blocks."""

    double_layers: int = 0

    def of(self, config: FluxConfig) -> FluxNames:
        return replace(self, double_layers=config.double_layers)

    def name(self, fqn: str) -> str:
        """Return the name in FLUX's files of a tensor; double-stream blocks and single-stream blocks are numbered
        apart.
        """
        module, _, leaf = fqn.rpartition(".")
        if not module.startswith("layers."):
            return f"{self.names[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        single = int(layer) - self.double_layers
        if single < 0:
            return f"transformer_blocks.{layer}.{DOUBLE[part]}.{leaf}"
        return f"single_transformer_blocks.{single}.{SINGLE[part]}.{leaf}"


def to_config(config: FluxConfig, dtype: torch.dtype) -> dict:
    """Return the config.json of a FluxTransformer2DModel. Raises ConfigError for a value that this format cannot
    express.
    """
    only_these(config, {"rope_theta": 10000.0, "ffn_width": 4 * config.dim})
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": config.patch_width,
        "num_layers": config.double_layers,
        "num_single_layers": config.n_layers - config.double_layers,
        "attention_head_dim": config.head_width,
        "num_attention_heads": config.n_heads,
        "joint_attention_dim": config.text_dim,
        "pooled_projection_dim": config.pooled_dim,
        "guidance_embeds": config.guidance is not None,
        "axes_dims_rope": list(config.rope_axes),
    }


def from_config(data: dict, file: Path) -> FluxConfig:
    """Return the model section for a FluxTransformer2DModel's config.json. Raises ConfigError for values that this
    model does not support.
    """
    heads, width, (first, rows, columns) = (
        data["num_attention_heads"],
        data["attention_head_dim"],
        data.get("axes_dims_rope", (16, 56, 56)),
    )
    given = data | {
        "out_channels": data.get("out_channels") or data["in_channels"],
        "axes_dims_rope": [first, rows, columns],
    }
    only_values(
        given, file, {"patch_size": 1, "out_channels": data["in_channels"], "axes_dims_rope": [first, rows, rows]}
    )
    guided, layers = data.get("guidance_embeds", False), data["num_layers"] + data["num_single_layers"]
    return FluxConfig(
        name=file.parent.name,
        family="flux",
        vocab_size=1,
        dim=heads * width,
        n_layers=layers,
        double_layers=data["num_layers"],
        n_heads=heads,
        n_kv_heads=heads,
        rope_theta=10000.0,
        rope_first=first,
        channels=data["in_channels"] // 4,
        text_len=512 if guided else 256,
        text_dim=data["joint_attention_dim"],
        pooled_dim=data["pooled_projection_dim"],
        guidance=3.5 if guided else None,
    )


HF = FluxNames("FluxTransformer2DModel", AROUND, to_config, from_config, files="diffusion_pytorch_model")
