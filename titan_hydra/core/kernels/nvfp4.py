"""Products in NVFP4 (arXiv 2509.25149), emulated in the dtype of their inputs: elements of 4 bits (E2M1), a scale in
Float8 for each 16 of them, and a float32 scale for the whole tensor.

The recipe is that of torchao's kernels for Blackwell. A weight has one scale for each square of 16 x 16, so that forward
and backward round it alike. Gradients are rounded stochastically, so that the mean of their errors is zero. The two
factors of a weight's gradient are first rotated in blocks of 16 tokens, which spreads outliers over a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 16  # elements that share a scale, and tokens that are rotated together
LARGEST, LARGEST_SCALE = 6.0, 448.0  # of E2M1 and of E4M3
SMALLEST_SCALE = torch.finfo(torch.float8_e4m3fn).tiny


class NVFP4Product(torch.autograd.Function):
    """Returns x W' for x [tokens, inputs] and W [outputs, inputs]. `signs` [16] are those of the rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, signs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, signs)
        return round_nvfp4(x) @ round_squares(weight).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, signs = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = round_nvfp4(gradient, stochastic=True) @ round_squares(weight)
        if ctx.needs_input_grad[1]:
            turned, inputs = (turn_by_hadamard(part.t(), signs) for part in (gradient, x))
            of_weight = round_nvfp4(turned, stochastic=True) @ round_nvfp4(inputs).t()
        return of_x, of_weight, None


def round_nvfp4(values: Tensor, stochastic: bool = False) -> Tensor:
    """Return a matrix whose rows are rounded to NVFP4, in its own dtype. The scale of a block depends on the largest
    value of the tensor, and so on all tokens of a microbatch.
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scale = _scales(blocks.abs().amax(-1, keepdim=True))
    return (_to_four_bits(blocks / scale, values if stochastic else None) * scale).flatten(-2).to(values.dtype)


def round_squares(weight: Tensor) -> Tensor:
    """Return a weight that is rounded to NVFP4 with a scale for each square of 16 x 16, in its own dtype."""
    squares = weight.float().unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _scales(squares.abs().amax((1, 3), keepdim=True))
    return (_to_four_bits(squares / scale, None) * scale).reshape(weight.shape).to(weight.dtype)


def turn_by_hadamard(values: Tensor, signs: Tensor) -> Tensor:
    """Return a matrix whose columns are multiplied, 16 at a time, by signs and by the Hadamard matrix, which is
    orthogonal: rotating both factors leaves their product as it is.
    """
    turned: Any = values.unflatten(-1, (-1, BLOCK)) * signs.to(values.dtype)
    for half in (1, 2, 4, 8):
        pairs = turned.unflatten(-1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((first + second, first - second), -2).flatten(-3)
    return (turned / 4).flatten(-2)


def signs_of(seed: int) -> Tensor:
    """Return the 16 signs of a run's rotations, which all linears and ranks share."""
    return torch.randint(2, (BLOCK,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def _scales(largest: Tensor) -> Tensor:
    """Return the scale of each block, a number of E4M3 times the tensor's scale, from the blocks' largest values."""
    whole = largest.amax() / (LARGEST_SCALE * LARGEST)
    whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    own = (largest / LARGEST / whole).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn)
    return own.float() * whole


def _to_four_bits(scaled: Tensor, noisy: Tensor | None) -> Tensor:
    """Round to the numbers of E2M1, 0 to 6: to the nearest one, or with the noise that belongs to the values `noisy`."""
    size = scaled.abs().clamp(max=LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    places = size / step
    places = places.round() if noisy is None else (places + _noise(noisy).view_as(places)).floor()
    return (places * step).clamp(max=LARGEST).copysign(scaled)


def _noise(values: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), hashed from each value's bits and place. So they need no generator, whose state
    would depend on the layout, and a step that is repeated has the same noise.
    """
    bits = values.float().contiguous().view(torch.int32).to(torch.int64).flatten()
    hashed = bits * 0x9E3779B1 + torch.arange(len(bits), device=bits.device) * 0x85EBCA77
    for factor in (0x45D9F3B, 0x45D9F3B):  # a finalizer of 32 bits
        hashed = (hashed & 0xFFFFFFFF) * factor
        hashed = hashed ^ ((hashed & 0xFFFFFFFF) >> 16)
    return ((hashed & 0xFFFFFF).float() / (1 << 24)).view_as(values)
