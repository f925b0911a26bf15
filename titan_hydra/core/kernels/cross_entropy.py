"""Softmax and cross-entropy of logits in place: the derivatives overwrite the logits, and no other tensor of that size
is allocated.

Sums and slopes are operators of their own, so that ranks that split the vocabulary can add up their sums before the
slopes are computed. All operators compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.library import custom_op

AT_ONCE = 2**20  # logits that torch processes at a time on a CPU, so that their float32 copy stays in its cache
# and on a device: their float32 copies take 256 MiB each, and moving one takes about 0.2 ms at 3 TB/s, so that the few
# microseconds of a launch do not count. This is arithmetic, not measured.
AT_ONCE_ON_DEVICE = 2**26
LEAST = -200.0  # exp(LEAST) is 0 in float32; below it, 0 * -inf would not be a number


@custom_op("titan_hydra::softmax_sums", mutates_args=())
def softmax_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of logits [tokens, vocab], and each row's sum of exp(logit - maximum). Both results
    are float32 [tokens, 1].
    """
    if logits.is_cuda and find_spec("triton"):
        from .cross_entropy_triton import sums_on_gpu

        return sums_on_gpu(logits)
    largest, sums = _per_row(logits), _per_row(logits)
    for rows in _rows_at_once(logits):
        largest[rows] = logits[rows].amax(1, keepdim=True)
        sums[rows] = (logits[rows].float() - largest[rows]).exp_().sum(1, keepdim=True)
    return largest, sums


@custom_op("titan_hydra::logits_to_slopes", mutates_args=("logits",))
def logits_to_slopes(logits: Tensor, targets: Tensor, largest: Tensor, scales: Tensor, weights: Tensor) -> None:
    """Replace logits x [tokens, vocab] by exp(x - largest) * scale, minus the row's weight in the column of its target.
    A target of -1 means that the row has no target. The other arguments are [tokens, 1].
    """
    if logits.is_cuda and find_spec("triton"):
        from .cross_entropy_triton import slopes_on_gpu

        slopes_on_gpu(logits, targets, largest, scales, weights)
        return
    here = targets >= 0
    for rows in _rows_at_once(logits):
        part = logits[rows].float().sub_(largest[rows]).exp_().mul_(scales[rows])
        logits[rows] = part.scatter_add_(1, targets[rows] * here[rows], -weights[rows] * here[rows])


@custom_op("titan_hydra::softmax_moments", mutates_args=())
def softmax_moments(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `softmax_sums` returns, bit for bit on a CPU, and each row's sum of exp(x - maximum) * (x - maximum)
    over its logits x, also float32 [tokens, 1].
    """
    moments, in_triton = _per_row(logits), logits.is_cuda and find_spec("triton")
    largest, sums = softmax_sums(logits) if in_triton else (_per_row(logits), _per_row(logits))
    for rows in _rows_at_once(logits):
        if not in_triton:
            largest[rows] = logits[rows].amax(1, keepdim=True)
        below = logits[rows].float() - largest[rows]
        terms = below.exp()
        if not in_triton:
            sums[rows] = terms.sum(1, keepdim=True)
        moments[rows] = terms.mul_(below.clamp_(min=LEAST)).sum(1, keepdim=True)
    return largest, sums, moments


softmax_sums.register_fake(lambda logits: (_per_row(logits), _per_row(logits)))
softmax_moments.register_fake(lambda logits: (_per_row(logits), _per_row(logits), _per_row(logits)))
logits_to_slopes.register_fake(lambda *_: None)


def _per_row(logits: Tensor) -> Tensor:
    """Return an uninitialized tensor with one float32 number for each row."""
    return torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)


def _rows_at_once(logits: Tensor) -> Iterator[slice]:
    """Yield slices that together cover all rows, each of about AT_ONCE logits; on a device, of AT_ONCE_ON_DEVICE."""
    step = max((AT_ONCE if logits.device.type == "cpu" else AT_ONCE_ON_DEVICE) // logits.shape[1], 1)
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
