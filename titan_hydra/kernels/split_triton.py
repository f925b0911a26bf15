"""The halves of split masters in Triton: integers alone, one pass over memory each way. Imported where there is a GPU."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _join(weights, remainders, masters, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < elements
    upper = tl.load(weights + at, mask=here).to(tl.int32) << 16
    tl.store(masters + at, upper + tl.load(remainders + at, mask=here).to(tl.int32), mask=here)


@triton.jit
def _halve(masters, weights, remainders, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < elements
    bits = tl.load(masters + at, mask=here)
    tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=here)
    tl.store(remainders + at, bits.to(tl.int16), mask=here)


def join_on_gpu(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return what `join` returns, of contiguous halves."""
    master = torch.empty_like(weight, dtype=torch.float32)
    number = weight.numel()
    _join[(triton.cdiv(number, BLOCK),)](weight.view(torch.int16), remainder, master.view(torch.int32), number, BLOCK)
    return master


def halve_on_gpu(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write the halves of a master, as `halves_of` returns them, into contiguous tensors."""
    number = weight.numel()
    _halve[(triton.cdiv(number, BLOCK),)](master.view(torch.int32), weight.view(torch.int16), remainder, number, BLOCK)
