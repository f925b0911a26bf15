"""MXFP8 linears (torchao): Float8 with one scale for each 32 elements, a power of two. Blackwell GPUs compute in
this format; other devices emulate it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn

from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.parallel.mesh import Mesh

from .select import needs_hardware, quietly, report_linears, select_linears


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Make the linears of a meta-device model multiply in MXFP8, in place. Return the report.

    Only the forward is replaced: torchao's own conversion would wrap the weights, and the wrappers would be part of
    checkpoints. Raises ConfigError if this device does not compute MXFP8.
    """
    precision = job.precision
    if not precision.emulate:
        nearest = "precision=float8_rowwise, or mxfp8 with precision.emulate=true"
        # torchao has kernels only for these GPUs; its check also accepts workstation GPUs (12.0), where it fails later
        needs_hardware(precision, device, (10, 0), "MXFP8", "B200 or GB200", nearest, before=(11, 0))
    chosen, left = select_linears(model, precision)
    multiply = multiplication(precision.emulate)

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        y = multiply(x, linear.weight)
        return y if linear.bias is None else y + linear.bias

    for name in chosen:
        linear = model.get_submodule(name)
        linear.forward = MethodType(forward, linear)
    return report_linears(f"mxfp8{' (emulated)' * precision.emulate}", chosen, left)


def multiplication(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function for x @ weight.T with inputs cast to MXFP8. Both backward matmuls cast their inputs too. Scales
    are rounded up, so that nothing overflows.
    """
    with quietly():
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference

        from titan_hydra.core.base.private import mxfp8_matmul
    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    return lambda x, weight: mxfp8_matmul(x, weight, kernels, ScaleCalculationMode.RCEIL)
