"""Count what a rank of a layout would hold and send, by stepping it in the fake world: `titan plan --prove`."""

from __future__ import annotations

import copy

from titan_hydra.core.job.batches import local_batches, samples_at_once
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import modules_of_stages, stage_count, stages_of_ranks
from titan_hydra.core.job.ranks import world_size

from .fake import fake_step, fake_world
from .tracker import Counted, counting

DEPTHS = (2, 4)  # the two numbers of blocks per stage with which a deep model is counted


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
        one_period = count_rank(job, rank)
        return Counted(
            one_period.live,
            one_period.held,
            *(_repeated(part, rounds / 2) for part in (one_period.messages, one_period.calls)),
        )
    stages, family = stage_count(job) if job.parallelism.pp > 1 else 1, family_of(job.model)
    if not family.linears(job.model) or job.model.n_layers <= DEPTHS[-1] * stages:
        return _count(job, rank)
    few, more = (_count(_cut(job, depth, stages), rank) for depth in DEPTHS)
    further = (_blocks(job, rank) - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def extrapolated(a: float, b: float) -> float:
        return a + (b - a) * further

    pairs = ((few.held, more.held), (few.messages, more.messages), (few.calls, more.calls))
    parts = ({name: extrapolated(value, after[name]) for name, value in before.items()} for before, after in pairs)
    return Counted(extrapolated(few.live, more.live), *parts)


def _repeated(sent: dict[str, float], times: float) -> dict[str, float]:
    """Return what `times` as many local batches send. Replicas add up their gradients once a step."""
    return {name: value * (times if name != "dp_replicate" else 1) for name, value in sent.items()}


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
    """Make one step of a rank, and return what it holds and sends."""
    job = copy.deepcopy(job)
    job.comm.rank = rank
    counts: list[Counted] = []
    with fake_world(job):
        fake_step(job, counting(counts))
    return counts[0]
