"""A feed-forward of experts: a router sends each token to a few experts, and their outputs are added up, weighted by
the router's scores.

No token is dropped. Everything here runs on one device; expert parallelism replaces the exchange (core/parallel/experts.py).
Without expert parallelism the host never waits for the device, as the numbers of tokens stay on the device.

A block of experts is compiled in parts. Between these parts, `keep` computes some values once in the forward and not
again when activation checkpointing recomputes the forward: the choice of experts, and values that must be the same on
several ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan_hydra.core.job.recomputation import keep
from titan_hydra.core.kernels.grouped import grouped_matmul, sent_grouped_matmul

from .layers import FeedForward
from .sparse import SparseModel

PARTS = (
    "attend",
    "feed_forward.router.rate",
    "feed_forward.router.plan",
    "feed_forward.experts.forward",
    "feed_forward.add_up",
)


def set_experts(blocks: Any, config: SparseModel) -> None:
    """Give a decoder's blocks experts in place of their feed-forward, except the first `first_k_dense_replace` blocks."""
    for number, block in blocks.items():
        if int(number) >= config.first_k_dense_replace:
            block.feed_forward = MoE(config)
            block.compiled = (*PARTS, "feed_forward.shared_experts.forward") if config.n_shared_experts else PARTS


class MoE(nn.Module):
    """Routed experts, and shared experts that every token uses. Maps x [batch, seq, dim] to the same shape."""

    def __init__(self, config: SparseModel):
        """Create the experts; `exchange` is replaced by one that sends tokens to other ranks under expert parallelism."""
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            FeedForward(config.dim, config.expert_dim * config.n_shared_experts) if config.n_shared_experts else None
        )
        self.exchange = Local()

    def forward(self, x: Tensor) -> Tensor:
        scores, plan = self.router(x)
        rows = self.exchange(x.flatten(0, 1), plan, self.experts)
        y = self.add_up(rows, scores, plan.chosen).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def add_up(self, rows: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return for each token the sum of its experts' rows [tokens * k, dim] times their gates, in a fixed order:
        [tokens, dim].
        """
        gates = self.router.gates(scores, chosen).to(rows.dtype)
        return (rows.unflatten(0, gates.shape) * gates.unsqueeze(-1)).sum(1)


def plain(weight: Tensor) -> Tensor:
    """Return a weight unchanged. A module calls this function as its attribute `read`; parallelism that splits the
    module's weights sets `read` to a function that returns this rank's part.
    """
    return weight


class Destinations(NamedTuple):
    """The experts of a rank's tokens. `order` puts the (token, expert) pairs of one expert next to each other, in the
    order of the tokens.
    """

    chosen: Tensor  # [tokens, k]: the experts of each token
    order: Tensor  # [tokens * k], int32: for each row of the sorted order, the number of its (token, expert) pair
    inverse: Tensor  # [tokens * k], int32: for each (token, expert) pair, its row in the sorted order
    counts: Tensor  # [experts], int32: number of tokens of each expert

    def spread(self, rows: Tensor) -> Tensor:
        """Return each token's row [tokens, dim] once for each expert of the token, sorted by expert."""
        return Moved.apply(rows, self.order, self.inverse)

    def restore(self, rows: Tensor) -> Tensor:
        """Put a row for each pair back into the order of the tokens."""
        return Moved.apply(rows, self.inverse, self.order)


def sorted_by_expert(chosen: Tensor, count: int) -> Destinations:
    """Sort the (token, expert) pairs by expert; `chosen` [tokens, k] are the experts of each token, of `count` experts. The
    tokens of an expert are counted in the sorted order, without atomic additions and without a wait of the host.
    """
    # int32, as a radix sort makes one pass for each byte of a key
    experts, order = chosen.flatten().int().sort(stable=True)
    each = torch.arange(count, device=chosen.device, dtype=torch.int32)
    ends = torch.searchsorted(experts, each, right=True, out_int32=True)
    positions = torch.arange(len(order), device=chosen.device, dtype=torch.int32)
    inverse = torch.empty_like(positions).scatter_(0, order, positions)
    return Destinations(chosen, order.int(), inverse, torch.diff(ends, prepend=torch.zeros_like(ends[:1])))


class Router(nn.Module):
    """Scores the experts for each token, in float32, and chooses among them. The family's `float32_router` states whether
    the router's matmul is in float32 too.

    With `router_bias_update_rate` a bias is added to the scores, but only to choose experts (arXiv 2408.15664). The
    bias is part of checkpoints. `load` counts the tokens of each expert since the bias was last updated, and `entropy`
    sums the entropies of the scores. `scale` is the weight of a token in the balance loss.
    """

    def __init__(self, config: SparseModel):
        """Create the router's weight. `load` counts the tokens of each expert in a step, `scale` is 1 over the tokens
        of a step, and `read` may be replaced by a function that reads a sharded weight.
        """
        super().__init__()
        self.config = config
        # not an nn.Linear, as number formats would convert it
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.read = plain
        self.register_buffer("bias", torch.zeros(config.n_experts) if config.router_bias_update_rate else None)
        self.register_buffer("load", torch.zeros(config.n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("entropy", torch.zeros(()), persistent=False)
        self.scale = 0.0
        self.balanced = False  # whether tokens get experts in turn, whatever the scores are (debug.balance_experts)
        self.over_sequence: nn.Module = nn.Identity()  # adds up counts over the ranks that split a sequence

    def reset_buffers(self) -> None:
        """Set the buffers, which are uninitialized after `to_empty`, to zero."""
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Destinations]:
        """Return the scores [tokens, experts] for x [batch, seq, dim], and the experts of the tokens."""
        scores, shares, entropy = self.rate(x)
        plan = keep(self.plan, scores.detach())
        excess = keep(self.excess, plan.chosen, len(x)) if self.config.sequence_balance else None
        return Observed.apply(scores, shares, plan.counts, entropy, excess, self.load, self.entropy), plan

    def rate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, shares (scores that add up to 1 for a token), both [tokens, experts], and the sum of the
        shares' entropies.
        """
        weight = self.read(self.weight)
        if self.config.float32_router:
            x, weight = x.float(), weight.float()
        logits = F.linear(x, weight).flatten(0, 1).float()
        scores = logits.softmax(-1) if self.config.router == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        return scores, shares, torch.special.entr(shares.detach()).sum()

    def plan(self, scores: Tensor) -> Destinations:
        """Choose the experts of each token, and sort the (token, expert) pairs by expert."""
        return sorted_by_expert(self.choose(scores), self.config.n_experts)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token: those with the highest scores in the best groups. A group is rated by the
        sum of its two highest scores.
        """
        config = self.config
        if self.balanced:
            return (
                torch.arange(len(scores) * config.experts_per_token, device=scores.device).view(len(scores), -1)
                % config.n_experts
            )
        scores = scores if self.bias is None else scores + self.bias
        if config.topk_group < config.n_group:
            groups = scores.unflatten(-1, (config.n_group, -1))
            best = (
                groups.topk(min(2, groups.shape[-1]), -1)
                .values.sum(-1)
                .topk(config.topk_group, -1, sorted=False)
                .indices
            )
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(config.experts_per_token, -1, sorted=False).indices

    def gates(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the factors [tokens, k] by which the outputs of each token's experts are multiplied."""
        picked = scores.gather(1, chosen)
        if self.config.norm_topk_prob:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        return picked * self.config.routed_scaling_factor

    def excess(self, chosen: Tensor, sequences: int) -> Tensor:
        """Return the derivative of the balance loss with respect to a token's shares: [sequences, experts], as it is
        the same for all tokens of a sequence. It is the product of `sequence_balance`, a token's weight in the loss,
        and the ratio of the expert's tokens in the sequence to the number in an even distribution.
        """
        indices = chosen.view(sequences, -1)
        counts = self.over_sequence(
            torch.zeros(sequences, self.config.n_experts, device=chosen.device).scatter_add_(
                1, indices, torch.ones_like(indices, dtype=torch.float32)
            )
        )
        return (
            counts * (self.config.n_experts * self.config.sequence_balance * self.scale) / counts.sum(-1, keepdim=True)
        )


class Observed(torch.autograd.Function):
    """Returns the scores unchanged. The backward counts each expert's tokens, adds up the entropy of the shares, and
    adds the gradient of the balance loss.

    The backward does this because it runs exactly once for each microbatch, even if activation checkpointing recomputes
    the forward, and never in a validation.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, shares: Tensor, counts: Tensor, entropy: Tensor, excess: Tensor | None, *sums: Tensor
    ) -> Tensor:
        ctx.save_for_backward(counts, entropy, excess)
        ctx.sums, ctx.shape = sums, shares.shape
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        counts, entropy, excess = ctx.saved_tensors
        for total, of_microbatch in zip(ctx.sums, (counts, entropy), strict=True):
            total.add_(of_microbatch)
        of_shares = None if excess is None else excess.repeat_interleave(ctx.shape[0] // len(excess), 0)
        return gradient, of_shares, *[None] * 5


class Experts(nn.Module):
    """SwiGLU feed-forwards, one for each expert, as three stacked matrices [experts, ...]."""

    format = ""  # number format of the products, one of kernels/grouped.py; a class of its own forward declares its own

    def __init__(self, config: SparseModel):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.n_experts, config.expert_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.n_experts, config.dim, config.expert_dim))
        self.w3 = nn.Parameter(torch.empty(config.n_experts, config.expert_dim, config.dim))
        self.read = plain
        self.sends = False  # whether the results are sent to other ranks

    def forward(self, rows: Tensor, order: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
        """Compute each of the rows [n, dim] with k experts. `order` [n * k] sorts the (row, expert) pairs by expert,
        and counts[e] is the number of pairs of expert e (as in `Destinations`). Returns one row per pair, in the order
        before sorting.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = Moved.apply(rows, order, inverse)
        gate, up = (self.product(name, rows, ends, grouped_matmul) for name in ("w1", "w3"))
        last = sent_grouped_matmul if self.sends else grouped_matmul
        rows = self.product("w2", F.silu(gate) * up, ends, last)
        return Moved.apply(rows, inverse, order)

    def product(self, name: str, rows: Tensor, ends: Tensor, multiply: Any) -> Tensor:
        """Return the products of rows, sorted by expert, and their experts' matrices `name`; adapters add to it."""
        return multiply(rows, self.read(getattr(self, name)), ends, self.format)


class Local(nn.Module):
    """Computes a rank's rows [tokens, dim] with experts that are all on this device. Returns [tokens * k, dim], k rows
    for each token.
    """

    def forward(self, rows: Tensor, plan: Destinations, experts: nn.Module) -> Tensor:
        return experts(rows, plan.order, plan.inverse, plan.counts)


class Moved(torch.autograd.Function):
    """Returns rows whose row i is rows[order[i] // k], where k = len(order) / len(rows); `inverse` is the inverse
    permutation of `order`. The backward adds up the k copies of a row in a fixed order, without atomic additions.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = len(rows)
        return rows.index_select(0, order if len(rows) == len(order) else order // (len(order) // len(rows)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        back = gradient.index_select(0, inverse)
        return back if len(back) == ctx.rows else back.unflatten(0, (ctx.rows, -1)).sum(1), None, None
