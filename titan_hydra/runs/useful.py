"""Compute how much of a run's time was useful, and how often the runs of a folder were interrupted."""

from pathlib import Path
from statistics import median
from typing import Any

from titan_hydra.base.errors import Kind

from . import layout
from .failure import guilty
from .rundir import inspect_all

# Failures that the job itself causes: the same command would fail again.
OWN_FAULTS = {Kind.CONFIG, Kind.OUT_OF_MEMORY, Kind.NOT_FINITE, Kind.TIME_LIMIT, Kind.PREEMPTED}


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
    attempts = [life for attempt in layout.ATTEMPT.all(directory).values() if (life := _life(attempt))]
    useful = useful_seconds(rows)
    if useful is None or not attempts or layout.REPLICA.all(directory):
        return None
    total = (now or max(end for _, end in attempts)) - min(begin for begin, _ in attempts)
    return min(useful / total, 1.0) if total > 0 else None


def count_interruptions(runs: list[Path]) -> tuple[int, float]:
    """Return the number of attempts that were interrupted after at least one step, and the GPU-days of all attempts
    with at least one step. An attempt was interrupted if it ended early although nobody asked it to, and the job itself
    was not the cause.
    """
    failures, seconds = 0, 0.0
    for directory, state in zip(runs, inspect_all(runs), strict=True):
        config = layout.CONFIG.read(directory)
        homes = [home for home in (directory, *layout.REPLICA.all(directory).values()) if layout.ATTEMPT.all(home)]
        groups = (config.get("fault_tolerance") or {}).get("replicas") or 1
        for home in homes:
            attempts = layout.ATTEMPT.all(home)
            for number, attempt in attempts.items():
                if (life := _life(attempt)) and layout.STATUS.read(attempt):
                    seconds += (life[1] - life[0]) * (config.get("gpus") or 1) * groups / len(homes)
                    failures += _interrupted(attempt, number < max(attempts) or not state.active)
    return failures, seconds / 86400


def device_hours(directory: Path) -> float:
    """Return the device-hours of a run: the hours of all its ranks in all its attempts."""
    config = layout.CONFIG.read(directory)
    groups = (config.get("fault_tolerance") or {}).get("replicas") or 1
    lives = [life for attempt in layout.ATTEMPT.all(directory).values() if (life := _life(attempt))]
    return sum(end - begin for begin, end in lives) * (config.get("gpus") or 1) * groups / 3600


def _life(attempt: Path) -> tuple[float, float] | None:
    """Return when an attempt's rank 0 started, and when it last wrote a record. None if it left no record."""
    rank, status = layout.RANK.read(attempt), layout.STATUS.read(attempt)
    begin = rank.get("started")
    return None if begin is None else (begin, max(rank.get("ended", begin), status.get("time", begin)))


def _interrupted(attempt: Path, over: bool) -> bool:
    """Whether an attempt failed for a reason outside the job itself, or ended without a record (as after a power cut)."""
    if layout.CANCELLED.of(attempt).exists():
        return False
    if failure := guilty(attempt):
        return failure.kind not in OWN_FAULTS
    return over and "exit_status" not in layout.RANK.read(attempt)
