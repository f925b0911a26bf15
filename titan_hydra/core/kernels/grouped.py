"""torch's grouped matmul, in which each matrix multiplies its own group of rows. Here, some or all groups may be empty.

The grouped matmul is wrapped in operators of this package. These operators can be compiled in any dtype (torch 2.13
infers the shape of its own operator only in bfloat16), and activation checkpointing can name them. The product whose
result is sent to other ranks has an operator of its own. The host never waits for the device.

`format` names a number format of the products that the forward and the rows' gradients are: one of PRODUCTS. The
weights' gradients sum over rows, and which rows a rank has depends on the layout, as would the scales of blocks of rows. So
these gradients are computed in the dtype of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from .mxfp8 import emulate_mxfp8, multiply_mxfp8

# by format: functions of (rows [n, inputs], weights [matrices, inputs, outputs], ends)
PRODUCTS = {
    "": lambda rows, weights, ends: F.grouped_mm(rows, weights, offs=ends),
    "mxfp8": multiply_mxfp8,
    "mxfp8 emulated": emulate_mxfp8,
}


@custom_op("titan_hydra::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor, format: str) -> Tensor:
    """Multiply groups of rows [n, inputs] by the transposes of weights [matrices, outputs, inputs]; return [n, outputs].
    Group i ends before row ends[i], and is multiplied by weights[i]. `ends` are int32; the last one is n.
    """
    if not len(rows):  # a rank may have no rows; how the kernels behave without rows is undocumented
        return rows.new_zeros(0, weights.shape[1])
    return PRODUCTS[format](rows, weights.transpose(-2, -1), ends)


@custom_op("titan_hydra::sent_grouped_matmul", mutates_args=())
def sent_grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor, format: str) -> Tensor:
    """Return the same as `grouped_matmul`. The result is sent to other ranks, and not read otherwise."""
    return grouped_matmul(rows, weights, ends, format)


@custom_op("titan_hydra::grouped_matmul_backward", mutates_args=())
def grouped_matmul_backward(
    gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor, format: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of weights."""
    if not len(rows):
        return torch.zeros_like(rows), torch.zeros_like(weights)
    of_weights = F.grouped_mm(gradient.t(), rows, offs=ends)
    if not fills_empty_groups(rows.device):
        none = torch.diff(ends, prepend=torch.zeros_like(ends[:1])) == 0
        of_weights = of_weights.masked_fill_(none.view(-1, 1, 1), 0)
    return PRODUCTS[format](gradient, weights, ends), of_weights


def fills_empty_groups(device: torch.device) -> bool:
    """Whether the kernels write zeros as the gradient of a matrix whose group is empty. Kernels of Hopper write zeros,
    those of Blackwell do not (pytorch#172439).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@sent_grouped_matmul.register_fake
@grouped_matmul.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor, format: str) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@grouped_matmul_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weights.new_empty(weights.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.format = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:  # frozen weights, whose gradient would be as large as they are
        return grouped_matmul(gradient.contiguous(), weights.transpose(-2, -1), ends, ctx.format), None, None, None
    return *grouped_matmul_backward(gradient.contiguous(), rows, weights, ends, ctx.format), None, None


for operator in (grouped_matmul, sent_grouped_matmul):
    operator.register_autograd(_differentiate, setup_context=_keep)
