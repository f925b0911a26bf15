"""Model converters: what changes a model's modules in place before anything is sharded, by the name in the configuration."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from titan_hydra.config.schema import Job

from . import float8, loss_head, mxfp8
from .mesh import Mesh


@dataclass(frozen=True)
class Converter:
    """`convert(model, job, mesh, device)` changes the whole model on the meta device and returns lines for the log.

    `after_step(model)` is called after each optimizer step with what this rank holds of the model.
    """

    convert: Callable[[nn.Module, Job, Mesh, torch.device], list[str]]
    after_step: Callable[[nn.Module], None] | None = None


CONVERTERS = {
    "float8": Converter(float8.convert, float8.after_step),
    "mxfp8": Converter(mxfp8.convert),
    "linear_cross_entropy": Converter(loss_head.convert),
}


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Apply the job's converters, in their order. Returns what they did, in lines for the log."""
    return [line for converter in of(job) for line in converter.convert(model, job, mesh, device)]


def after_step(model: nn.Module, job: Job) -> None:
    """Call their hooks."""
    for converter in of(job):
        if converter.after_step is not None:
            converter.after_step(model)


def of(job: Job) -> list[Converter]:
    """A job's converters in the order in which they apply: number format, then loss."""
    return [CONVERTERS[name] for name in (job.precision.converter, job.loss.name) if name in CONVERTERS]
