"""What tests read of checkpoints, and runs that are cut back to one of them."""

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from titan_hydra.runs.checkpoints import complete, step_of


def tensors(step: Path, part: str | tuple[str, ...] = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint whose names begin with `part`, whole."""
    metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size") and name.startswith(part)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    return state


def cut_back(run: Path, step: int, copy: Path | None = None) -> Path:
    """A run, or a copy of it, as if it had been killed just after saving a step."""
    run = shutil.copytree(run, copy) if copy else run
    for path in complete(run / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path)
    (run / "result.json").unlink()
    return run
