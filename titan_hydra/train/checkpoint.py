"""Checkpoints: complete or absent. A step is written to `step-N.writing` and renamed when every rank has written its part.

A checkpoint holds `model.*` and `optimizer.*` as DCP shards, which load on any layout, and a `rank_R.json` for each rank with the
states of its data streams and its random generators.
"""
from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titan_hydra.config.run import Run
from titan_hydra.config.schema import Checkpoint
from titan_hydra.config.status import CheckpointError
from titan_hydra.parallel import float8

from .data.loader import merge

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: independent of optimizers and layout


@dataclass
class Checkpointer:
    """Saves and loads a model, its optimizers and each rank's data state in `<run>/checkpoints`."""

    config: Checkpoint
    run: Run
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @property
    def folder(self) -> Path:
        """Where the steps lie."""
        return self.run.directory / "checkpoints"

    def due(self, step: int, last: bool) -> bool:
        """Whether this step is saved: every interval, and the last one."""
        return self.config.name != "off" and (last or step % self.config.interval == 0)

    def save(self, step: int, data_state: dict[str, Any]) -> float:
        """Write a step; returns the seconds it took. Raises CheckpointError on all ranks if any could not write its part."""
        began = time.perf_counter()
        final = self.folder / f"step-{step:08d}"
        writing = final.with_suffix(".writing")
        if final.exists():
            return 0.0
        if self.run.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        dist.barrier()
        failure = None
        try:
            writing.mkdir(parents=True, exist_ok=True)
            dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(writing, sync_files=True))
        except (Exception, CheckpointException) as error:  # DCP hands one rank's OSError to all, wrapped in no Exception
            failure = error
        try:
            _write_synced(writing / f"rank_{self.run.rank:05d}.json", json.dumps(self._rank_state(data_state)))
        except OSError as error:
            failure = failure or error
        if _any_rank(failure is not None):
            reason = _cause(failure, writing)
            dist.barrier()  # all have looked at the disk before it is freed
            if self.run.rank == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(f"the checkpoint of step {step} could not be written to {self.folder}: {reason}; "
                                  f"{_kept(newest(self.folder))}") from failure
        if self.run.rank == 0:
            _sync_folder(writing)
            writing.rename(final)
            _sync_folder(self.folder)
            self._delete_old()
        dist.barrier()
        return time.perf_counter() - began

    def resume(self) -> tuple[int, dict[str, Any] | None]:
        """Load the newest complete step, if there is one. Returns its number and the merged data state; (0, None) for a fresh start."""
        if self.config.name == "off":
            return 0, None
        if self.run.rank == 0:
            for leftover in self.folder.glob("step-*.*"):  # of a run that died while writing or deleting
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier()
        path = newest(self.folder)
        if path is None:
            return 0, None
        state = self._state()
        _read(state, path)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizers, state["optimizer"], options=OPTIONS)
        for optimizer in self.optimizers:  # what is saved is the state, not the recipe: rates come from this job's configuration
            for group in optimizer.param_groups:
                group["peak_lr"] = optimizer.defaults["lr"]
        return step_of(path), self._load_rank_states(path)

    def load_weights(self, path: str) -> None:
        """Load only `model.*` from a checkpoint folder, saved on any layout (or made by `titan convert --from hf`)."""
        state = {"model": self._weights()}
        _read(state, Path(path))
        set_model_state_dict(self.model, state["model"])

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: float8.plain(weight) for name, weight in get_model_state_dict(self.model).items()}

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._weights(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizers, options=OPTIONS),
        }

    def _rank_state(self, data_state: dict[str, Any]) -> dict[str, Any]:
        random = {"cpu": _encode(torch.get_rng_state())}
        if torch.cuda.is_available():
            random["cuda"] = _encode(torch.cuda.get_rng_state())
        return {"world_size": self.run.world_size, "random": random, "data": data_state}

    def _load_rank_states(self, path: Path) -> dict[str, Any]:
        """Merge the data states of all ranks; take this rank's random state if there are as many ranks as there were."""
        states = [json.loads(file.read_text()) for file in sorted(path.glob("rank_*.json"))]
        if len(states) == self.run.world_size:
            random = states[self.run.rank]["random"]
            torch.set_rng_state(_decode(random["cpu"]))
            if "cuda" in random and torch.cuda.is_available():
                torch.cuda.set_rng_state(_decode(random["cuda"]))
        return merge([state["data"] for state in states])

    def _delete_old(self) -> None:
        """Keep the newest keep_latest_k steps. Renamed first: a step that is half deleted must not look complete."""
        keep = self.config.keep_latest_k
        for path in complete(self.folder)[:-keep] if keep else []:
            deleting = path.with_suffix(".deleting")
            path.rename(deleting)
            shutil.rmtree(deleting, ignore_errors=True)


def _read(state: dict[str, Any], path: Path) -> None:
    """Fill a state dict from a checkpoint folder. Raises CheckpointError in one line where DCP would show every rank's traceback."""
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be loaded: {_cause(error, path)}") from error


def complete(folder: Path) -> list[Path]:
    """The complete steps in a checkpoints folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and (path / ".metadata").exists())


def newest(folder: Path) -> Path | None:
    """The newest complete step, or None."""
    return (complete(folder) or [None])[-1]


def step_of(path: Path) -> int:
    """The number in `step-N`."""
    return int(path.name.removeprefix("step-"))


def _kept(path: Path | None) -> str:
    return f"the newest complete one is {path.name}" if path else "there is no earlier one"


def _any_rank(here: bool) -> bool:
    """Whether it is so on any rank; a collective."""
    flag = torch.tensor(int(here), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _cause(failure: BaseException | None, folder: Path) -> str:
    """The OSError at the bottom of what DCP raises, in words. torch's zip writer hides a full disk behind an error of its own."""
    text = str(failure)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG):
        if os.strerror(code) in text:
            return os.strerror(code)
    if shutil.disk_usage(folder if folder.exists() else folder.parent).free < 2**20:
        return os.strerror(errno.ENOSPC)
    return "another rank failed" if failure is None else text.strip().splitlines()[-1]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames in a folder last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
