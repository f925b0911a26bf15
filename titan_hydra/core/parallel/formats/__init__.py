"""Number formats of linears. Other files call the functions of this file, which use the record of the job's format
(core/job/config/registry.py).

A format is a file of this folder or a user's module. No other file names a format.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_hydra.core.job.config.registry import FORMATS, Format, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.parallel.plans import Linears


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Change the linears of a meta-device model to the job's format, in place. Return lines for the log."""
    format = format_of(job)
    return resolve(format.convert)(model, job, mesh, device) if format else []


def linears(job: Job) -> Linears:
    """Return the styles with which tensor parallelism splits linears and gathers their inputs."""
    format = format_of(job)
    return resolve(format.linears)(job) if format and format.linears else Linears()


def before_forward(model: nn.Module, job: Job) -> None:
    """Call the format's function for this rank's part of the model, whose weights may have changed."""
    format = format_of(job)
    if format and format.before_forward:
        resolve(format.before_forward)(model)


def plain(weight: Tensor) -> Tensor:
    """Return a weight without any format's wrapper, in the same memory, so that checkpoints do not depend on the number
    format.
    """
    for unwrap in (format.plain for format in FORMATS.values() if format.plain):
        weight = resolve(unwrap)(weight)
    return weight


def format_of(job: Job) -> Format | None:
    """Return the record of the job's number format; None if all linears are plain."""
    return FORMATS[job.precision.converter] if job.precision.converter else None
