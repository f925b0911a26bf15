"""A feed-forward of experts: a router sends each token to a few of them, and their outputs are added up, weighted by its scores.

No token is dropped. Everything here runs on one device; expert parallelism replaces the exchange (parallel/experts.py). On the way without
it the host never waits for the device: the numbers of tokens stay there.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .layers import FeedForward
from .sparse import SparseModel


def set_experts(blocks: Any, config: SparseModel) -> None:
    """Give a decoder's blocks experts in place of their feed-forward, but for the first `n_dense_layers`."""
    for number, block in blocks.items():
        if int(number) >= config.n_dense_layers:
            block.feed_forward = MoE(config)
            block.compiled = ("attend", "feed_forward.shared_experts")


class MoE(nn.Module):
    """Routed experts, and shared ones that every token uses: x [batch, seq, dim] to the same shape."""

    def __init__(self, config: SparseModel):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = FeedForward(config.dim, config.expert_dim * config.n_shared_experts) if config.n_shared_experts else None
        self.exchange = Local()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x)
        order = Order(chosen)
        rows = self.exchange(order.spread(x.flatten(0, 1)), counts_of(chosen, self.router.config.n_experts), self.experts)
        y = order.add_up(rows, scores).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


def plain(weight: Tensor) -> Tensor:
    """Return a weight as it is. Parallelism replaces this where a module's weights are split, so that it computes with this rank's part."""
    return weight


class Router(nn.Module):
    """Chooses the experts of each token and scores them, in float32.

    With `balance_rate` a bias is added to the scores for the choice alone (arXiv 2408.15664); checkpoints have it. `load` counts the tokens
    of each expert, and `entropy` sums that of the scores, since the last update. `scale` is the weight of an element in the mean loss.
    """

    def __init__(self, config: SparseModel):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))  # not a Linear, which number formats would convert
        self.read = plain
        self.register_buffer("bias", torch.zeros(config.n_experts) if config.balance_rate else None)
        self.register_buffer("load", torch.zeros(config.n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("entropy", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.zeros(()), persistent=False)
        self.balanced = False  # experts in turn, whatever the scores: debug.balance_experts
        self.over_sequence: nn.Module = nn.Identity()  # adds up counts over the ranks that split a sequence

    def reset_buffers(self) -> None:
        """Set the buffers, which are uninitialized after `to_empty`, to zero."""
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and indices [tokens, experts_per_token] of each token's experts for x [batch, seq, dim]."""
        config = self.config
        logits = F.linear(x, self.read(self.weight)).flatten(0, 1).float()
        scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())
        picked = scores.gather(1, chosen)
        if config.normalize_scores:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        shares = scores / scores.sum(-1, keepdim=True)
        pressure = self.pressure(chosen, len(x)) if config.sequence_balance else None
        return Observed.apply(picked * config.score_scale, shares, chosen, pressure, self.load, self.entropy, self.scale), chosen

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token: the best of the best groups; a group's score is the sum of its two best."""
        config = self.config
        if self.balanced:
            return torch.arange(len(scores) * config.experts_per_token, device=scores.device).view(len(scores), -1) % config.n_experts
        scores = scores if self.bias is None else scores + self.bias
        if config.groups_per_token < config.expert_groups:
            groups = scores.unflatten(-1, (config.expert_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(config.groups_per_token, -1, sorted=False).indices
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(config.experts_per_token, -1, sorted=False).indices

    def pressure(self, chosen: Tensor, sequences: int) -> Tensor:
        """Return the derivative of the balance loss, summed over elements, by each token's shares [tokens, experts]: `sequence_balance`
        times the expert's tokens in the sequence, relative to an even number of them.
        """
        indices = chosen.view(sequences, -1)
        counts = self.over_sequence(torch.zeros(sequences, self.config.n_experts, device=chosen.device).scatter_add_(
            1, indices, torch.ones_like(indices, dtype=torch.float32)))
        excess = counts * (self.config.n_experts * self.config.sequence_balance) / counts.sum(-1, keepdim=True)
        return excess.repeat_interleave(len(chosen) // sequences, 0)


class Observed(torch.autograd.Function):
    """Returns the scores unchanged. The backward counts each expert's tokens, adds up the entropy of the shares, and adds the gradient of
    the balance loss.

    A backward runs once for each microbatch, however often activation checkpointing recomputes the forward, and never in a validation.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shares: Tensor, chosen: Tensor, pressure: Tensor | None, *buffers: Tensor) -> Tensor:
        ctx.save_for_backward(shares, chosen, pressure)
        ctx.buffers = buffers
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (shares, chosen, pressure), (load, entropy, scale) = ctx.saved_tensors, ctx.buffers
        load.add_(counts_of(chosen, len(load)))
        entropy.add_(torch.special.entr(shares).sum())
        return gradient, None if pressure is None else pressure * scale, *[None] * 5


class Experts(nn.Module):
    """SwiGLU feed-forwards, one for each expert, as three stacked matrices [experts, ...]."""

    def __init__(self, config: SparseModel):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.n_experts, config.expert_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.n_experts, config.dim, config.expert_dim))
        self.w3 = nn.Parameter(torch.empty(config.n_experts, config.expert_dim, config.dim))
        self.read = plain

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows [tokens, dim], the first counts[0] of them with expert 0, the next counts[1] with expert 1, ..."""
        ends = counts.cumsum(0).to(torch.int32)
        w1, w2, w3 = (self.read(weight).transpose(-2, -1) for weight in (self.w1, self.w2, self.w3))
        return F.grouped_mm(F.silu(F.grouped_mm(rows, w1, offs=ends)) * F.grouped_mm(rows, w3, offs=ends), w2, offs=ends)


class Local(nn.Module):
    """Computes rows that are in the order of their experts, counts[e] of them for expert e, with experts that are all on this device."""

    def forward(self, rows: Tensor, counts: Tensor, experts: nn.Module) -> Tensor:
        return experts(rows, counts)


class Order:
    """The order of (token, expert) pairs in which each expert's are next to each other; within an expert tokens keep their order."""

    def __init__(self, chosen: Tensor):
        """Take the experts [tokens, k] of each token."""
        self.each = chosen.shape[1]
        self.order = chosen.flatten().argsort(stable=True)
        self.inverse = inverse(self.order)

    def spread(self, x: Tensor) -> Tensor:
        """Return each token's row [tokens, dim] once for each of its experts, in expert order."""
        return Spread.apply(x, self.order, self.inverse, self.each)

    def add_up(self, rows: Tensor, scores: Tensor) -> Tensor:
        """Return the sum over each token's experts of their rows times their scores, in a fixed order."""
        rows = Permute.apply(rows, self.inverse, self.order).unflatten(0, (-1, self.each))
        return torch.bmm(scores.to(rows.dtype).unsqueeze(1), rows).squeeze(1)


class Spread(torch.autograd.Function):
    """Copies row order[i] // each to place i. Its backward adds the copies up in a fixed order, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.each = each
        return x.index_select(0, order // each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, ctx.each)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Puts row order[i] at place i; the backward, by the inverse of `order`, puts it back without atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Return how many of the indices each expert has [experts]. bincount would make the host wait for the device."""
    indices = chosen.flatten()
    return indices.new_zeros(experts).scatter_add_(0, indices, torch.ones_like(indices))
