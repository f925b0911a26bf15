"""Find the folder of weights that checkpoint.initial_load_path names. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import home

from . import layout
from .checkpoints import newest


def is_hf(source: Path) -> bool:
    """Whether a folder has weights in Hugging Face's format."""
    return any(source.glob("*.safetensors"))


def complete_at(place: Path) -> Path | None:
    """Return `place` if it is a complete checkpoint; if it is a run or a checkpoints folder, return its newest step.
    None if the folder holds no step.
    """
    return place if (place / ".metadata").is_file() else newest(layout.CHECKPOINTS.of(place)) or newest(place)


def find_weights(path: str) -> Path:
    """Return the folder that checkpoint.initial_load_path names now: `path` itself or, if it is a run, its newest step."""
    source = home(path).absolute()
    found = source if is_hf(source) else complete_at(source)
    if found is None:
        raise ConfigError(f"checkpoint.initial_load_path={path}: no checkpoint, no run with one, and no *.safetensors")
    return found
