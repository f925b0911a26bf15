"""Measure each rank's own time of a step (without the rank's waits for other ranks), and find the slowest rank for a
row of metrics. core/job/run/stragglers.py decides from many rows whether a rank is slow.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from titan_hydra.core.base.private import flight_recorders
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import has_ring, world_size

UNKNOWN = float("nan")


class OnHost:
    """Measures a rank that computes on the CPU. Its own time is its wait for data plus the CPU time of its main thread.
    The main thread runs forward, backward and optimizer; it sleeps in a collective, which gloo runs in threads of its
    own.
    """

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0  # totals since the last row
        self.sent = (0.0, 0)  # the totals at the last call of `per_step`
        self._mark = time.thread_time()

    def wait(self) -> None:
        """Return at once: a CPU has done everything that the host has asked for."""

    def begin(self) -> None:
        """Begin a step."""

    def compute(self, waited: float) -> None:
        """Begin to compute, after `waited` seconds for the batch."""
        self.seconds += waited
        self._mark = time.thread_time()

    def end(self) -> None:
        """End a step. Call this before the work that is done between steps."""
        self._add()

    def per_step(self) -> float:
        """Return the mean seconds of a step since the last row. The part of the present step that is done counts; its
        remainder counts in the next row.
        """
        self._add()
        self.sent = (self.seconds, self.steps + 1)
        return self.seconds / (self.steps + 1)

    def next_step(self, recorded: bool) -> None:
        """Count the step that has ended. `recorded` means that the step has a row; then a new mean begins."""
        self.steps += 1
        if recorded:
            self.seconds, self.steps = self.seconds - self.sent[0], self.steps - self.sent[1]
            self.sent = (0.0, 0)

    def _add(self) -> None:
        now = time.thread_time()
        self.seconds, self._mark = self.seconds + now - self._mark, now


class OnDevice:
    """Measures a rank that computes on CUDA: how long the NCCL collectives of a step took, by the events that NCCL's
    process groups record (core/train/observe/flight.py enables them). A collective ends on all ranks only after the last rank has
    begun it, so the slowest rank has the shortest collectives. The host never waits for the device, because only the
    events of steps that the device has completed are read.
    """

    def __init__(self) -> None:
        # for each of the last steps, the times between which the host issued it
        self.steps: deque[tuple[int, int]] = deque(maxlen=2)
        self._began = time.time_ns()

    def wait(self) -> None:
        """Wait until the device has done everything that the host has asked for."""
        torch.cuda.current_stream().synchronize()

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.time_ns()

    def compute(self, waited: float) -> None:
        """Begin to compute, after `waited` seconds for the batch."""

    def end(self) -> None:
        """End a step. Call this before the work that is done between steps."""
        self.steps.append((self._began, time.time_ns()))

    def per_step(self) -> float:
        """Return the seconds of all collectives of the step before the last, which the device has completed."""
        if len(self.steps) < 2:
            return UNKNOWN
        entries = []
        for dump in flight_recorders():
            with_collectives, with_stacks, only_active = True, False, False
            content = pickle.loads(dump(with_collectives, with_stacks, only_active))
            entries += content.get("entries", [])
        return seconds_of_collectives(entries, *self.steps[0])

    def next_step(self, recorded: bool) -> None:
        """Count the step that has ended."""


def seconds_of_collectives(entries: list[dict[str, Any]], began: int, ended: int) -> float:
    """Return the seconds of all NCCL operations that the host issued between two times (in nanoseconds). UNKNOWN if the
    recorder lacks an operation, or the time of a collective.
    """
    if not entries or min(entry["time_created_ns"] for entry in entries) > began:
        return UNKNOWN
    seconds = 0.0
    for entry in entries:
        if not (began <= entry["time_created_ns"] <= ended and entry["profiling_name"].startswith("nccl:")):
            continue
        if "duration_ms" in entry:
            seconds += entry["duration_ms"] / 1e3
        elif not entry["is_p2p"]:  # for several messages that are sent together, only one entry has the time
            return UNKNOWN
    return seconds


def own_time_on(device: torch.device) -> OnHost | OnDevice:
    """Return the object that measures a rank's own time on this kind of device."""
    return OnDevice() if device.type == "cuda" else OnHost()


def peers(job: Job) -> list[list[int]]:
    """Divide the ranks of a replica group into sets that compute the same: the ranks of each pipeline stage. If ring
    attention is not balanced, the parts of a sequence cost differently; then a set has only ranks with the same part.
    """
    degrees, ranks = job.parallelism, range(world_size(job))
    per_stage, parts = len(ranks) // degrees.pp, degrees.cp if has_ring(job) and not degrees.balanced else 1
    sets: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        sets.setdefault((rank // per_stage, rank // degrees.tp % parts), []).append(rank)
    return list(sets.values())


def slowest(times: Sequence[float], sets: list[list[int]]) -> dict[str, Any]:
    """Return the fields of a row: the slowest rank, the ratio of its time to the median of all other ranks in its set,
    and the largest ratio of one of these ranks to the same median. The slowest rank is the one with the largest ratio.
    The fields are None if a time is unknown, or if every set has only one rank.
    """
    slowest_so_far: tuple[float, int | None, float | None] = (0.0, None, None)
    if all(time > 0 for time in times):  # false for UNKNOWN
        for ranks in sets:
            *others, last = sorted(ranks, key=times.__getitem__)
            if others:
                middle = median(times[rank] for rank in others)
                slowest_so_far = max(slowest_so_far, (times[last] / middle, last, times[others[-1]] / middle))
    ratio, rank, spread = slowest_so_far
    return {"slowest_rank": rank, "slowest_over_median": ratio or None, "others_over_median": spread}


def without_waits(collectives: Sequence[float], sets: list[list[int]], step_seconds: float) -> list[float]:
    """Return each rank's own time, computed from the times of its collectives. Among the ranks that compute the same,
    the one with the shortest collectives is assumed not to have waited; each other rank has waited for as long as its
    collectives took longer.
    """
    times = [UNKNOWN] * len(collectives)
    for ranks in sets:
        shortest = min(collectives[rank] for rank in ranks)
        for rank in ranks:
            times[rank] = step_seconds - (collectives[rank] - shortest)
    return times
