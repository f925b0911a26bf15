"""A block's Float8 matmuls together with their casts. There are two kinds of unit: linears that read the same input,
and a SwiGLU feed-forward. Both may begin with RMSNorm.

A scale must not vary along the dimension over which a matmul sums. So x and W are cast by rows for y = x W', dy by rows
and W by columns for dx = dy W, and dy and x by columns for dW = dy' x. No Float8 copy is saved: the backward casts the
inputs again. Matmuls are torch's own operators, which activation checkpointing can save.
"""

from typing import Any

import torch
from torch import Tensor

from titan_hydra.core.base.private import scaled_mm

from .float8 import float8_columns, float8_gated_backward, float8_rows, norm_backward

Cast = tuple[Tensor, Tensor]  # e4m3 numbers, and the factors that undo the scales of their rows


def multiply(a: Cast, b: Cast, dtype: torch.dtype, emulate: bool, fast: bool = False) -> Tensor:
    """Return a b'. `fast` accumulates in lower precision than float32, as torchao does, but only in the forward.
    `emulate` multiplies in float32, without Float8 hardware.
    """
    if emulate:
        return torch.mm(a[0].float() * a[1][:, None], (b[0].float() * b[1][:, None]).t()).to(dtype)
    y = scaled_mm(
        a[0], b[0].t(), scale_a=a[1][:, None], scale_b=b[1][None], out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y.to(dtype)


def into_input(
    ctx: Any, x: Tensor, norm: Tensor | None, rstds: Tensor, rows: Cast, weights: list[Tensor], maxima: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a unit's input x and of its norm's weight (None without a norm). `rows` is the gradient of
    all the linears' outputs, cast by rows.
    """
    gradient = multiply(rows, float8_columns(weights, maxima, None, None), x.dtype, ctx.emulate)
    return (gradient, None) if norm is None else norm_backward(x, norm, rstds, gradient)


def into_weights(ctx: Any, columns: Cast, inputs: Cast, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of weights. `columns` are the gradients of the linears' outputs, `inputs` are the linears'
    input; both are transposed and cast to Float8.
    """
    return multiply(columns, inputs, weights[0].dtype, ctx.emulate).split([len(weight) for weight in weights])


def matrix(x: Tensor) -> Tensor:
    """Return a tensor as a contiguous matrix: all dimensions except the last are joined."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class Float8Linears(torch.autograd.Function):
    """Multiplies x [..., inputs] by several weights [outputs, inputs], and returns all outputs side by side. If the weight
    of an RMSNorm is given, x is normalized first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor | None, eps: float, emulate: bool, *weights: Tensor) -> Tensor:
        rows, inverses, maxima, rstds = float8_rows([matrix(x)], norm, eps, False)
        cast, factors, weight_maxima, _ = float8_rows(list(weights), None, 0.0, False)
        ctx.emulate = emulate
        ctx.save_for_backward(x, norm, rstds, maxima, weight_maxima, *weights)
        return multiply((rows, inverses), (cast, factors), x.dtype, emulate, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the norm's weight and of the weights; both matmuls take `gradient` in Float8,
        once by rows and once by columns.
        """
        x, norm, rstds, maxima, weight_maxima, *weights = ctx.saved_tensors
        flat, d = matrix(x), matrix(gradient)
        rows, inverses, largest, _ = float8_rows([d], None, 0.0, False)
        dx, dnorm = into_input(ctx, flat, norm, rstds, (rows, inverses), weights, weight_maxima)
        dweights = into_weights(
            ctx, float8_columns([d], largest, None, None), float8_columns([flat], maxima, norm, rstds), weights
        )
        return dx.view_as(x), dnorm, None, None, *dweights


class Float8SwiGLU(torch.autograd.Function):
    """Computes w2(silu(w1 x) * w3 x) of x [..., inputs]. If the weight of an RMSNorm is given, x is normalized first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor | None, eps: float, emulate: bool, w1: Tensor, w3: Tensor, w2: Tensor
    ) -> Tensor:
        """Cast x, the weights and the gated product to Float8 by rows, and save what the backward casts again by
        columns.
        """
        rows, inverses, maxima, rstds = float8_rows([matrix(x)], norm, eps, False)
        cast, factors, weight_maxima, _ = float8_rows([w1, w3], None, 0.0, False)
        gates = multiply((rows, inverses), (cast, factors), x.dtype, emulate, fast=True)
        rows, inverses, product_maxima, _ = float8_rows([gates], None, 0.0, True)
        cast, factors, last_maxima, _ = float8_rows([w2], None, 0.0, False)
        ctx.emulate = emulate
        ctx.save_for_backward(x, norm, rstds, maxima, weight_maxima, gates, product_maxima, last_maxima, w1, w3, w2)
        return multiply((rows, inverses), (cast, factors), x.dtype, emulate, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the reverse order: w2 and the product, the gates, then w1, w3, the norm and x."""
        x, norm, rstds, maxima, weight_maxima, gates, product_maxima, last_maxima, w1, w3, w2 = ctx.saved_tensors
        flat, d = matrix(x), matrix(gradient)
        rows, inverses, largest, _ = float8_rows([d], None, 0.0, False)
        product = multiply((rows, inverses), float8_columns([w2], last_maxima, None, None), x.dtype, ctx.emulate)
        rows, inverses, columns, factors, products, product_factors = float8_gated_backward(
            gates, product, product_maxima
        )
        (dw2,) = into_weights(ctx, float8_columns([d], largest, None, None), (products, product_factors), [w2])
        dx, dnorm = into_input(ctx, flat, norm, rstds, (rows, inverses), [w1, w3], weight_maxima)
        dw1, dw3 = into_weights(ctx, (columns, factors), float8_columns([flat], maxima, norm, rstds), [w1, w3])
        return dx.view_as(x), dnorm, None, None, dw1, dw3, dw2
