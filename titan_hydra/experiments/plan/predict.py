"""Predict a job's memory, tokens per second and GPU-hours, whether the job fits the device, and which change would make
it fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from titan_hydra.core.base.amounts import in_bytes
from titan_hydra.core.job.batches import pass_in_words
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.load import picked_anew
from titan_hydra.core.job.config.registry import DATA_SOURCES, EXECUTORS
from titan_hydra.core.job.config.schema import ActivationCheckpoint, Job
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.dtypes import GIB, converts
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.ranks import all_ranks, runs_here
from titan_hydra.core.job.recomputation import mode_of, modes_that_keep_less
from titan_hydra.core.job.rules.checks import check

from . import memory, time
from .bands import band_of
from .memory import Peak, on_the_host
from .shape import NotPredictable
from .time import Speed

Change = tuple[str, Any, Any]  # a key, its old value, and its new value
# fractions of a device's memory: up to FITS a job fits, up to TIGHT it fits tightly, above REFUSED it is refused
FITS, TIGHT, REFUSED = 0.92, 0.98, 1.10
DISPATCHERS = {"all_to_all": "torch's all-to-all", "deep_ep": "DeepEP or HybridEP"}


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and speed of a job. `speed` is None if it cannot be predicted, for the reason in `reason`."""

    job: Job
    peak: Peak
    capacity_gib: float | None
    speed: Speed | None
    reason: str | None = None

    @property
    def fits(self) -> str | None:
        """Whether the job fits on a device: "yes", "tight" or "no"; None if the device's memory is unknown."""
        if self.capacity_gib is None:
            return None
        return (
            "yes"
            if self.peak.gib <= FITS * self.capacity_gib
            else "tight"
            if self.peak.gib <= TIGHT * self.capacity_gib
            else "no"
        )

    @property
    def band(self) -> float | None:
        """The relative half-width of the error band of predicted times; None if the model has a part whose time is not
        known.
        """
        return None if _unknown(self.job) else band_of(self.job)

    @property
    def shown_band(self) -> str:
        """The error band of predicted times as it is printed."""
        return "+- unknown" if self.band is None else f"+-{self.band:.0%}"

    @property
    def gpu_hours(self) -> float | None:
        """The GPU-hours of all steps; checkpoints, validation and the start are not counted."""
        return self.speed.step_seconds * self.job.steps * all_ranks(self.job) / 3600 if self.speed else None


def predict(job: Job, exact: bool = True) -> Prediction:
    """Predict a frozen, legal job. Raises NotPredictable if not even its memory can be predicted."""
    return timed(in_memory(job), exact)


def in_memory(job: Job) -> Prediction:
    """Predict only a job's memory. Raises NotPredictable."""
    return Prediction(job, memory.peak(job), job.cluster.device_memory_gib or job.hardware.memory_gib, None)


def timed(prediction: Prediction, exact: bool = True) -> Prediction:
    """Return the prediction with the job's speed added, or the reason why the speed cannot be predicted."""
    try:
        return replace(prediction, speed=time.speed(prediction.job, exact=exact))
    except NotPredictable as error:
        return replace(prediction, reason=str(error))


def of_launch(job: Job) -> Prediction | None:
    """Predict a job that is about to start; None if its device is unknown, its ranks are simulated, or its family has
    no formulas.
    """
    known = job.hardware.name != "unknown" or job.cluster.device_memory_gib
    if not known or job.comm.name == "fake":
        return None
    try:
        return predict(job)
    except NotPredictable:
        return None


def objection(prediction: Prediction) -> Fault | None:
    """Return a fault if a job is predicted not to fit on its devices, with the nearest change that would make it fit;
    None if it fits.
    """
    job, peak, capacity = prediction.job, prediction.peak, prediction.capacity_gib
    if prediction.fits != "no":
        return None
    need = (
        f"about {peak.gib:,.1f} GiB (+-{memory.BAND:.0%}) on rank {peak.rank}, most of it {peak.largest.name} "
        f"({peak.largest.bytes / GIB:,.1f}), and {job.hardware.name if job.hardware.name != 'unknown' else 'a device'} "
        f"has {capacity:,.1f}"
    )
    for changes in _remedies(job):
        other = freeze(_with(job, changes))
        answer = predict(other, exact=False)
        if answer.fits != "no" and not check(other):  # memory is compared first, as `check` takes longer
            (key, old, value), *others = changes
            also = "".join(f" {name}={new}" for name, _, new in others)
            return Fault(key, old, f"takes {need}", legal=(f"{value}{also} ({answer.peak.gib:,.1f} GiB)",))
    return fault_at(
        job,
        "gpus",
        f"each of them takes {need}; no change of ac, loss, local_batch or dp_shard alone makes it fit, titan plan searches further",
    )


def too_large(prediction: Prediction) -> bool:
    """Whether the predicted memory exceeds the device's so far that the job is refused instead of only warned about."""
    return prediction.fits == "no" and prediction.peak.gib > REFUSED * prediction.capacity_gib


def _remedies(job: Job) -> Iterator[list[Change]]:
    """Yield changes that save memory, beginning with those that cost least time: changes of a single key, then
    activation checkpointing and loss combined with smaller local batches.
    """
    modes: list[list[Change]] = [[("ac", job.ac.name, mode)] for mode in modes_that_keep_less(job.ac.name)]
    losses: list[list[Change]] = [[("loss", job.loss.name, "linear_cross_entropy")]] * (
        job.loss.name == "cross_entropy"
    )
    whole = job.data.local_batch
    sizes: list[list[Change]] = [
        [("data.local_batch", whole, size)] for size in range(whole - 1, 0, -1) if whole % size == 0
    ]
    shards = job.parallelism.dp_shard
    yield from [*modes, *losses, *sizes]
    yield from ([*mode, *loss, *size] for size in [[], *sizes] for mode in [*modes, []] for loss in [*losses, []])
    if shards > 1 or job.gpus == 1:
        yield from (
            [("parallelism.dp_shard", shards, shards * times), ("gpus", job.gpus, job.gpus * times)]
            for times in (2, 4, 8, 16)
        )


def _with(job: Job, changes: list[Change]) -> Job:
    """Return a copy of a job with some changes of `_remedies`. If the changes add shards, the global batch grows, so
    that each shard has as many samples as before.
    """
    new = {key: value for key, _, value in changes}
    if "ac" in new:
        job = with_mode(job, new["ac"])
    if "loss" in new:
        job = changed(job, loss={"name": new["loss"]})
    if "data.local_batch" in new:
        job = changed(job, data={"local_batch": new["data.local_batch"]}, pp_schedule={"microbatches": None})
    if "gpus" in new:
        batch = {"global_batch": job.data.global_batch * new["gpus"] // job.gpus}
        job = changed(job, parallelism={"dp_shard": new["parallelism.dp_shard"]}, data=batch, gpus=new["gpus"])
    return job


def changed(job: Job, gpus: int | None = None, **sections: dict[str, Any]) -> Job:
    """Return a copy of a job in which some keys, given by section, have other values. Both jobs share unchanged
    sections.
    """
    job = copy.copy(job)
    for name, values in sections.items():
        section = copy.copy(getattr(job, name))
        vars(section).update(values)
        setattr(job, name, section)
    job.gpus = job.gpus if gpus is None else gpus
    return job


def with_mode(job: Job, mode: str) -> Job:
    """Return a copy of a job with a mode of activation checkpointing and that mode's defaults."""
    job = copy.copy(job)
    job.ac = _section_of(mode)
    return job


@cache
def _section_of(mode: str) -> ActivationCheckpoint:
    section: ActivationCheckpoint = from_dict(ActivationCheckpoint, {"name": mode})
    return section


def on_nodes(job: Job, gpus: int | None) -> Job:
    """Return a copy of a job on `gpus` devices of a cluster whose nodes are as the job's `hardware` describes them."""
    node = job.cluster.gpus_per_node or job.hardware.gpus_per_node
    if runs_here(job):
        job = copy.copy(job)
        job.cluster = picked_anew(job.cluster, next(name for name, executor in EXECUTORS.items() if not executor.here))
    return changed(job, gpus=gpus, cluster={"gpus_per_node": node})


def not_counted(job: Job) -> list[str]:
    """Return a line for each thing that a data source keeps in device memory and the prediction does not count."""
    sources = ((key, source.name, DATA_SOURCES[source.name].beside) for key, source in data_sources(job.data).items())
    lines = [f"not counted: {thing}, which {key}={name} keeps on each device" for key, name, thing in sources if thing]
    return [*lines, *_unknown(job)]


def notes(job: Job) -> list[str]:
    """Return lines beside a prediction: what it does not count, and what exchanges the rows of experts."""
    lines = not_counted(job)
    if job.data.samples is not None:
        lines.append(pass_in_words(job))
    if job.model.sparse:
        exchange = DISPATCHERS[job.hardware.dispatcher]
        lines.append(f"{exchange} exchanges rows of experts between ranks (hardware.dispatcher)")
    if converts(job, "experts") and not job.precision.emulate:
        lines.append(
            f"precision={job.precision.name}: experts multiply at hardware.float8_tflops times the ratio of grouped matmuls in bf16; "
            "nobody measured this, and weights' gradients are in bf16"
        )
    return [*lines, *cost_of_offload(job)]


def cost_of_offload(job: Job) -> list[str]:
    """Return a line that says what a job pins of the host's memory, and how much longer its step takes than without; no
    line for a job that pins nothing.
    """
    if not (pinned := on_the_host(job)):
        return []
    why = [f"ac={job.ac.name}"] * mode_of(job).host + ["optimizer.offload=true"] * job.optimizer.offload
    plain = changed(with_mode(job, "full") if mode_of(job).host else job, optimizer={"offload": False})
    instead = "without" if job.optimizer.offload else "with ac=full"
    without, seconds = timed(in_memory(plain), exact=False), timed(in_memory(job), exact=False).speed
    lines = [
        f"{', '.join(why)}: {in_bytes(pinned)} of pinned host memory for each device; not compared with what a host has"
    ]
    if without.speed and seconds:
        lines[0] += (
            f"; a step takes {seconds.step_seconds / without.speed.step_seconds - 1:.1%} longer than {instead}, "
            f"which needs {without.peak.gib:,.1f} GiB of a device"
        )
    return lines


def _unknown(job: Job) -> list[str]:
    """Return a line if nobody said which keys the attention of a model's family computes."""
    family = family_of(job.model)
    if family.attended or (family.stacks and not family.linears(job.model)):
        return []
    return [
        f"not known: which keys the attention of model.family={family.name} computes (Family(attended=...)); its time and memory are "
        "counted as those of a causal kernel, so tokens/s have no error band"
    ]


def line(prediction: Prediction) -> list[str]:
    """Return four texts, with error bands: the memory, whether the job fits, the tokens per second, and the GPU-hours."""
    peak, speed, room = prediction.peak, prediction.speed, prediction.capacity_gib
    word = {"yes": "fits", "tight": "tight", "no": "does not fit", None: "unknown device"}[prediction.fits]
    times = ["-", "-"] if speed is None else [f"{speed.tokens_per_second:,.0f}", f"{prediction.gpu_hours:,.1f}"]
    return [
        f"{peak.gib:,.1f} +-{memory.BAND:.0%}{f' of {room:,.1f}' if room else ''}",
        word,
        *(f"{number} {prediction.shown_band}" if number != "-" else number for number in times),
    ]


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON values, for scripts and the report."""
    peak, speed = prediction.peak, prediction.speed
    rate = speed.tokens_per_second if speed else None

    def around(value: float | None, band: float | None) -> list[float] | None:
        return None if value is None or band is None else [value * (1 - band), value * (1 + band)]

    return {
        "memory_gib": peak.gib,
        "memory_gib_band": around(peak.gib, memory.BAND),
        "allocated_gib": peak.allocated_gib,
        "capacity_gib": prediction.capacity_gib,
        "host_gib": on_the_host(prediction.job) / GIB,
        "fits": prediction.fits,
        "rank": peak.rank,
        "tokens_per_second": rate,
        "tokens_per_second_band": around(rate, prediction.band),
        "step_seconds": speed and speed.step_seconds,
        "gpu_hours": prediction.gpu_hours,
        "gpu_hours_band": around(prediction.gpu_hours, prediction.band),
        "hardware": prediction.job.hardware.name,
        "gpus": all_ranks(prediction.job),
        "reason": prediction.reason,
        "dispatcher": prediction.job.hardware.dispatcher if prediction.job.model.sparse else None,
        "not_counted": not_counted(prediction.job),
        "terms": [{"name": term.name, "gib": term.bytes / GIB, "tag": term.tag} for term in peak.terms],
        "parts": speed and [{"name": name, "seconds": seconds} for name, seconds in speed.parts.items()],
    }
