"""An independent reference in float64: Llama 3, Qwen3, DeepSeek-V3, loss, clipping, optimizers, learning rate, muP and
CompleteP, written only from the papers.

It shares no arithmetic with the trainer: only the initial weights, the batches and the configuration are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.registry import OBJECTIVES, resolve
from titan_hydra.core.job.config.schema import Job

from .inputs import Order, odd_starts
from .multipliers import Multipliers, scaled_optimizer
from .positions import rotate_halves, rotate_pairs
from .updates import Weights, clip_heads, rate_factor, update

DOUBT = 1e-5  # relative change of a score by which a token may not change its experts, or its choice is in doubt
Sparse = Any  # the `model` section of a family with experts; its keys depend on the family


@dataclass
class Routed:
    """What a forward notes beside its logits, by layer."""

    # (whether a token chose an expert, the expert's share of the token's scores), each for all tokens and experts; number
    # of tokens that stand between two experts (`_in_doubt`)
    experts: dict[str, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    residual: Tensor | None = None  # the last block's output
    logits: dict[str, list[float]] = field(default_factory=dict)  # the largest logit of each head of attention


@dataclass
class Trace:
    """The values of a run that are compared. Tensors are whole, not sharded."""

    losses: list[float]  # mean loss of each step
    norms: list[float]  # gradient norm of each step
    gradients: Weights  # gradients of the first step
    start: Weights  # initial weights
    weights: Weights  # weights at the end
    loads: list[dict[str, list[float]]]  # for each step: number of tokens of each expert, by layer
    biases: Weights  # all buffers at the end, including the routers' biases
    drift: int = 0  # see Outcome.drift
    rounded: int = 0  # see Outcome.rounded
    # number of initial tensors (`odd_starts`) and random states (restart.restarted) that are wrong in one process
    odd: int = 0
    data: int = 0  # see Outcome.data
    export: int = 0  # see Outcome.export
    doubtful: int = 0  # see Outcome.doubtful
    columns: list[float] = field(default_factory=list)  # the objective's columns that belong to the losses


def train_in_float64(
    job: Job,
    start: Weights,
    batches: Callable[[int], Batch],
    held_out: Sequence[Batch] = (),
    then: Job | None = None,
) -> Trace:
    """Train all steps of a job from the weights `start`, with the batches `batches(step)`. If there are `held_out`
    batches, their mean loss follows those of the steps. The second half of the steps has the optimizer and the schedule
    of the job `then`.
    """
    trained = {name: value for name, value in start.items() if ".lora_" in name} or start
    weights = {name: value.double().requires_grad_() for name, value in trained.items()}
    frozen = {name: value.double() for name, value in start.items() if name not in trained}
    state: dict[str, dict] = {name: {} for name in weights}
    averages: Weights = {}
    model: Sparse = job.model
    record = Trace([], [], {}, trained, {}, [], first_biases(start, job.model), odd=odd_starts(start, job))
    order = Order(job)
    for step in range(1, job.steps + 1):
        now = then if then is not None and step > job.steps // 2 else job
        batch = batches(step)
        record.data += order.faults(batch)
        loss, imbalance, routed = mean_loss(merged(frozen | weights, job) | record.biases, batch, job)
        loads = {name: chosen.sum((0, 1)).double() for name, (chosen, *_) in routed.experts.items()}
        record.doubtful += sum(doubtful for *_, doubtful in routed.experts.values())
        gradients = dict(zip(weights, torch.autograd.grad(loss + imbalance, list(weights.values())), strict=True))
        record.gradients = record.gradients or gradients
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        clip = min(1.0, now.optimizer.max_norm / max(norm, 1e-30)) if now.optimizer.max_norm else 1.0
        factor = rate_factor(step, job.steps, now.lr_scheduler)
        with torch.no_grad():
            for name, weight in weights.items():
                rates = scaled_optimizer(name, tuple(weight.shape), now)
                update(name, weight, gradients[name] * clip, state[name], step, factor, rates)
            clip_heads(weights, routed.logits, now)
            for name, weight in weights.items():
                averages[name] = weight.lerp(averages.get(name, weight), min(now.optimizer.ema_decay, 1 - 1 / step))
        for name, bias in record.biases.items():
            load = loads[name.removesuffix(".router.bias")]
            bias += model.router_bias_update_rate * (load.mean() - load).sign().float()
        record.losses.append(loss.item())
        record.norms.append(norm)
        record.loads.append({name: load.tolist() for name, load in loads.items()})
    record.weights = {name: weight.detach() for name, weight in weights.items()}
    if held_out:
        everything = merged(frozen | (averages if job.validation.ema else record.weights), job) | record.biases
        record.losses.append(mean_loss_of(everything, held_out, job))
        record.data += sum(order.repeated(batch) for batch in held_out)
    return record


def first_biases(start: Weights, model: Sparse) -> Weights:
    """Return the initial biases of the routers (arXiv 2408.15664): zero, and float32 as in every run."""
    routers = [name.removesuffix("weight") for name in start if name.endswith(".router.weight")]
    return {
        f"{router}bias": torch.zeros(model.n_experts)
        for router in routers
        if getattr(model, "router_bias_update_rate", 0)
    }


def merged(weights: Weights, job: Job) -> Weights:
    """Return the weights with the product of each adapter's matrices added to its linear (arXiv 2106.09685)."""
    keys: Any = job.adapter
    whole = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, weight in whole.items():
        owner, _, leaf = name.rpartition(".")
        tail = "" if leaf == "weight" else f"_{leaf}"  # a stack of experts holds several matrices
        if f"{owner}.lora_a{tail}" in weights:
            whole[name] = weight + keys.alpha / keys.rank * (
                weights[f"{owner}.lora_b{tail}"] @ weights[f"{owner}.lora_a{tail}"]
            )
    return whole


# --- model: arXiv 2407.21783, section 3.2, and 2505.09388; RMSNorm 1910.07467; SwiGLU 2002.05202; grouped queries 2305.


def mean_loss(weights: Weights, batch: Batch, job: Job) -> tuple[Tensor, Tensor, Routed]:
    """Return (mean loss of the elements that count, mean balance loss of a sequence over all layers, what the forward
    noted). The loss is the cross-entropy of labels, or the loss that the objective's record defines for this reference.
    """
    routed = Routed()
    summed, number = summed_loss(weights, batch, job, routed)
    summed = summed + further_losses(weights, batch.tensors, job, routed)
    layers = routed.experts.values()
    imbalance = sum((_unbalanced(*layer[:2], job.model).mean() for layer in layers), torch.zeros(()))
    return summed / max(number, 1), imbalance, routed


def mean_loss_of(weights: Weights, batches: Sequence[Batch], job: Job) -> float:
    """Return the mean loss of several batches."""
    sums = [summed_loss(weights, batch, job, Routed()) for batch in batches]
    return sum(summed.item() for summed, _ in sums) / sum(number for _, number in sums)


def summed_loss(weights: Weights, batch: Batch, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed loss of the elements that count, and their number."""
    exact = resolve(OBJECTIVES[job.objective.name].exact) or next_token_loss
    return exact(weights, batch.tensors, job, routed)


def next_token_loss(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the labels that count, and their number."""
    labels = following(batch)
    return -logs_of_labels(weights, batch, labels, job, routed).sum(), int((labels >= 0).sum())


def following(batch: Weights) -> Tensor:
    """Return the labels that follow from the tokens and documents: the next token of the document, or -1 if the label
    does not count in the batch. Only the last label of a sample is taken from the batch.
    """
    tokens, counts = batch["tokens"], batch["labels"] >= 0
    if (documents := batch.get("documents")) is not None:
        counts = counts & torch.cat((documents[:, 1:] == documents[:, :-1], counts[:, -1:]), 1)
    return torch.cat((tokens[:, 1:], batch["labels"][:, -1:]), 1).where(counts, -1)


def logs_of_labels(
    weights: Weights, batch: Weights, labels: Tensor, job: Job, routed: Routed, x: Tensor | None = None
) -> Tensor:
    """Return the log-probability of each label [batch, seq]; 0 where the label is negative. `x` has the embeddings; if
    it is None, they are looked up for the tokens. `forward` explains `routed`.
    """
    if exact := resolve(family_of(job.model).exact):
        logits = exact(weights, batch, job)
    else:
        x = weights["tok_embeddings.weight"][batch["tokens"]] if x is None else x
        logits = forward(weights, x, batch.get("documents"), job.model, routed, Multipliers.of(job))
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)


def forward(
    weights: Weights, x: Tensor, documents: Tensor | None, model: Model, routed: Routed, scales: Multipliers
) -> Tensor:
    """Return logits [batch, seq, vocab] of embeddings x. `documents` [batch, seq] has the number of each token's
    document; a token attends only to its own document, and positions begin at 0 in each. Stores in `routed`, by layer,
    which experts the router chose and their shares, and the largest logits of attention.
    """
    places = places_of(x, documents)
    for layer in range(model.n_layers):
        x = output_of_block(weights, f"layers.{layer}", x, places, model, routed, scales)
    routed.residual = x
    return rms_norm(x, weights["norm.weight"], model.norm_eps) @ head_of(weights, model).T / scales.width


def head_of(weights: Weights, model: Model) -> Tensor:
    """Return the matrix of the head."""
    return weights["tok_embeddings.weight" if model.tie_embeddings else "output.weight"]


def places_of(x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the position of each token [batch, seq], and whether it sees each other token [batch, seq, seq]."""
    size, length, _ = x.shape
    places = torch.arange(length)
    positions, sees = places.expand(size, length), (places <= places.unsqueeze(1)).expand(size, length, length)
    if documents is not None:
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        positions, sees = places - same.int().argmax(-1), sees & same
    return positions, sees


def output_of_block(
    weights: Weights,
    name: str,
    x: Tensor,
    places: tuple[Tensor, Tensor],
    model: Model,
    routed: Routed,
    scales: Multipliers,
) -> Tensor:
    """Return the output of one block."""
    block = {
        weight_name.removeprefix(f"{name}."): value
        for weight_name, value in weights.items()
        if weight_name.startswith(f"{name}.")
    }
    attend = latent_attention if "attention.wkv_a.weight" in block else attention
    h = rms_norm(x, block["attention_norm.weight"], model.norm_eps)
    y, routed.logits[name] = attend(block, h, *places, model, scales.sharpness)
    x = x + y / scales.depth
    h = rms_norm(x, block["ffn_norm.weight"], model.norm_eps)
    if "feed_forward.router.weight" in block:
        y, chosen, shares, doubtful = _experts(block, h, model)
        routed.experts[f"{name}.feed_forward"] = chosen, shares, doubtful
    else:
        y = swiglu(h, *(block[f"feed_forward.{weight_name}.weight"] for weight_name in ("w1", "w2", "w3")))
    return x + y / scales.depth


def further_losses(weights: Weights, batch: Weights, job: Job, routed: Routed) -> Tensor | float:
    """Return the weighted sum of the losses of further predictions (2412.19437, equations 21 to 25). The k-th sees the
    token k places ahead and predicts the one after. At the last k places, where there is none, it sees token 0.
    """
    model: Any = job.model
    total: Tensor | float = 0.0
    if model.predictions == 1 or routed.residual is None:
        return total
    tokens, labels, documents = batch["tokens"], following(batch), batch.get("documents")
    h, places = routed.residual, places_of(routed.residual, documents)
    for k in range(1, model.mtp + 1):
        name, left = f"layers.{model.n_layers + k - 1}", tokens.shape[1] - k
        seen = torch.cat((tokens[:, k:], torch.zeros_like(tokens[:, :k])), 1)
        embedded = rms_norm(weights["tok_embeddings.weight"][seen], weights[f"{name}.enorm.weight"], model.norm_eps)
        h = torch.cat((embedded, rms_norm(h, weights[f"{name}.hnorm.weight"], model.norm_eps)), -1)
        h = h @ weights[f"{name}.eh_proj.weight"].T
        h = output_of_block(weights, name, h, places, model, routed, Multipliers.of(job))
        logits = rms_norm(h, weights[f"{name}.head_norm.weight"], model.norm_eps) @ head_of(weights, model).T
        target = labels[:, k:]
        if documents is not None:
            target = target.where(documents[:, k:] == documents[:, :left], -1)
        logs = logits[:, :left].log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total = total - model.mtp_weight / model.mtp * (logs * (target >= 0)).sum()
    return total


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return (gate * torch.sigmoid(gate) * (x @ w3.T)) @ w2.T


def affine(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a linear, which may have a bias."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def standardized(x: Tensor, eps: float) -> Tensor:
    """Return rows with mean 0 and variance 1, before the weights of a LayerNorm."""
    x = x - x.mean(-1, keepdim=True)
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Return GELU in its approximation by tanh (arXiv 1606.08415)."""
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(
    block: Weights, x: Tensor, positions: Tensor, sees: Tensor, model: Model, sharpness: float
) -> tuple[Tensor, list[float]]:
    """Compute softmax attention head by head; a group of query heads shares one key/value head. `sharpness` multiplies
    the products of queries and keys. Returns also the largest logit of each head.
    """
    width = model.head_width
    outputs, largest = [], []
    for head in range(model.n_heads):
        shared = head // (model.n_heads // model.n_kv_heads)
        q, k, v = (
            x @ block[f"attention.{name}.weight"][index * width : (index + 1) * width].T
            for name, index in (("wq", head), ("wk", shared), ("wv", shared))
        )
        if "attention.q_norm.weight" in block:
            q, k = (
                rms_norm(heads, block[f"attention.{name}_norm.weight"], model.norm_eps)
                for name, heads in (("q", q), ("k", k))
            )
        scores = rotate_halves(q, positions, model) @ rotate_halves(k, positions, model).transpose(1, 2) * sharpness
        scores = scores.masked_fill(~sees, -math.inf)
        largest.append(scores.max().item())
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1) @ block["attention.wo.weight"].T, largest


# --- experts and latent attention: arXiv 2412.19437, section 2.1; 2505.09388, section 2 -------------------------------


def _experts(block: Weights, x: Tensor, model: Sparse) -> tuple[Tensor, Tensor, Tensor, int]:
    """Compute every expert for every token. Returns (sum over the experts that the router chose, for each expert
    whether it was chosen [batch, seq, experts], each expert's share of the token's scores, number of tokens in doubt).
    """
    logits = x @ block["feed_forward.router.weight"].T
    scores = logits.softmax(-1) if model.router == "softmax" else 1 / (1 + torch.exp(-logits))
    wanted = scores.detach() + block.get("feed_forward.router.bias", 0)
    chosen = _choice(wanted, model)
    gates = scores * chosen
    if model.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    w1, w2, w3 = (block[f"feed_forward.experts.{name}"] for name in ("w1", "w2", "w3"))
    y = torch.zeros_like(x)
    for expert in range(model.n_experts):
        y = y + model.routed_scaling_factor * gates[..., expert, None] * swiglu(x, w1[expert], w2[expert], w3[expert])
    if model.n_shared_experts:
        y = y + swiglu(x, *(block[f"feed_forward.shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")))
    return y, chosen, scores / scores.sum(-1, keepdim=True), _in_doubt(wanted, chosen, model)


def _in_doubt(scores: Tensor, chosen: Tensor, model: Sparse) -> int:
    """Count the tokens that choose other experts after a small random change of all scores, as by float32's rounding."""
    dice = torch.Generator().manual_seed(0)
    nudged = (scores * (1 + DOUBT * torch.rand(scores.shape, generator=dice, dtype=scores.dtype)) for _ in range(4))
    return max(int((_choice(nudged_scores, model) != chosen).any(-1).sum()) for nudged_scores in nudged)


def _choice(scores: Tensor, model: Sparse) -> Tensor:
    """Return for each token and expert whether the token uses the expert, which must have one of the highest scores in
    the best groups. A group is rated by the sum of its two highest scores.
    """
    width = model.n_experts // model.n_group
    groups = scores.unflatten(-1, (model.n_group, width))
    strength = groups.sort(-1, descending=True).values[..., :2].sum(-1)
    allowed = (_place(strength) < model.topk_group).repeat_interleave(width, -1)
    return _place(scores.masked_fill(~allowed, -math.inf)) < model.experts_per_token


def _place(x: Tensor) -> Tensor:
    """Return each element's place in the descending order of its row; the largest element has place 0."""
    return x.argsort(-1, descending=True).argsort(-1)


def _unbalanced(chosen: Tensor, shares: Tensor, model: Sparse) -> Tensor:
    """Return the balance loss of each sequence (2412.19437, equations 17 to 20): the sum of f P over experts. f is the
    number of the sequence's tokens that chose the expert, relative to an even distribution; P is the expert's mean
    share.
    """
    f = chosen.double().mean(1) * model.n_experts / model.experts_per_token
    return model.sequence_balance * (f * shares.mean(1)).sum(-1)


def latent_attention(
    block: Weights, x: Tensor, positions: Tensor, sees: Tensor, model: Sparse, sharpness: float
) -> tuple[Tensor, list[float]]:
    """Compute multi-head latent attention head by head; all heads share the rotated part of the key. DeepSeek-V3's
    epsilon for latents is always 1e-6. Returns also the largest logit of each head.
    """
    plain, value, width = model.qk_nope_head_dim, model.v_head_dim, model.qk_nope_head_dim + model.qk_rope_head_dim
    down = x @ block["attention.wkv_a.weight"].T
    latent = rms_norm(down[..., : model.kv_lora_rank], block["attention.kv_norm.weight"], 1e-6)
    shared = rotate_pairs(down[..., model.kv_lora_rank :], positions, model)
    source, matrix = x, "wq"
    if model.q_lora_rank:
        source, matrix = rms_norm(x @ block["attention.wq_a.weight"].T, block["attention.q_norm.weight"], 1e-6), "wq_b"
    sharpness *= (1 + 0.1 * model.yarn.temperature * math.log(model.yarn.factor)) ** 2
    outputs, largest = [], []
    for head in range(model.n_heads):
        q = source @ block[f"attention.{matrix}.weight"][head * width : (head + 1) * width].T
        kv = latent @ block["attention.wkv_b.weight"][head * (plain + value) : (head + 1) * (plain + value)].T
        scores = q[..., :plain] @ kv[..., :plain].transpose(1, 2)
        scores = scores + rotate_pairs(q[..., plain:], positions, model) @ shared.transpose(1, 2)
        scores = (scores * sharpness).masked_fill(~sees, -math.inf)
        largest.append(scores.max().item())
        outputs.append(scores.softmax(-1) @ kv[..., plain:])
    return torch.cat(outputs, -1) @ block["attention.wo.weight"].T, largest
