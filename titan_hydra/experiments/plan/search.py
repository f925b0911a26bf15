"""Search for layouts of a job on a number of devices, at a fixed global batch: find the legal layouts that fit, and
rank them by speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from titan_hydra.core.job.config.fault import divisors
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import expert_degrees
from titan_hydra.core.job.recomputation import searched_modes
from titan_hydra.core.job.rules import checks

from .predict import Prediction, changed, in_memory, on_nodes, timed, with_mode
from .shape import NotPredictable

ROWS = 10  # maximum number of layouts that a search returns, beside those that are tight
FASTER = 3  # maximum number of tight layouts that a search returns, all faster than the fastest that fits
CHUNKS = (2, 3, 4, 5, 6, 8)  # numbers of stages per pipeline rank to try, if the schedule allows several
LONG = 32_768  # sequence length in tokens from which context parallelism is searched by default
LARGEST = 64  # maximum number of samples in a local batch, if there is no pipeline
OFFLOAD = "offload"  # the mode of activation checkpointing that keeps blocks' inputs in the host's memory
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True)
class Row:
    """A layout with its prediction, found for the job `asked`. `front` marks a layout on the Pareto front: no faster
    layout takes less memory.
    """

    prediction: Prediction
    asked: Job
    front: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the layout's degrees and schedule. A result has only one of the rows with the same key, which differ
        in batches or checkpointing.
        """
        job = self.prediction.job
        return (*(getattr(job.parallelism, name) for name in DEGREES), job.parallelism.pp > 1 and job.pp_schedule.name)

    @property
    def overrides(self) -> str:
        """Return the layout as overrides that follow those of the job that was asked for."""
        job, asked = self.prediction.job, self.asked.parallelism
        degrees = [
            f"parallelism.{name}={getattr(job.parallelism, name)}"
            for name in DEGREES
            if name == "dp_shard" or getattr(job.parallelism, name) > 1 or getattr(asked, name) != 1
        ]
        schedule = (
            [
                f"pp_schedule={job.pp_schedule.name}",
                f"pp_schedule.stages_per_rank={job.pp_schedule.stages_per_rank}",
                f"pp_schedule.microbatches={job.pp_schedule.microbatches}",
            ]
            if job.parallelism.pp > 1
            else []
        )
        overlaps = job.parallelism.async_tp
        async_tp = [f"parallelism.async_tp={str(overlaps).lower()}"] * (overlaps or asked.async_tp)
        batches = [f"data.local_batch={job.data.local_batch}", f"data.global_batch={job.data.global_batch}"]
        states = ["optimizer.offload=true"] * job.optimizer.offload
        return " ".join([f"gpus={job.gpus}", *degrees, *async_tp, *schedule, f"ac={job.ac.name}", *states, *batches])


def prepared(job: Job, gpus: int) -> Job:
    """Return a copy of a job for planning on `gpus` devices. If the job has no global batch, it becomes the local batch
    times the number of devices.
    """
    return changed(on_nodes(job, gpus), data={"global_batch": job.data.global_batch or job.data.local_batch * gpus})


def search(job: Job, gpus: int, host: bool = False) -> tuple[list[Row], int]:
    """Return the layouts that fit, the fastest first, then tight ones that are faster, and the number of legal jobs that
    were examined. Raises NotPredictable.

    If more than ROWS layouts fit, those on the Pareto front of speed and memory are kept before all others. If no
    layout fits, the tight ones are returned and, if there are none, those that need least memory. With `host`, layouts
    that offload to the host's memory are returned, if some fit and no other layout does.
    """
    layouts = [*_points(prepared(job, gpus))]
    if layouts and (reason := timed(layouts[0], exact=False).reason):
        raise NotPredictable(reason)
    if host and job.hardware.host_gbs and all(layout.fits == "no" for layout in layouts):
        layouts += _offloaded(layouts)
    by_speed = [timed(layout, exact=False) for layout in layouts if layout.fits != "no"]
    by_speed.sort(key=lambda layout: -layout.speed.tokens_per_second)
    # twice as many layouts as are returned get an exact prediction of their time
    fitting = _exact(job, (layout for layout in by_speed if layout.fits != "tight"), 2 * ROWS)
    tight = _exact(job, (layout for layout in by_speed if layout.fits == "tight"), 2 * ROWS)
    if not (fitting or tight):
        return _exact(job, sorted(layouts, key=lambda layout: layout.peak.gib), ROWS), len(layouts)
    fastest = min(map(_rank, fitting), default=(0.0, 0.0))
    faster = [row for row in tight if _rank(row) < fastest]
    rows = _with_front(sorted([*fitting, *faster], key=_rank))
    above = [row for row in rows if row.prediction.fits != "tight"]
    below = [row for row in rows if row.prediction.fits == "tight"]
    return [*_best(above, ROWS), *_best(below, FASTER if fitting else ROWS)], len(layouts)


def _with_front(by_speed: list[Row]) -> list[Row]:
    """Mark the rows of the Pareto front: those that need less memory than every faster row."""
    marked, least = [], float("inf")
    for row in by_speed:
        marked.append(replace(row, front=row.prediction.peak.gib < least))
        least = min(least, row.prediction.peak.gib)
    return marked


def _rank(row: Row) -> tuple[float, float]:
    """Return the key that sorts rows: by speed, then by memory; by memory alone if they do not fit."""
    speed = 0.0 if row.prediction.fits == "no" else row.prediction.speed.tokens_per_second
    return -speed, row.prediction.peak.gib


def _exact(job: Job, ranked: Iterable[Prediction], most: int) -> list[Row]:
    """Return the first `most` layouts, each once, with an exact prediction of their time and, of a schedule with several
    stages on a rank, the number of stages that is then the fastest: the approximate times of these differ too little.
    """
    rows: dict[tuple[Any, ...], dict[int, Row]] = {}
    for prediction in ranked:
        row, stages = Row(prediction, job), prediction.job.pp_schedule.stages_per_rank
        if stages not in rows.get(row.key, {}) and not checks.check(prediction.job):
            rows.setdefault(row.key, {})[stages] = row
        if len(rows) == most:
            break
    return [
        min((replace(row, prediction=timed(row.prediction)) for row in same.values()), key=_rank)
        for same in rows.values()
    ]


def _best(rows: list[Row], most: int) -> list[Row]:
    """Return `most` of the rows in their order, those of the Pareto front before all others."""
    chosen = sorted(rows, key=lambda row: not row.front)[:most]
    return [row for row in rows if row in chosen]


def _points(job: Job) -> Iterator[Prediction]:
    """Yield the predicted memory of the legal jobs in the search space. Among jobs that differ only in activation
    checkpointing, yield the one that recomputes least of those that fit, and of those that are tight the one that
    recomputes still less; if none fits, yield the job that keeps least.
    """
    modes = searched_modes()
    for layout in _layouts(job):
        for batches in _batches(layout):
            last = next(_legal(batches, reversed(modes)), None)
            # a common case: the job does not even fit in the mode that keeps least, so it fits in no mode
            if last and (memory := in_memory(last)).fits == "no":
                yield memory
            elif last:
                fitting = [
                    prediction for prediction in map(in_memory, _legal(batches, modes)) if prediction.fits != "no"
                ]
                yield fitting[0]
                if fitting[0].fits == "tight":
                    yield from [prediction for prediction in fitting if prediction.fits != "tight"][:1]


def _offloaded(layouts: list[Prediction]) -> list[Prediction]:
    """Return the predicted memory of layouts that do not fit, with the optimizer's states, the blocks' inputs or both in
    the host's memory, if they fit so. Of the modes of activation checkpointing, the one is tried that recomputes least.
    """
    fitting = []
    for job in (layout.job for layout in layouts):
        states = changed(job, optimizer={"offload": True})
        # a common case: the job does not even fit with all of it on the host
        if in_memory(with_mode(states, OFFLOAD)).fits != "no":
            for jobs in (_legal(states, searched_modes()), _legal(job, [OFFLOAD]), _legal(states, [OFFLOAD])):
                fitting += [memory for memory in map(in_memory, jobs) if memory.fits != "no"][:1]
    return fitting


def _legal(job: Job, modes: Iterable[str]) -> Iterator[Job]:
    """Return a copy of a job in each mode of activation checkpointing that the rules accept, in the order of `modes`."""
    return (point for mode in modes if not checks.check(point := with_mode(job, mode), (checks.RECIPE,)))


def _layouts(job: Job) -> Iterator[Job]:
    """Yield copies of the job, one for each legal choice of degrees and pipeline schedule."""
    node, layers = job.hardware.gpus_per_node, job.model.n_layers
    asked = job.parallelism.cp > 1 or job.data.seq_len >= LONG
    for tp in divisors(job.model.n_kv_heads):
        for cp in (1, 2, 4, 8, 16) if asked else (1,):
            for pp in divisors(job.gpus):
                rest = job.gpus // (tp * cp * pp)
                if tp > node or pp > layers or rest * tp * cp * pp != job.gpus or job.data.global_batch % rest:
                    continue
                inside = max(node // (tp * cp), 1)
                for shards in {rest, inside} if rest % inside == 0 and inside < rest else {rest}:
                    async_tp = job.compile.name == "block" and tp > 1 and job.parallelism.sequence_parallel
                    for ep in expert_degrees(job, shards * cp * tp):
                        degrees = dict(zip(DEGREES, (rest // shards, shards, cp, tp, pp, ep), strict=True))
                        split = changed(job, parallelism=degrees | {"async_tp": async_tp})
                        yield from _schedules(split) if pp > 1 else [split]


def _schedules(job: Job) -> Iterator[Job]:
    """Yield the job with each pipeline schedule, and with each number of stages per rank that its blocks allow."""
    for kind in PIPELINE_SCHEDULES.values():
        for chunks in (kind.stages_per_rank,) if kind.stages_per_rank else CHUNKS:
            if not kind.from_file and chunks * job.parallelism.pp <= job.model.n_layers:
                yield changed(
                    job,
                    pp_schedule={"name": kind.name, "stages_per_rank": chunks, "split": [], "layers_per_stage": None},
                )


def _batches(job: Job) -> Iterator[Job]:
    """Yield copies of the job, one for each legal size of local batch and microbatch."""
    pp, samples = job.parallelism.pp, job.data.global_batch // (job.parallelism.dp_replicate * job.parallelism.dp_shard)
    if pp == 1:
        cuts = [(size, None) for size in divisors(samples) if size <= LARGEST]
    else:
        cuts = [
            (size * number, number)
            for size in (1, 2, 4)
            for number in {samples // size, 4 * pp, 2 * pp, pp}
            if number and samples % (size * number) == 0
        ]
    for local, number in cuts:
        cut = changed(job, data={"local_batch": local}, pp_schedule={"microbatches": number})
        if not checks.check(cut, (checks.RANKS, checks.LAYOUT)):
            yield cut
