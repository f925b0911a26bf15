"""MXFP8 linears (torchao): Float8 with one scale for each 32 elements, a power of two. Blackwell computes it; elsewhere emulation."""
from __future__ import annotations

import torch
from torch import nn

from titan_hydra.config.schema import Job

from .float8 import needs_hardware, report, select
from .mesh import Mesh

STEP = 32  # elements that share a scale


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Wrap the weights of a meta-device model's linears, in place, so that their matmuls run in MXFP8. Returns the report.

    Raises ConfigError where this device does not compute MXFP8.
    """
    precision = job.precision
    if not precision.emulate:
        needs_hardware(precision, device, (10, 0), "MXFP8", "B200 or GB200", "precision=float8_rowwise, or mxfp8 with precision.emulate=true")
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    chosen, left = select(model, precision, STEP)
    recipe = MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL if precision.emulate else MXFP8TrainingRecipe.MXFP8_RCEIL
    quantize_(model, MXFP8TrainingOpConfig.from_recipe(recipe), filter_fn=lambda module, name: name in chosen)
    return report(f"mxfp8{' (emulated)' * precision.emulate}", chosen, left)
