"""Save a trainer and its data, and go on with a new trainer that has loaded them, as a resumed run does."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from titan_hydra import data
from titan_hydra.checkpoint.checkpointer import Checkpointer
from titan_hydra.data.loader import Loader
from titan_hydra.runs.run import Run
from titan_hydra.train.trainer import Trainer, build


def restarted(trainer: Trainer, loader: Loader, step: int) -> tuple[Trainer, Loader]:
    """Save a checkpoint after `step`, and return a new trainer and a new loader that have loaded it. A collective."""
    job, mesh, rank = trainer.job, trainer.mesh, dist.get_rank()
    place = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(place)
    folder, config = Path(place[0]), dataclasses.replace(job.checkpoint, name="sync")
    run = Run(folder, folder, rank, rank, dist.get_world_size())
    before = Checkpointer(config, run, trainer.masters.weights, trainer.optimizers)
    before.save(step, loader.state())
    before.close()
    loader.close()
    fresh = build(job, trainer.device, mesh)
    after = Checkpointer(config, run, fresh.masters.weights, fresh.optimizers)
    _, state = after.resume()
    later = data.build(job, mesh.data_rank, mesh.data_ranks)
    later.load(state)
    after.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return fresh, later
