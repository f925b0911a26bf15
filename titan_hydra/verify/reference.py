"""An independent reference in float64: Llama 3 and Qwen3, loss, clipping, optimizers and learning rate, written from their papers alone.

It shares no arithmetic with the trainer: only the initial weights, the batches and the configuration are the same.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from titan_hydra.config.schema import Job, LrSchedule, Model, Optimizer
from titan_hydra.data.batch import Batch

Weights = dict[str, Tensor]


def train_in_float64(job: Job, start: Weights, batches: Callable[[int], Batch]) -> tuple[list[float], list[float], Weights, Weights]:
    """Return losses and gradient norms of all steps, the first gradients and the last weights, from `start` and the batches."""
    weights = {name: value.double().requires_grad_() for name, value in start.items()}
    state: dict[str, Weights] = {name: {} for name in weights}
    losses, norms, first = [], [], {}
    for step in range(1, job.steps + 1):
        loss = mean_loss(weights, batches(step), job.model)
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        first = first or gradients
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        clip = min(1.0, job.optimizer.max_norm / norm) if job.optimizer.max_norm else 1.0
        factor = _rate(step, job.steps, job.lr_scheduler)
        with torch.no_grad():
            for name, weight in weights.items():
                update(name, weight, gradients[name] * clip, state[name], step, factor, job.optimizer)
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, first, {name: weight.detach() for name, weight in weights.items()}


# --- model: arXiv 2407.21783, section 3.2, and 2505.09388; RMSNorm 1910.07467; SwiGLU 2002.05202; grouped queries 2305.13245 ----------

def mean_loss(weights: Weights, batch: Batch, model: Model) -> Tensor:
    """Return the cross-entropy of the labels that count, divided by their number."""
    logits = forward(weights, batch, model).log_softmax(-1)
    counts = batch["labels"] >= 0
    picked = logits.gather(-1, batch["labels"].where(counts, 0).unsqueeze(-1)).squeeze(-1)
    return -(picked * counts).sum() / max(int(counts.sum()), 1)


def forward(weights: Weights, batch: Batch, model: Model) -> Tensor:
    """Return logits [batch, seq, vocab]."""
    size, length = batch["tokens"].shape
    places = torch.arange(length)
    positions = batch.tensors.get("positions", places.expand(size, length))
    sees = (places.unsqueeze(0) <= places.unsqueeze(1)).expand(size, length, length)
    if (documents := batch.tensors.get("documents")) is not None:
        sees = sees & (documents.unsqueeze(2) == documents.unsqueeze(1))
    x = weights["tok_embeddings.weight"][batch["tokens"]]
    for layer in range(model.n_layers):
        block = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items() if name.startswith(f"layers.{layer}.")}
        x = x + attention(block, rms_norm(x, block["attention_norm.weight"], model.norm_eps), positions, sees, model)
        h = rms_norm(x, block["ffn_norm.weight"], model.norm_eps)
        gate = h @ block["feed_forward.w1.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ block["feed_forward.w3.weight"].T)) @ block["feed_forward.w2.weight"].T
    head = weights["tok_embeddings.weight" if model.tie_embeddings else "output.weight"]
    return rms_norm(x, weights["norm.weight"], model.norm_eps) @ head.T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square and multiply by the weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(block: Weights, x: Tensor, positions: Tensor, sees: Tensor, model: Model) -> Tensor:
    """Compute softmax attention head by head; a group of query heads shares one key/value head."""
    width = model.head_width
    outputs = []
    for head in range(model.n_heads):
        shared = head // (model.n_heads // model.n_kv_heads)
        q, k, v = (x @ block[f"attention.{name}.weight"][index * width : (index + 1) * width].T
                   for name, index in (("wq", head), ("wk", shared), ("wv", shared)))
        if "attention.q_norm.weight" in block:
            q, k = (rms_norm(one, block[f"attention.{name}_norm.weight"], model.norm_eps) for name, one in (("q", q), ("k", k)))
        scores = _rotate(q, positions, model) @ _rotate(k, positions, model).transpose(1, 2) / math.sqrt(width)
        outputs.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ v)
    return torch.cat(outputs, -1) @ block["attention.wo.weight"].T


def _rotate(x: Tensor, positions: Tensor, model: Model) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864) to one head [batch, seq, width]; dimension i is paired with i + width / 2."""
    half = x.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * torch.tensor([frequency(i, half, model) for i in range(half)], dtype=torch.float64)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def frequency(i: int, half: int, model: Model) -> float:
    """Return the radians per position of the i-th pair, with Llama 3.1's stretch of the low frequencies."""
    value, scaling = model.rope_theta ** (-i / half), getattr(model, "rope_scaling", None)
    length = 2 * math.pi / value
    if scaling is None or scaling.factor == 1 or length < scaling.original_max_seq_len / scaling.high_freq_factor:
        return value
    if length > scaling.original_max_seq_len / scaling.low_freq_factor:
        return value / scaling.factor
    smooth = (scaling.original_max_seq_len / length - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * value / scaling.factor + smooth * value


# --- optimizers -----------------------------------------------------------------------------------------------------------------------

def _rate(step: int, steps: int, config: LrSchedule) -> float:
    """Return the share of the peak learning rate at a step, counted from 1: warm-up, stable, decay as in TorchTitan 0.2.2."""
    warm = config.warmup_steps
    decay = min(steps - warm, steps - warm if config.name == "cosine" else round(steps * config.decay_ratio))
    stable = steps + 1 - warm - decay
    if step <= warm:
        return step / warm
    if config.name == "constant" or step <= warm + stable:
        return 1.0
    progress = (step - warm - stable) / decay
    shape = "cosine" if config.name == "cosine" else config.decay_type
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}[shape]
    return config.min_factor + (1 - config.min_factor) * left


def update(name: str, weight: Tensor, gradient: Tensor, state: Weights, step: int, factor: float, config: Optimizer) -> None:
    """Apply one step of the parameter's optimizer, in place."""
    decays = weight.dim() > 1 or not config.decay_matrices_only
    if config.name == "sgd":
        gradient = gradient + config.weight_decay * decays * weight
        state["momentum"] = state["momentum"] * config.sgd_momentum + gradient if state else gradient
        weight -= config.lr * factor * state["momentum"]
    elif config.name == "muon" and name.startswith("layers.") and weight.dim() == 2:
        _muon(weight, gradient, state, factor * config.muon_lr, config)
    else:
        _adamw(weight, gradient, state, step, factor * config.lr, config.weight_decay * decays, config)


def _adamw(weight: Tensor, gradient: Tensor, state: Weights, step: int, lr: float, decay: float, config: Optimizer) -> None:
    """Apply one step of AdamW (arXiv 1711.05101), in place."""
    state["mean"] = config.beta1 * state.get("mean", 0) + (1 - config.beta1) * gradient
    state["square"] = config.beta2 * state.get("square", 0) + (1 - config.beta2) * gradient * gradient
    mean, square = state["mean"] / (1 - config.beta1**step), state["square"] / (1 - config.beta2**step)
    weight -= lr * decay * weight + lr * mean / (square.sqrt() + config.eps)


def _muon(weight: Tensor, gradient: Tensor, state: Weights, lr: float, config: Optimizer) -> None:
    """Apply one step of Muon (kellerjordan.github.io/posts/muon), in place; its five Newton-Schulz iterations in bfloat16 as published."""
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
