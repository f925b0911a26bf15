"""Load the initial weights of a new run from a Hugging Face folder, slice by slice, into this rank's shards."""

from pathlib import Path

import torch
from torch import nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.kernels.split_masters import halve_into
from titan_hydra.core.models.hf import hf_of, meta_state
from titan_hydra.core.models.init import local_box
from titan_hydra.core.parallel.mesh import local_part

from . import state
from .folder import Folder


@torch.no_grad()
def load_hf(model: nn.Module, config: Model, source: Path) -> None:
    """Read this rank's slices of the weights in a Hugging Face folder into the model's shards, one tensor at a time."""
    state_of_all = meta_state(config)
    try:
        folder = Folder(source, hf_of(config))
        _check(config, folder.config)
        there = folder.dtypes(state_of_all)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.initial_load_path={source}: {error}") from error
    lower = state.lower_halves(model)
    for name, tensor in state.weights(model).items():
        if name in there:
            held = local_part(tensor)
            whole = torch.empty_like(held, dtype=torch.float32, device="cpu") if name in lower else held
            folder.read(name, tensor.shape, local_box(tensor)[0], whole)
            if name in lower:
                halve_into(whole, held, lower[name])


def _check(ours: Model, theirs: Model) -> None:
    """Raise ConfigError if the two models have the same shapes but compute differently (RoPE, norms)."""
    there = theirs.arithmetic()
    for key, value in ours.arithmetic().items():
        if value != there[key]:
            raise ConfigError(f"model.{key} is {value} here and {there[key]} there")
