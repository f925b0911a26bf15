"""Head and loss together, in chunks of tokens: neither forward nor backward has the logits of a whole batch in memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.schema import Loss
from titan_hydra.core.kernels.cross_entropy import logits_to_slopes, softmax_moments, softmax_sums

from .formats.select import is_plain


def convert(model: nn.Module, config: Loss) -> list[str]:
    """Change a model's head in place, so that it returns the loss (`linear_cross_entropy`) if it gets targets. The name
    of the head's weight does not change.

    As the loss is part of the head and not a function after the model, the head's weight is used only inside the
    forward, and FSDP need not keep it gathered afterwards. Raises ConfigError for a head that computes more than a
    matmul, as only the matmul would remain.
    """
    head: Any = model.output
    chunk = config.chunk_tokens
    if not is_plain(head) or head.bias is not None:
        raise ConfigError(
            f"loss={config.name}: multiplies with the head's weight itself, and this head, a {type(head).__name__}, does "
            "more; nearest legal: cross_entropy"
        )

    def forward(head: nn.Linear, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return F.linear(hidden, head.weight) if targets is None else loss_of(hidden, head.weight, targets, chunk)

    head.forward = MethodType(forward, head)
    return [f"linear_cross_entropy: logits of {chunk} tokens at a time"]


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Compute `linear_cross_entropy`, for DTensors too: with tensor parallelism, each rank has the whole hidden state and
    a part of the vocabulary.

    Each rank's logits give a partial gradient of the hidden state, which DTensor sums in the backward.
    """
    if not isinstance(weight, DTensor):
        return linear_cross_entropy(hidden, weight, targets, chunk)
    mesh = weight.device_mesh
    vocabulary = Vocabulary(mesh.get_group(), mesh.get_local_rank() * -(-weight.shape[0] // mesh.size()))
    loss = linear_cross_entropy(
        hidden.to_local(grad_placements=[Partial()]), weight.to_local(), targets, chunk, vocabulary
    )
    return DTensor.from_local(loss, mesh, [Replicate()])


@dataclass(frozen=True)
class Vocabulary:
    """The ranks that split the vocabulary, and the index of this rank's first row."""

    group: dist.ProcessGroup
    first: int


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, vocabulary: Vocabulary | None = None
) -> Tensor:
    """Return the cross-entropy (fp32) of the logits hidden [batch, seq, dim] @ weight.T [dim, vocab]. If targets are
    [batch, seq], return the sum; if they are [batch, seq, 1], return the loss of each token; if they are [batch, seq, 2],
    return [batch, seq, 2], the loss of each token and the entropy of its distribution, which has no gradient. The loss of
    a negative target is 0.

    Matmuls run in the dtype of the arguments, softmax and sums in float32.
    """
    if targets.dim() == 3:
        numbers = targets.shape[2]
        losses = TokenCrossEntropy.apply(
            hidden.flatten(0, 1), weight, targets[..., 0].flatten(), numbers, chunk, vocabulary
        )
        return losses.view(targets.shape).squeeze(2)
    return LinearCrossEntropy.apply(
        hidden.flatten(0, 1), weight, targets.flatten(), chunk, vocabulary, torch.is_grad_enabled()
    )


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, while a chunk's logits are in memory; the backward only scales
    them.

    So the backward does not repeat the head's matmul. The weight's gradient is kept from forward to backward, in
    float32 if several chunks accumulate in it. A schedule that runs all forwards first keeps one such gradient per
    microbatch.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, vocabulary: Vocabulary | None, train: bool
    ) -> Tensor:
        """Return the summed loss; if `train`, also compute the gradients, for a loss with derivative 1."""
        total = torch.zeros((), device=hidden.device)
        if train:
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = None if chunk >= len(hidden) else torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part, right = hidden[start : start + chunk], targets[start : start + chunk].unsqueeze(1)
            slopes = part @ weight.T  # has the logits until `losses_of` replaces them
            total += losses_of(slopes, right, vocabulary, 1.0 if train else None).sum()
            if train:
                torch.mm(slopes, weight, out=hidden_gradient[start : start + chunk])
                product = slopes.T @ part
                weight_gradient = product if weight_gradient is None else weight_gradient.add_(product)
        if train:
            ctx.save_for_backward(hidden_gradient, weight_gradient)
            ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward computed, times the derivative of the loss."""
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            scaled(hidden_gradient, gradient, ctx.dtype),
            scaled(weight_gradient, gradient, ctx.dtype),
            None,
            None,
            None,
            None,
        )


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values times a scalar in float32, rounded once to `dtype`, without a float32 copy on CUDA.

    The factor is made a one-dimensional tensor. CUDA would first round a zero-dimensional factor to bfloat16, which
    would bias the whole gradient.
    """
    return torch.mul(values, factor.reshape(1), out=torch.empty_like(values, dtype=dtype))


class TokenCrossEntropy(torch.autograd.Function):
    """Computes the loss of each token and, if `numbers` is 2, its entropy. The weights of the losses are known only in
    the backward, which recomputes each chunk's logits.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, numbers: int, chunk: int, vocabulary: Vocabulary | None
    ) -> Tensor:
        """Return [tokens, numbers]: each token's loss and, if `numbers` is 2, its entropy."""
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk, ctx.vocabulary = chunk, vocabulary
        rows = []
        for part, right in zip(hidden.split(chunk), targets.unsqueeze(1).split(chunk), strict=True):
            logits = part @ weight.T
            if numbers == 1:
                rows.append(losses_of(logits, right, vocabulary, None))
                continue
            largest, sums, moments = softmax_moments(logits)
            losses = losses_of(logits, right, vocabulary, None, (largest, sums))
            rows.append(torch.cat([losses, entropies_of(largest, sums, moments, vocabulary)], 1))
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each chunk's logits again, and from them the gradients of the losses; an entropy has none."""
        hidden, weight, targets = ctx.saved_tensors
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            slopes = hidden[rows] @ weight.T  # these are the logits; losses_of replaces them by the losses' slopes
            losses_of(slopes, targets[rows].unsqueeze(1), ctx.vocabulary, gradient[rows, :1])
            torch.mm(slopes, weight, out=hidden_gradient[rows])
            weight_gradient += slopes.T @ hidden[rows]
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None, None


def losses_of(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary | None,
    factors: Tensor | float | None,
    softmax: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the losses [tokens, 1] of logits [tokens, vocab] for targets [tokens, 1], in float32. With factors
    [tokens, 1], replace the logits by the derivatives of the losses times the factors. `softmax` is what `softmax_sums`
    returns for the logits, if it was computed before.
    """
    counts = targets >= 0
    if vocabulary is not None:
        targets = targets - vocabulary.first
    # whether the target is in this rank's part of the vocabulary
    here = counts & (targets >= 0) & (targets < logits.shape[1])
    largest, sums = softmax or softmax_sums(logits)
    right = logits.gather(1, targets.where(here, 0)).float() * here
    if vocabulary is not None:
        largest_here, largest = largest, over_ranks(largest.clone(), vocabulary, dist.ReduceOp.MAX)
        right, sums = over_ranks(torch.stack([right, sums * (largest_here - largest).exp()]), vocabulary)
    if factors is not None:
        weights = counts * factors
        logits_to_slopes(logits, targets.where(here, -1), largest, weights / sums, weights.float())
    return (sums.log() + largest - right) * counts


def entropies_of(largest: Tensor, sums: Tensor, moments: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Return the entropy [tokens, 1] of the distribution that each row of logits gives, from the results of
    `softmax_moments`.
    """
    if vocabulary is not None:
        largest_here, largest = largest, over_ranks(largest.clone(), vocabulary, dist.ReduceOp.MAX)
        moved = largest_here - largest
        sums, moments = over_ranks(torch.stack([sums, moments + moved * sums]) * moved.exp(), vocabulary)
    return sums.log() - moments / sums


@torch.no_grad()
def entropies(logits: Tensor) -> Tensor:
    """Return the entropies [batch, seq] of logits [batch, seq, vocab], which may be split over the vocabulary. They have
    no gradient.
    """
    vocabulary = None
    if isinstance(logits, DTensor):
        if Shard(2) in logits.placements:
            vocabulary = Vocabulary(logits.device_mesh.get_group(), 0)
        logits = logits.to_local()
    largest, sums, moments = softmax_moments(logits.flatten(0, 1))
    return entropies_of(largest, sums, moments, vocabulary).view(logits.shape[:2])


def over_ranks(value: Tensor, vocabulary: Vocabulary, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a value over all ranks that split the vocabulary, in place."""
    dist.all_reduce(value, operation, vocabulary.group)
    return value
