"""Products of experts in MXFP8: Float8 with one scale, a power of two, for each 32 elements of the dimension over which a
product sums. Each row and each column of a weight is cast by itself, so that numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # elements that share a scale


def multiply_mxfp8(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows [n, inputs] by weights [matrices, inputs, outputs] with torchao's kernels for Blackwell,
    which pad each group to a multiple of 32 rows.
    """
    from torchao.quantization.quantize_.common import KernelPreference

    return through_torchao(rows, weights, ends, KernelPreference.AUTO)


def through_torchao(rows: Tensor, weights: Tensor, ends: Tensor, kernels: object) -> Tensor:
    """Call torchao's grouped product with the given choice of kernels. It reads each matrix along its inputs, so the
    backward, which passes weights that are not transposed, copies them first.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    from titan_hydra.core.base.private import mxfp8_grouped_matmul

    along_inputs = weights.transpose(-2, -1).contiguous().transpose(-2, -1)
    return mxfp8_grouped_matmul(
        rows.contiguous(),
        along_inputs,
        offs=ends,
        out_dtype=rows.dtype,
        kernel_preference=kernels,
        wgrad_with_hp=True,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
        pad_token_groups_for_grouped_mm=True,
    )


def emulate_mxfp8(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute the same product of values that are rounded to MXFP8 but multiplied in the dtype of the rows. (torchao's
    own emulation multiplies in bfloat16 alone, which would hide how a layout differs in float32.)
    """
    inputs = round_mxfp8(weights.transpose(-2, -1)).transpose(-2, -1)
    return F.grouped_mm(round_mxfp8(rows), inputs, offs=ends)


def round_mxfp8(values: Tensor) -> Tensor:
    """Return values that are rounded to MXFP8 along the last dimension, in their own dtype. Scales are rounded up, so that
    nothing overflows.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    cast = MXTensor.to_mx(values.contiguous(), torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    return cast.dequantize(values.dtype)
