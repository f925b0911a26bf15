"""Optimizers, the learning rate and QK-clip for reference.py, written only from the papers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from titan_hydra.core.job.config.parts import AdamW, MuonAndAdamW
from titan_hydra.core.job.config.schema import Job

Weights = dict[str, Tensor]


def rate_factor(step: int, steps: int, config: Any) -> float:
    """Return the learning rate of a step (counted from 1) relative to the peak rate, as in TorchTitan 0.2.2."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.name == "constant":
        return 1.0
    rest = steps - config.warmup_steps
    decay = rest if config.name == "cosine" else min(rest, round(steps * config.decay_ratio))
    if (begun := step - (steps + 1 - decay)) <= 0:
        return 1.0
    done, shape = begun / decay, "cosine" if config.name == "cosine" else config.decay_type
    left = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done), "cosine": (1 + math.cos(math.pi * done)) / 2}[shape]
    return config.min_factor + (1 - config.min_factor) * left


def update(name: str, weight: Tensor, gradient: Tensor, state: dict, step: int, factor: float, config: Any) -> None:
    """Apply one step of the parameter's optimizer, in place."""
    decays = weight.dim() > 1 or not config.decay_matrices_only
    if config.name == "sgd":
        gradient = gradient + config.weight_decay * decays * weight
        state["momentum"] = state["momentum"] * config.sgd_momentum + gradient if state else gradient
        weight -= config.lr * factor * state["momentum"]
    elif config.name == "muon" and name.startswith("layers.") and weight.dim() > 1:
        for matrix in range(len(weight)) if weight.dim() > 2 else (...,):  # each expert's matrix, or the only matrix
            _muon(weight[matrix], gradient[matrix], state.setdefault(matrix, {}), factor * config.muon_lr, config)
    else:
        _adamw(weight, gradient, state, step, factor * config.lr, config.weight_decay * decays, config)


def _adamw(weight: Tensor, gradient: Tensor, state: Weights, step: int, lr: float, decay: float, config: AdamW) -> None:
    """Apply one step of AdamW (arXiv 1711.05101), in place."""
    state["mean"] = config.beta1 * state.get("mean", 0) + (1 - config.beta1) * gradient
    state["square"] = config.beta2 * state.get("square", 0) + (1 - config.beta2) * gradient * gradient
    mean, square = state["mean"] / (1 - config.beta1**step), state["square"] / (1 - config.beta2**step)
    weight -= lr * decay * weight + lr * mean / (square.sqrt() + config.eps)


def _muon(weight: Tensor, gradient: Tensor, state: Weights, lr: float, config: MuonAndAdamW) -> None:
    """Apply one step of Muon (kellerjordan.github.io/posts/muon), in place, with five Newton-Schulz iterations in
    bfloat16 as published.
    """
    state["momentum"] = config.muon_momentum * state.get("momentum", 0) + (1 - config.muon_momentum) * gradient
    x = ((1 - config.muon_momentum) * gradient + config.muon_momentum * state["momentum"]).bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
    weight -= lr * config.weight_decay * weight + lr * scale * (x.T if tall else x).double()


def clip_heads(weights: Weights, logits: dict[str, list[float]], job: Job) -> None:
    """Apply QK-clip (arXiv 2507.20534, algorithm 1), in place. `logits` has the largest logit of each head, by layer. Of
    latent attention, the parts without position of a head's query and key take the root of its factor, the rotated query
    takes the factor. Of grouped queries, which share a key, each query takes the factor.
    """
    model: Any = job.model
    for layer, heads in logits.items():
        for head, largest in enumerate(heads):
            if job.optimizer.qk_clip is None or largest <= job.optimizer.qk_clip:
                continue
            factor = job.optimizer.qk_clip / largest
            attention, width = f"{layer}.attention", model.head_width
            queries = next(weights[name] for q in ("wq", "wq_b") if (name := f"{attention}.{q}.weight") in weights)
            query = queries[head * width : (head + 1) * width]
            if f"{attention}.wkv_b.weight" in weights:
                plain, each = model.qk_nope_head_dim, model.qk_nope_head_dim + model.v_head_dim
                query[:plain] *= math.sqrt(factor)
                query[plain:] *= factor
                weights[f"{attention}.wkv_b.weight"][head * each : head * each + plain] *= math.sqrt(factor)
            elif model.n_kv_heads == model.n_heads:
                query *= math.sqrt(factor)
                weights[f"{attention}.wk.weight"][head * width : (head + 1) * width] *= math.sqrt(factor)
            else:
                query *= factor
