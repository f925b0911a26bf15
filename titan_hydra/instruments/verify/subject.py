"""What a user's file must define for `titan verify --module`. docs/verify.md explains it."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan_hydra.core.job.config.fault import bad_value, suggest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Subject:
    """A module, how it is parallelized, and how it is trained. All functions are called on every rank, and in one process
    for the reference.
    """

    mesh: dict[str, int]  # sizes of the mesh's dimensions by name; their product is the number of ranks
    model: Callable[[], nn.Module]  # the whole module; its weights are the same at every call
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]  # returns this rank's part of the module
    # the whole batch of a step; the first dimension of each tensor is the samples
    batch: Callable[[int], dict[str, Tensor]]
    # loss of some samples; the mesh is None in one process
    loss: Callable[[nn.Module, dict[str, Tensor], DeviceMesh | None], Tensor]
    split: tuple[str, ...] = ()  # dimensions of the mesh whose ranks get different samples; the outer one comes first
    # how the losses of a batch's parts are combined to the loss of the whole batch; `mean`: ranks also average
    # gradients
    losses: Literal["mean", "sum"] = "mean"
    accumulation: int = 1  # number of microbatches of a step
    # default: SGD of all parameters, with a rate of 0.1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    # the gradient's norm; default: that of torch.nn.utils
    norm: Callable[[nn.Module, DeviceMesh], Tensor] | None = None
    # makes the whole tensor from a rank's shard that is not a DTensor; a collective
    whole: Callable[[str, Tensor, DeviceMesh], Tensor] | None = None
    reduce_dtype: str = "float32"  # the dtype in which FSDP2 must sum gradients

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def parts(self) -> int:
        """The number of ranks that get different samples."""
        return math.prod(self.mesh[name] for name in self.split)


def load_subject(address: str) -> Subject:
    """Return the Subject at FILE.py:NAME or MODULE:NAME. Raises ConfigError if there is none, or if it contradicts
    itself.
    """
    file, _, name = address.rpartition(":")
    if not file or not name.isidentifier():
        raise bad_value("--module", address, "is not FILE.py:NAME or MODULE:NAME")
    if file.endswith(".py"):
        path = Path(file).resolve()
        if not path.is_file():
            raise bad_value("--module", address, f"there is no file {path}")
        sys.path.insert(0, str(path.parent))
        file = path.stem
    elif not _found(file):
        raise bad_value("--module", address, f"there is no module {file}")
    module = importlib.import_module(file)
    subjects = [key for key, value in vars(module).items() if isinstance(value, Subject)]
    if name not in subjects:
        raise bad_value("--module", address, f"{file} has no Subject {name}", *suggest(name, subjects))
    subject = getattr(module, name)
    for dimension in subject.split:
        if dimension not in subject.mesh:
            raise bad_value(f"{name}.split", dimension, "is no dimension of the mesh", *tuple(subject.mesh))
    return subject


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised if a parent package is missing
        return False
