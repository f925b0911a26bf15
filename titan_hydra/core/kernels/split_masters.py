"""float32 master weights in two halves of 16 bits: the nearest bfloat16 number, with which the model computes, and the
rest of the bits as an int16.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_hydra.core.base.private import foreach_add

CHUNK = 2**24  # elements that are joined to float32 at a time


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 numbers that consist of these halves."""
    return ((weight.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 numbers, with ties away from zero, and the difference of the bits as an int16. `join`
    is the exact inverse.

    With ties to even, as in a cast, the difference could be from -2^15 to +2^15: one value too many for 16 bits.
    """
    bits = master.view(torch.int32)
    return ((bits + 0x8000) >> 16).short().view(torch.bfloat16), bits.short()


def update_split(parameters: Sequence[tuple[Tensor, ...]], steps: Sequence[Tensor], **options: Any) -> None:
    """Make an AdamW step of this rank's split parameters, in place. Each parameter is a tuple (weight, remainder,
    gradient, first moment, second moment).

    `options` are those of torch's fused AdamW. On a GPU with Triton, a kernel of this package makes the step in one
    pass. Elsewhere the halves are joined, updated by torch's kernel and split again, with the bits of a float32 master.
    """
    if not parameters:
        return
    if parameters[0][0].is_cuda and find_spec("triton"):
        _update_on_gpu(parameters, steps, **options)
        return
    batch: list[list[Tensor]] = []
    for tensors, step in zip(parameters, steps, strict=True):
        flat = [tensor.view(-1) for tensor in tensors]
        for start in range(0, flat[0].numel(), CHUNK):
            batch.append([*(tensor[start : start + CHUNK] for tensor in flat), step.clone()])
            if sum(piece[0].numel() for piece in batch) >= CHUNK:
                _update(batch, options)
                batch = []
    _update(batch, options)
    skipped = options["found_inf"]
    foreach_add(list(steps), 1 if skipped is None else [1 - skipped] * len(steps))


def _update(batch: list[list[Tensor]], options: dict[str, Any]) -> None:
    """Update a batch of (weight, remainder, gradient, mean, square, step) by torch's AdamW in float32: join the halves,
    update, and split again.
    """
    if not batch:
        return
    weights, remainders, gradients, means, squares, steps = map(list, zip(*batch, strict=True))
    masters = [join(weight, remainder) for weight, remainder in zip(weights, remainders, strict=True)]
    adamw(
        masters,
        [gradient.float() for gradient in gradients],
        means,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        maximize=False,
        **options,
    )
    for weight, remainder, master in zip(weights, remainders, masters, strict=True):
        halve_into(master, weight, remainder)


def _update_on_gpu(
    parameters: Sequence[tuple[Tensor, ...]],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Make the step in Triton. The bias corrections are computed in float64, as 1 - beta2**number is a small difference
    of numbers near 1.
    """
    from .split_triton import update_on_gpu

    skipped = torch.zeros((), device=steps[0].device) if found_inf is None else found_inf
    divisor = torch.ones((), device=steps[0].device) if grad_scale is None else grad_scale
    foreach_add(list(steps), [1 - skipped] * len(steps))
    number = torch.stack(list(steps)).double()
    rates = torch.stack([lr / (1 - beta1**number), (1 - beta2**number).sqrt()], 1).float()
    for tensors, rates_of_tensor in zip(parameters, rates, strict=True):
        weight, remainder, gradient, mean, square = (tensor.view(-1) for tensor in tensors)
        update_on_gpu(
            weight,
            remainder,
            gradient,
            mean,
            square,
            rates_of_tensor,
            divisor,
            skipped,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        )


def halve_into(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split a float32 master, and write its halves into `weight` and `remainder`."""
    for half, new in zip((weight, remainder), halves_of(master), strict=True):
        half.copy_(new)
