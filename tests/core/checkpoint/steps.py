"""Read checkpoints for tests, and cut runs back to one of their steps."""

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from titan_hydra.core.job.run.checkpoints import complete, step_of


def tensors(step: Path, part: str | tuple[str, ...] = "") -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint whose names begin with `part`, unsharded."""
    metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size") and name.startswith(part)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    return state


def cut_back(run: Path, step: int, copy: Path | None = None) -> Path:
    """Make a run, or a copy of it, look as if it had been killed just after saving a step."""
    run = shutil.copytree(run, copy) if copy else run
    for path in complete(run / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path)
    (run / "result.json").unlink()
    return run
