"""Save a trainer and its data, and continue with a new trainer that has loaded them, as a resumed run does."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from titan_hydra.core import data
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.data.loader import Loader
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.trainer import Trainer, build


def restarted(trainer: Trainer, loader: Loader, step: int, job: Job) -> tuple[Trainer, Loader, int]:
    """Save a checkpoint after `step`. Return a new trainer and a new loader of `job`, which have loaded it, and the
    number of random states (0 or 1) that differ from the saved ones. A collective.
    """
    rank = dist.get_rank()
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    folder, config = Path(names[0]), dataclasses.replace(job.checkpoint, name="sync")
    run = Run(folder, folder, rank, rank, dist.get_world_size())
    saving = Checkpointer(config, run, trainer.masters.weights, trainer.optimizers)
    saving.save(step, loader.state())
    saving.close()
    loader.close()
    # The checkpoint has the state of torch's generator. So after it is loaded, the same numbers have to be drawn again.
    drawn = torch.rand(2)
    mesh = trainer.mesh if job.parallelism == trainer.job.parallelism else None
    fresh = build(job, trainer.device, mesh)
    loading = Checkpointer(config, run, fresh.masters.weights, fresh.optimizers)
    _, data_state = loading.resume()
    later = data.build(job, fresh.mesh.data_rank, fresh.mesh.data_ranks)
    later.load(data_state)
    loading.close()
    dist.barrier()  # all ranks have read the folder
    if rank == 0:
        shutil.rmtree(folder)
    return fresh, later, int(not torch.equal(torch.rand(2), drawn))
