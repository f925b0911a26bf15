"""Softmax and cross-entropy of logits in Triton. One pass reads the logits, a second replaces them. Together with the
write by the matmul before, that is 8 bytes of memory traffic for each bfloat16 logit. Imported only if there is a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sums(logits, largest, sums, width, BLOCK: tl.constexpr):
    # One program for each row: stores the row's largest logit, and the sum of exp(logit - largest), in one pass (online
    # softmax).
    row = tl.program_id(0).to(tl.int64)
    top = tl.max(tl.full([BLOCK], -float("inf"), tl.float32), 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * width + column, mask=column < width, other=-float("inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - above) + tl.exp(x - above)
        top = above
    tl.store(largest + row, top)
    tl.store(sums + row, tl.sum(total, 0))


@triton.jit
def _slopes(logits, targets, largest, scales, weights, width, BLOCK: tl.constexpr):
    # Replaces logits by the loss's derivative: softmax times the row's scale, less the row's weight at the target.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    addresses = logits + row * width + column
    x = tl.load(addresses, mask=column < width, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(largest + row)) * tl.load(scales + row)
    y = tl.where(column == tl.load(targets + row), y - tl.load(weights + row), y)
    tl.store(addresses, y.to(logits.dtype.element_ty), mask=column < width)


def sums_on_gpu(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the operator `softmax_sums` returns, for contiguous logits."""
    tokens, width = logits.shape
    largest, sums = (torch.empty(tokens, 1, dtype=torch.float32, device=logits.device) for _ in range(2))
    _sums[(tokens,)](logits, largest, sums, width, BLOCK=BLOCK, num_warps=8)
    return largest, sums


def slopes_on_gpu(logits: Tensor, targets: Tensor, largest: Tensor, scales: Tensor, weights: Tensor) -> None:
    """Do what the operator `logits_to_slopes` does, to contiguous logits."""
    tokens, width = logits.shape
    _slopes[(tokens, triton.cdiv(width, BLOCK))](
        logits, targets, largest, scales, weights, width, BLOCK=BLOCK, num_warps=8
    )
