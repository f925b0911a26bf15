"""Casts to Float8 with one scale for each row, or one for each column. Scales are powers of two, as in torchao's rowwise
recipe. The casts are torch operators that are opaque to the compiler.

A cast matrix is two tensors: e4m3 numbers, and float32 factors that undo the scales (number * factor is the value).
Maxima of magnitudes are stored as integers: the bit patterns of float32 numbers.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# bit patterns of float32 numbers. SMALLEST is 1e-12: as in torchao, a scale follows from a magnitude of at least this
NAN, INFINITY, SMALLEST = 0x7FC00000, 0x7F800000, 0x2B8CBCCC


def scales_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale for each maximum, and the scale's inverse. The scale is the largest power of two whose product
    with the maximum is at most 448, the largest e4m3 number. It is NaN if the maximum is not finite.

    As 448 is 1.75 * 2**8, the addition below makes a mantissa above 1.75 carry into the exponent.
    """
    exponent = (bits.clamp(min=SMALLEST) + 0x1FFFFF) >> 23
    finite = bits < INFINITY
    scale, inverse = (
        torch.where(finite, power << 23, NAN).int().view(torch.float32) for power in (262 - exponent, exponent - 8)
    )
    return scale, inverse


def magnitudes(y: Tensor) -> Tensor:
    """Return the bit patterns of the magnitudes of float32 numbers."""
    return y.abs().view(torch.int32)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of several matrices of the same width as one float32 matrix."""
    return torch.cat([part.float() for part in parts])


def cast_columns(y: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transpose of the matrix y, cast with a scale for each column of y. `bits` are the columns' maxima."""
    scale, inverse = scales_of(bits)
    return (y * scale).t().contiguous().to(E4M3), inverse


def rows_in_torch(
    parts: Sequence[Tensor], norm: Tensor | None, eps: float, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the operator `float8_rows` returns, computed with operations of torch."""
    y = joined_rows(parts)
    rstds = y.new_empty(0)
    if gated:
        u, g = y.chunk(2, dim=-1)
        y = u * u.sigmoid() * g
    if norm is not None:
        rstds = (y.square().mean(-1) + eps).rsqrt()
        y = y * rstds[:, None] * norm.float()
    bits = magnitudes(y)
    scale, inverse = scales_of(bits.amax(1))
    return (y * scale[:, None]).to(E4M3), inverse, bits.amax(0), rstds


def columns_in_torch(
    parts: Sequence[Tensor], maxima: Tensor, norm: Tensor | None, rstds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what the operator `float8_columns` returns, computed with operations of torch."""
    y = joined_rows(parts)
    if norm is not None and rstds is not None:
        y = y * rstds[:, None] * norm.float()
    return cast_columns(y, maxima)


def gated_backward_in_torch(
    gates: Tensor,
    gradient: Tensor,
    maxima: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the operator `float8_gated_backward` returns, computed with operations of torch."""
    (u, g), d = gates.float().chunk(2, dim=-1), gradient.float()
    sigmoid = u.sigmoid()
    silu = u * sigmoid
    y = torch.cat((d * g * (sigmoid + silu * (1 - sigmoid)), d * silu), dim=-1)
    bits = magnitudes(y)
    scale, inverse = scales_of(bits.amax(1))
    return (y * scale[:, None]).to(E4M3), inverse, *cast_columns(y, bits.amax(0)), *cast_columns(silu * g, maxima)


def norm_backward_in_torch(x: Tensor, norm: Tensor, rstds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the operator `norm_backward` returns, computed with operations of torch."""
    normed, d = x.float() * rstds[:, None], gradient.float()
    w = d * norm.float()
    result = rstds[:, None] * (w - normed * (normed * w).mean(-1, keepdim=True))
    return result.to(x.dtype), (d * normed).sum(0).to(norm.dtype)


@torch.library.custom_op("titan_hydra::float8_rows", mutates_args=())
def float8_rows(
    parts: Sequence[Tensor], norm: Tensor | None, eps: float, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast several matrices of the same width as one matrix, with a scale for each row. If `norm`, the weight of an
    RMSNorm, is given, the matrix is normalized first; if `gated`, SwiGLU's product of its two halves is cast instead.
    Return the cast matrix, its factors, the maxima of its columns, and the factors of RMSNorm (one for each row).
    """
    if not in_triton(parts[0].device):
        return rows_in_torch(parts, norm, eps, gated)
    from .float8_triton import rows_on_gpu

    return rows_on_gpu(parts, norm, eps, gated)


@torch.library.custom_op("titan_hydra::float8_columns", mutates_args=())
def float8_columns(
    parts: Sequence[Tensor], maxima: Tensor, norm: Tensor | None, rstds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cast several matrices of the same width as one matrix, with a scale for each column. `maxima` and `rstds`
    (RMSNorm's factors) are results of `float8_rows`. Return the transpose and its factors.
    """
    if not in_triton(maxima.device):
        return columns_in_torch(parts, maxima, norm, rstds)
    from .float8_triton import columns_on_gpu

    return columns_on_gpu(parts, maxima, norm, rstds)


@torch.library.custom_op("titan_hydra::float8_gated_backward", mutates_args=())
def float8_gated_backward(
    gates: Tensor,
    gradient: Tensor,
    maxima: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return three casts, each with its factors: the gradient of SwiGLU's input, cast by rows; the same gradient, cast
    by columns and transposed; SwiGLU's product, cast by columns and transposed. `maxima` are those of the product's
    columns.
    """
    if not in_triton(gates.device):
        return gated_backward_in_torch(gates, gradient, maxima)
    from .float8_triton import gated_backward_on_gpu

    return gated_backward_on_gpu(gates, gradient, maxima)


@torch.library.custom_op("titan_hydra::norm_backward", mutates_args=())
def norm_backward(x: Tensor, norm: Tensor, rstds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm's input and of its weight."""
    if not in_triton(x.device):
        return norm_backward_in_torch(x, norm, rstds, gradient)
    from .float8_triton import norm_backward_on_gpu

    return norm_backward_on_gpu(x, norm, rstds, gradient)


# The torch versions also serve as fake kernels, as they return the same shapes as the Triton kernels.
for operator, reference in (
    (float8_rows, rows_in_torch),
    (float8_columns, columns_in_torch),
    (float8_gated_backward, gated_backward_in_torch),
    (norm_backward, norm_backward_in_torch),
):
    operator.register_fake(reference)


@cache
def in_triton(device: torch.device) -> bool:
    """Whether the casts run in Triton: on a GPU that can multiply in Float8. Elsewhere torch emulates them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
