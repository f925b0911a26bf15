"""NVFP4 linears: 4 bits for each element, in forward and backward, by torchao's kernels on Blackwell, or emulated."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.kernels.nvfp4 import NVFP4Product, signs_of
from titan_hydra.core.parallel.mesh import Mesh

from .select import needs_hardware, quietly, report_linears, select_linears


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Make the linears of a meta-device model multiply in NVFP4, in place. Return the report.

    As with MXFP8, only the forward is replaced. Raises ConfigError if this device does not compute NVFP4.
    """
    precision = job.precision
    if not precision.emulate:
        nearest = "precision=float8_rowwise, or nvfp4 with precision.emulate=true"
        needs_hardware(precision, device, (10, 0), "NVFP4", "B200 or GB200", nearest, before=(11, 0))
    chosen, left = select_linears(model, precision)
    multiply = nvfp4_multiplication(signs_of(job.seed), precision.emulate)

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        y = multiply(x.flatten(0, -2), linear.weight).unflatten(0, x.shape[:-1])
        return y if linear.bias is None else y + linear.bias

    for name in chosen:
        module: Any = model.get_submodule(name)
        module.forward = MethodType(forward, module)
    return report_linears(f"nvfp4{' (emulated)' * precision.emulate}", chosen, left)


def nvfp4_multiplication(signs: Tensor, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function for x @ weight.T whose three products, with those of the backward, cast their inputs to NVFP4.
    All linears and ranks rotate with the same signs. Raises ConfigError if torchao has no such function.
    """
    if emulate:
        return lambda x, weight: NVFP4Product.apply(x, weight, signs.to(x.device))
    try:
        with quietly():
            from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
    except ImportError as error:
        raise ConfigError(
            "precision.converter=nvfp4: the installed torchao has no training in NVFP4; 0.18 and later have; nearest legal: mxfp8"
        ) from error
    return lambda x, weight: nvfp4_linear(x.contiguous(), weight, sign_vector=tuple(signs.tolist()))
