"""Load the initial weights of a new run from another run's checkpoint or a Hugging Face folder, slice by slice into this rank's shards."""
import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from titan_hydra.base.errors import CheckpointError, ConfigError
from titan_hydra.config.schema import Model
from titan_hydra.models.hf import hf_of
from titan_hydra.runs import checkpoints, layout

from . import state


def find(path: str) -> Path:
    """Return the folder to read: `path` itself, or the newest step of the run at `path`."""
    source = Path(path).expanduser()
    if (source / ".metadata").is_file() or is_hf(source):
        return source
    step = checkpoints.newest(layout.CHECKPOINTS.of(source)) or checkpoints.newest(source)
    if step is None:
        raise ConfigError(f"checkpoint.initial_load_path={path}: no checkpoint, no run with one, and no *.safetensors")
    return step


def is_hf(source: Path) -> bool:
    """Whether a folder holds Hugging Face's format."""
    return any(source.glob("*.safetensors"))


def load_hf(model: nn.Module, config: Model, source: Path) -> None:
    """Read the weights of a Hugging Face folder: each rank its own slices, one tensor at a time, converted while reading."""
    _check(config, source)
    hf, weights = hf_of(config), state.weights(model)
    renamed = {hf.name(name): tensor for name, tensor in weights.items()}
    try:
        reader = dcp.HuggingFaceStorageReader(str(source))
        stored: Any = reader.read_metadata().state_dict_metadata
        for name, tensor in renamed.items():
            if name not in stored or stored[name].size != tensor.shape:
                has = tuple(stored[name].size) if name in stored else "nothing"
                raise ConfigError(f"checkpoint.initial_load_path={source}: {name} is {has}, and the model needs {tuple(tensor.shape)}")
        dcp.load(renamed, storage_reader=reader)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{source} cannot be loaded: {error}") from error
    set_model_state_dict(model, {name: renamed[hf.name(name)] for name in weights})


def _check(config: Model, source: Path) -> None:
    """Raise ConfigError if the models compute differently (RoPE, norms): the weights would load and give nonsense."""
    file = source / "config.json"
    try:
        theirs = hf_of(config).from_config(json.loads(file.read_text()), file).arithmetic()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: cannot be read as a config.json of {config.family} ({error})") from error
    for key, ours in config.arithmetic().items():
        if ours != theirs[key]:
            raise ConfigError(f"checkpoint.initial_load_path={source}: model.{key} is {ours} here and {theirs[key]} there")
