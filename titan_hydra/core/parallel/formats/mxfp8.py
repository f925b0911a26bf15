"""MXFP8 linears and experts (torchao): Float8 with one scale for each 32 elements, a power of two. Blackwell GPUs compute in
this format; other devices emulate it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.parts import MXFP8
from titan_hydra.core.job.config.registry import FORMATS
from titan_hydra.core.job.config.schema import Job, Precision
from titan_hydra.core.job.dtypes import converts
from titan_hydra.core.parallel.mesh import Mesh

from .select import needs_hardware, quietly, report_linears, select_linears


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Make the linears or experts of a meta-device model multiply in MXFP8, in place. Return the report.

    Only the forward is replaced: torchao's own conversion would wrap the weights, and the wrappers would be part of
    checkpoints. Raises ConfigError if this device does not compute MXFP8.
    """
    precision = job.precision
    if not precision.emulate:
        nearest = "precision=float8_rowwise, or mxfp8 with precision.emulate=true"
        # torchao has kernels only for these GPUs; its check also accepts workstation GPUs (12.0), where it fails later
        needs_hardware(precision, device, (10, 0), "MXFP8", "B200 or GB200", nearest, before=(11, 0))
        if converts(job, "experts"):
            needs_kernels(precision)
    chosen, left = select_linears(model, precision)
    multiply = multiplication(precision.emulate)

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        y = multiply(x, linear.weight)
        return y if linear.bias is None else y + linear.bias

    for name in chosen:
        module: Any = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.forward = MethodType(forward, module)
        else:  # experts, whose products are operators that know the format (core/kernels/grouped.py)
            module.format = "mxfp8" + " emulated" * precision.emulate
    what = " and ".join(FORMATS["mxfp8"].parts(precision))
    return report_linears(f"mxfp8{' (emulated)' * precision.emulate}", chosen, left, what)


def needs_kernels(precision: Precision) -> None:
    """Raise ConfigError if the installed torchao has no kernels for the products of experts."""
    with quietly():
        from titan_hydra.core.base.private import mxfp8_kernels
    if not mxfp8_kernels:
        raise ConfigError(
            f"precision.converts={cast(MXFP8, precision).converts}: the installed torchao has no MXFP8 kernels for experts, which its "
            "wheels for CUDA 12.8 and later have; nearest legal: linears"
        )


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
