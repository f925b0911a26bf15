"""Compute how much of a run's time was useful."""

from pathlib import Path
from statistics import median
from typing import Any

from . import layout


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
