"""Export a trained model, and read the export as Hugging Face describes the format, with code that is independent of
the exporting code.
"""

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.checkpoint.convert import export_hf
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.config.schema import Parametrization
from titan_hydra.core.job.run.layout import CONFIG
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.trainer import Trainer

from .reference import Weights, mean_loss_of

OUTSIDE = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
IN_BLOCKS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "feed_forward.router",
}
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of an expert


def export_differs(trainer: Trainer, held_out: Sequence[Batch]) -> int:
    """Export the model of a trainer in one process. Return 0 if the export has the same loss in float64 as the
    trainer's weights, else 1. The losses must be exactly equal, except under a parametrization with scales.
    """
    job = trainer.job
    with tempfile.TemporaryDirectory() as scratch:
        run, target = Path(scratch, "run"), Path(scratch, "export")
        run.mkdir()
        config = dataclasses.replace(job.checkpoint, name="sync")
        saved = Checkpointer(config, Run(run, run, 0, 0, 1), trainer.masters.weights, trainer.optimizers)
        saved.save(job.steps, {})
        saved.close()
        CONFIG.of(run).write_text(json.dumps(to_dict(job)))
        export_hf(run, target)
        weights, model = read_export(target)
    weights_of_run = {
        name: parameter.detach().double() for name, parameter in trainer.masters.weights.named_parameters()
    }
    model.family = job.model.family
    plain = dataclasses.replace(job, model=model, parametrization=Parametrization())
    losses = mean_loss_of(weights_of_run, held_out, job), mean_loss_of(weights, held_out, plain)
    # scales are multiplied into the weights of an export, which are then rounded
    return int(not math.isclose(*losses, rel_tol=0 if job.parametrization == plain.parametrization else 1e-6))


def read_export(folder: Path) -> tuple[Weights, Any]:
    """Return the weights of an export in float64 under the names of reference.py, and its config.json as a model
    section.
    """
    weights: Weights = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            path, wide = name.removesuffix(".weight"), tensor.double()
            _, _, layer, *rest = path.split(".") if path.startswith("model.layers.") else (path, "", "")
            if not layer:
                weights[f"{OUTSIDE[path]}.weight"] = wide
            elif "experts" in rest:
                stack = f"layers.{layer}.feed_forward.experts.{MATRICES[rest[-1]]}"
                experts.setdefault(stack, {})[int(rest[-2])] = wide
            else:
                weights[f"layers.{layer}.{IN_BLOCKS['.'.join(rest)]}.weight"] = wide
    weights |= {name: torch.stack([stack[number] for number in sorted(stack)]) for name, stack in experts.items()}
    config = json.loads((folder / "config.json").read_text())
    scaling = config["rope_scaling"]
    if scaling is not None:
        scaling["original_max_seq_len"] = scaling.pop("original_max_position_embeddings")
    model = SimpleNamespace(
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_width=config["head_dim"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        rope_scaling=scaling and SimpleNamespace(**scaling),
        tie_embeddings=config["tie_word_embeddings"],
        n_experts=config.get("num_experts"),
        experts_per_token=config.get("num_experts_per_tok"),
        norm_topk_prob=config.get("norm_topk_prob"),
        router="softmax",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        n_shared_experts=0,
    )
    return weights, model
