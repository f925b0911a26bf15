"""Float8 linears (torchao, or our own kernels): which are converted, how tensor parallelism splits them, and how FSDP
gathers them.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import without_wrapper
from titan_hydra.core.job.config.parts import Float8
from titan_hydra.core.job.config.registry import FORMATS
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import has_one_scale
from titan_hydra.core.parallel.mesh import Mesh, like
from titan_hydra.core.parallel.plans import Linears

from .select import needs_hardware, quietly, report_linears, select_linears


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Convert the linears of a meta-device model to Float8, in place; parameters keep names, dtype and values.

    Return a report of which linears were converted and which were not. Raises ConfigError if this device has no Float8
    matmuls, or if they do not support the dimensions of a rank's shard.
    """
    precision = cast(Float8, job.precision)
    if not precision.emulate:
        needs_hardware(precision, device, (8, 9), "Float8", "H100, H200 or L40", "precision=float8_emulate")
    chosen, left = select_linears(model, precision)
    if not precision.emulate:
        parts_suit(model, chosen, mesh.degrees.tp, FORMATS["float8"].step)
    if precision.kernels == "fused":
        from .fused import fuse

        lines = fuse(model, chosen, precision.emulate)
        return [
            *report_linears(f"float8 {precision.recipe}, fused{' (emulated)' * precision.emulate}", chosen, left),
            *lines,
        ]
    with quietly():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    recipe = Float8LinearConfig.from_recipe_name(precision.recipe)
    # if FSDP does not shard, it gathers nothing
    gather = precision.float8_all_gather and mesh.degrees.dp_shard * mesh.degrees.cp > 1
    config = dataclasses.replace(recipe, emulate=precision.emulate, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
    return report_linears(f"float8 {precision.recipe}{' (emulated)' * precision.emulate}", chosen, left)


def before_forward(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP gathers as Float8, with one reduction over ranks instead of one for
    each weight. Without this, FSDP computes a scale for each tensor-parallel rank's part of a weight.
    """
    if "torchao" not in sys.modules:  # all linears use this package's kernels, and none is gathered as Float8
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain(weight: Tensor) -> Tensor:
    """Return a weight without the wrapper for FSDP's Float8 gather, in the same memory."""
    inner = without_wrapper(weight.to_local()) if isinstance(weight, DTensor) else None
    return weight if inner is None else like(weight, inner)


def linears(job: Job) -> Linears:
    """Return the styles with which tensor parallelism splits linears. With tensorwise scaling, inputs are cast before
    the ranks gather them, which halves the bytes.

    The scale of a row needs the whole row, so with the rowwise recipes inputs are gathered in the compute dtype, as for
    plain linears. The same holds for emulation, which runs on gloo, as gloo cannot gather Float8.
    """
    return Linears() if not has_one_scale(job) or job.precision.emulate else float8_linears()


def float8_linears() -> Linears:
    """Return torchao's styles, which gather Float8."""
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    return Linears(Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)


def parts_suit(model: nn.Module, chosen: list[str], ranks: int, step: int) -> None:
    """Raise ConfigError if a tensor-parallel rank's shard of a converted linear is not a multiple of `step` on both
    sides.
    """
    for name in chosen:
        module = model.get_submodule(name)
        for width in (module.in_features, module.out_features):
            if width % (step * ranks):
                raise ConfigError(
                    f"parallelism.tp={ranks}: Float8 matmuls need multiples of {step}, unlike a rank's part of {name} "
                    f"({module.in_features} x {module.out_features}); nearest legal: {width // step} or its divisors"
                )
