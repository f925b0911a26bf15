"""Count what a rank of a layout would hold and send, by stepping it in the fake world: `titan plan --prove`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.batches import local_batches, samples_at_once
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import modules_of_stages, stage_count, stages_of_ranks
from titan_hydra.core.job.ranks import world_size
from titan_hydra.core.parallel.split_masters import is_split, lower_half
from titan_hydra.core.train.trainer import Trainer

from .fake import fake_step, fake_world
from .tracker import MemoryTracker, tracking

DEPTHS = (2, 4)  # the two numbers of blocks per stage with which a deep model is counted


@dataclass(frozen=True)
class Counted:
    """A rank's peak memory, and the bytes that it sends in a step."""

    live: float  # peak bytes of live tensors
    messages: dict[str, float]  # bytes along each dimension of the mesh


def eager(job: Job) -> Job:
    """Return the job without compilation and without an emulated number format, as the fake world has neither."""
    job = copy.deepcopy(job)
    job.compile.name, job.parallelism.async_tp, job.precision.converter = "off", False, None
    return job


def count_rank(job: Job, rank: int) -> Counted:
    """Count the bytes of one rank of a job that `freeze` and `eager` have prepared. A deep model is counted with 2 and
    with 4 blocks per stage and extrapolated, as every further block adds the same bytes. A model with several kinds of
    blocks is counted whole.
    """
    if (rounds := local_batches(job)) > 2:  # every further local batch sends as many bytes as the second
        job = copy.deepcopy(job)
        job.data.global_batch = 2 * samples_at_once(job)
        found = count_rank(job, rank)
        return Counted(
            found.live,
            {name: sent * (rounds / 2 if name != "dp_replicate" else 1) for name, sent in found.messages.items()},
        )
    stages, family = stage_count(job) if job.parallelism.pp > 1 else 1, family_of(job.model)
    if not family.linears(job.model) or job.model.n_layers <= DEPTHS[-1] * stages:
        return _count(job, rank)
    few, more = (_count(_cut(job, depth, stages), rank) for depth in DEPTHS)
    further = (_blocks(job, rank) - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def extrapolated(a: float, b: float) -> float:
        return a + (b - a) * further

    return Counted(
        extrapolated(few.live, more.live),
        {name: extrapolated(sent, more.messages[name]) for name, sent in few.messages.items()},
    )


def _cut(job: Job, depth: int, stages: int) -> Job:
    """Return the job with `depth` blocks in every stage."""
    job = copy.deepcopy(job)
    job.model.n_layers, job.pp_schedule.layers_per_stage, job.pp_schedule.split = depth * stages, depth, []
    return job


def _blocks(job: Job, rank: int) -> float:
    """Return the mean number of blocks in a rank's stages."""
    if job.parallelism.pp == 1:
        return job.model.n_layers
    stages = stages_of_ranks(job)[rank // (world_size(job) // job.parallelism.pp)]
    modules = modules_of_stages(job)
    return sum("." in name for stage in stages for name in modules[stage]) / len(stages)


def _count(job: Job, rank: int) -> Counted:
    """Make one step of a rank. The optimizer creates its state only at the end of this step, but the state is counted
    from the beginning, as it is in memory during all later steps.
    """
    job = copy.deepcopy(job)
    job.comm.rank = rank
    found: list[Counted] = []

    @contextmanager
    def watch(trainer: Trainer, batch: Batch) -> Iterator[None]:
        tracker = MemoryTracker(trainer.mesh)
        # The optimizer of split masters creates its state when it is built.
        kept = [
            part
            for parameter in trainer.model.parameters()
            if is_split(parameter)
            for part in (lower_half(parameter), *trainer.optimizers[0].state[parameter].values())
        ]
        for tensor in (
            *trainer.model.parameters(),
            *trainer.model.buffers(),
            *trainer.masters.weights.parameters(),
            *batch.tensors.values(),
            *kept,
        ):
            tracker.hold(tensor)
        before, peaks = tracker.live, []
        trainer.optimizers[0].register_step_pre_hook(lambda *_: peaks.append(tracker.restart()))
        with tracking(tracker):
            yield
        state = tracker.live - before
        found.append(Counted(max(peaks[0] + state, tracker.peak), dict(tracker.messages)))

    with fake_world(job):
        fake_step(job, watch)
    return found[0]
