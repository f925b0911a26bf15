"""AdamW of split masters in Triton. It is one pass over memory: 26 bytes for each parameter with a bfloat16 gradient.
Imported only if there is a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# number of elements of a program: four per thread, as with eight a thread would need 142 registers instead of 42
BLOCK = 512


@triton.jit
def _adamw(
    uppers,
    lowers,
    gradients,
    means,
    squares,
    rates,
    divisor,
    skipped,
    decay,
    momentum,
    beta2,
    left2,
    eps,
    elements,
    BLOCK: tl.constexpr,
):
    # torch's AdamW for masters in two halves of 16 bits: joins a weight, updates it in float32, and splits it again.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < tl.where(tl.load(skipped) == 0.0, elements, 0)
    bits = (tl.load(uppers + at, mask=here, other=0).to(tl.int32) << 16) + tl.load(lowers + at, mask=here, other=0).to(
        tl.int32
    )
    gradient = tl.div_rn(tl.load(gradients + at, mask=here, other=0.0).to(tl.float32), tl.load(divisor))
    mean, square = tl.load(means + at, mask=here, other=0.0), tl.load(squares + at, mask=here, other=0.0)
    mean = mean + (gradient - mean) * momentum
    square = square * beta2 + gradient * gradient * left2
    change = tl.div_rn(mean * tl.load(rates), tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 1)) + eps)
    bits = (bits.to(tl.float32, bitcast=True) * decay - change).to(tl.int32, bitcast=True)
    tl.store(uppers + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=here)
    tl.store(lowers + at, bits.to(tl.int16), mask=here)
    tl.store(means + at, mean, mask=here)
    tl.store(squares + at, square, mask=here)


def update_on_gpu(
    weight: Tensor,
    remainder: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rates: Tensor,
    divisor: Tensor,
    skipped: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update flat tensors of one device; if `skipped` is not 0, change nothing. The gradient is divided by `divisor`.

    `rates` are the bias-corrected learning rate and the number by which bias correction divides the root of `square`.
    No multiply-add is fused, so that the results are bitwise equal to those of the same torch operations.
    """
    number = weight.numel()
    _adamw[(triton.cdiv(number, BLOCK),)](
        weight.view(torch.int16),
        remainder,
        gradient,
        mean,
        square,
        rates,
        divisor,
        skipped,
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        number,
        BLOCK,
        enable_fp_fusion=False,
    )
