"""How a run spent its time: which steps it made in which layout, and how fast; how much of its time was useful."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.ranks import DEGREES

from . import layout


@dataclass(frozen=True)
class Stretch:
    """Successive steps that a run made in the same layout, perhaps in several attempts."""

    words: str
    gpus: int
    first: int
    last: int
    rate: float | None  # median of tokens per second and device, without the first row of each attempt

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", {self.rate:,.0f} tokens/s per device"
        return f"steps {self.first} to {self.last}: {self.words}{rate}"


def values_of_layout(job: Job) -> dict[str, Any]:
    """Return the values of a `layout` event, which distinguish the layouts of a run."""
    degrees = {name: getattr(job.parallelism, name) for name in DEGREES}
    return {"parallelism": job.parallelism.name, "gpus": job.gpus, "local_batch": job.data.local_batch, **degrees}


def layout_in_words(values: Mapping[str, Any]) -> str:
    """Return the layout of an event `layout` in words: parallelism=fsdp_tp on 4 ranks (dp_shard 2, tp 2), local batch
    8.
    """
    degrees = ", ".join(f"{name} {degree}" for name in DEGREES if (degree := values.get(name, 1)) > 1)
    batch = f", local batch {values['local_batch']}" if "local_batch" in values else ""
    return f"parallelism={values['parallelism']} on {counted(values['gpus'], 'rank')}{f' ({degrees})' if degrees else ''}{batch}"


def stretches_of(directory: Path) -> list[Stretch]:
    """Return the stretches of a run in order; none if its layout never changed. If steps were lost and made again, they
    count only in the layout in which they were made last.
    """
    events = [
        event
        for event in layout.EVENTS.rows(directory)[0]
        if event["event"] == "layout" and {"parallelism", "gpus"} <= event.keys()
    ]
    if events and events[0]["step"]:  # attempts before the first `titan resume` wrote no event `layout`
        events[:0] = _first_layout(layout.FIRST_CONFIG.read(directory))
    rows = layout.METRICS.rows(directory)[0] if events else []
    last = rows[-1]["step"] if rows else 0
    # the layout in words, the number of ranks, the step before the stretch's first
    merged: list[tuple[str, int, int]] = []
    for event in events:
        while merged and merged[-1][2] >= event["step"]:  # the steps of the earlier stretch were lost
            merged.pop()
        degrees = layout_in_words(event)
        if not merged or merged[-1][0] != degrees:
            merged.append((degrees, event["gpus"], event["step"]))
    ends = [*(before for _, _, before in merged[1:]), last][: len(merged)]
    stretches = []
    for (degrees, gpus, before), end in zip(merged, ends, strict=True):
        rates = [
            row["tokens_per_second"]
            for row in rows
            if before < row["step"] <= end and row.get("tokens_per_second") and not row.get("first_step")
        ]
        if end > before:
            stretches.append(Stretch(degrees, gpus, before + 1, end, median(rates) if rates else None))
    return stretches


def _first_layout(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what an event `layout` of the first attempt would have; none if the first configuration is damaged."""
    try:
        degrees = {name: first["parallelism"][name] for name in ("name", *DEGREES)}
        batch = first["data"]["local_batch"]
        return [{"step": 0, "gpus": first["gpus"], "local_batch": batch, "parallelism": degrees.pop("name"), **degrees}]
    except KeyError:
        return []


def useful_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds of all steps, each counted once. The first row of a process includes compilation, and also
    stands for steps whose rows were lost when the process before was killed. So each step of this row counts at most as
    much as the median step. None if there are no other rows.
    """
    known = [row for row in rows if row.get("step_seconds") is not None]
    steady = [row["step_seconds"] for row in known[1:] if not row.get("first_step")]
    if not steady:
        return None
    usual, seconds, before = median(steady), 0.0, known[0]["step"] - 1
    for row in known:
        first = row.get("first_step") or row is known[0]
        seconds += (row["step"] - before) * (min(row["step_seconds"], usual) if first else row["step_seconds"])
        before = row["step"]
    return seconds


def goodput_of(directory: Path, rows: list[dict[str, Any]], now: float | None = None) -> float | None:
    """Return useful time divided by all time since the run's first start, up to `now` or, without `now`, to the last
    record. None if a time is unknown. None also for a run with replica groups, as its rows are those of one group.
    """
    attempts = [life for attempt in layout.ATTEMPT.all(directory).values() if (life := life_of(attempt))]
    useful = useful_seconds(rows)
    if useful is None or not attempts or layout.REPLICA.all(directory):
        return None
    total = (now or max(end for _, end in attempts)) - min(begin for begin, _ in attempts)
    return min(useful / total, 1.0) if total > 0 else None


def device_hours(directory: Path) -> float:
    """Return the device-hours of a run: the hours of all its ranks in all its attempts."""
    config = layout.CONFIG.read(directory)
    groups = (config.get("fault_tolerance") or {}).get("replicas") or 1
    lives = [life for attempt in layout.ATTEMPT.all(directory).values() if (life := life_of(attempt))]
    return sum(end - begin for begin, end in lives) * (config.get("gpus") or 1) * groups / 3600


def life_of(attempt: Path) -> tuple[float, float] | None:
    """Return when an attempt's rank 0 started, and when it last wrote a record. None if it left no record."""
    rank, status = layout.RANK.read(attempt), layout.STATUS.read(attempt)
    begin = rank.get("started")
    return None if begin is None else (begin, max(rank.get("ended", begin), status.get("time", begin)))
