"""Model converters: functions that change a model's modules in place before sharding, by the name in the configuration."""
from __future__ import annotations

import torch
from torch import nn

from titan_hydra.config.schema import Job
from titan_hydra.parallel import loss_head
from titan_hydra.parallel.mesh import Mesh

from . import float8, mxfp8

# Each changes the whole model on the meta device and returns lines for the log.
CONVERTERS = {"float8": float8.convert, "mxfp8": mxfp8.convert, "linear_cross_entropy": loss_head.convert}


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Apply the job's converters: number format, then loss. Returns lines for the log."""
    names = [name for name in (job.precision.converter, job.loss.name) if name in CONVERTERS]
    return [line for name in names for line in CONVERTERS[name](model, job, mesh, device)]


def after_step(model: nn.Module, job: Job) -> None:
    """Run what a converter needs after the weights have changed, on this rank's part of the model."""
    if job.precision.converter == "float8":
        float8.after_step(model)
