"""Each rank's own time of a step, without its waits for other ranks, and the slowest rank of a row of metrics.
runs/stragglers.py decides from many rows whether a rank is slow.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from titan_hydra.base.private import flight_recorders
from titan_hydra.config.schema import Job
from titan_hydra.job.ranks import has_ring, world_size

UNKNOWN = float("nan")


class OnHost:
    """Measures a rank that computes on the CPU: its wait for data, and the CPU time of its main thread. This thread
    runs forward, backward and optimizer; in a collective it sleeps, as gloo has threads of its own.
    """

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0  # since the last row
        self.sent = (0.0, 0)  # what `per_step` has returned the mean of
        self._mark = time.thread_time()

    def begin(self) -> None:
        """Begin a step."""

    def compute(self, waited: float) -> None:
        """Begin to compute, after `waited` seconds for the batch."""
        self.seconds += waited
        self._mark = time.thread_time()

    def end(self) -> None:
        """End a step, before what is done between steps."""
        self._add()

    def per_step(self) -> float:
        """Return the mean seconds of a step since the last row. The present step counts as far as it has come, and its
        rest counts in the next row.
        """
        self._add()
        self.sent = (self.seconds, self.steps + 1)
        return self.seconds / (self.steps + 1)

    def next_step(self, recorded: bool) -> None:
        """Count the step that has ended. With `recorded`, it has written a row, and a new mean begins."""
        self.steps += 1
        if recorded:
            self.seconds, self.steps = self.seconds - self.sent[0], self.steps - self.sent[1]
            self.sent = (0.0, 0)

    def _add(self) -> None:
        now = time.thread_time()
        self.seconds, self._mark = self.seconds + now - self._mark, now


class OnDevice:
    """Measures a rank that computes on CUDA: how long the NCCL collectives of a step took, by the events that NCCL's
    process groups record (observe/flight.py turns these on). A collective ends for all ranks when the last has begun
    it, so that the slowest rank has the shortest collectives. The host waits for nothing: only steps that the device
    has completed are read.
    """

    def __init__(self) -> None:
        # times between which the host issued a step
        self.steps: deque[tuple[int, int]] = deque(maxlen=2)
        self._began = time.time_ns()

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.time_ns()

    def compute(self, waited: float) -> None:
        """Begin to compute, after `waited` seconds for the batch."""

    def end(self) -> None:
        """End a step, before what is done between steps."""
        self.steps.append((self._began, time.time_ns()))

    def per_step(self) -> float:
        """Return the seconds of all collectives of the step before the last, which the device has completed."""
        if len(self.steps) < 2:
            return UNKNOWN
        entries = [
            entry for dump in flight_recorders() for entry in pickle.loads(dump(True, False, False)).get("entries", [])
        ]
        return seconds_of_collectives(entries, *self.steps[0])

    def next_step(self, recorded: bool) -> None:
        """Count the step that has ended."""


def seconds_of_collectives(entries: list[dict[str, Any]], began: int, ended: int) -> float:
    """Return the time of all NCCL operations that the host issued between two times in nanoseconds; UNKNOWN if the
    recorder has not all of them, or lacks the time of a collective.
    """
    if not entries or min(entry["time_created_ns"] for entry in entries) > began:
        return UNKNOWN
    seconds = 0.0
    for entry in entries:
        if not (began <= entry["time_created_ns"] <= ended and entry["profiling_name"].startswith("nccl:")):
            continue
        if "duration_ms" in entry:
            seconds += entry["duration_ms"] / 1e3
        elif not entry["is_p2p"]:  # of several messages that are sent together, one entry has the time
            return UNKNOWN
    return seconds


def own_time_on(device: torch.device) -> OnHost | OnDevice:
    """Return the measurement of a rank's own time for the kind of its device."""
    return OnDevice() if device.type == "cuda" else OnHost()


def peers(job: Job) -> list[list[int]]:
    """Return the ranks of a replica group in sets that compute the same: those of a pipeline stage. The parts of a
    sequence in a ring that is not balanced cost differently, so only ranks with the same part are compared.
    """
    degrees, ranks = job.parallelism, range(world_size(job))
    per_stage, parts = len(ranks) // degrees.pp, degrees.cp if has_ring(job) and not degrees.balanced else 1
    sets: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        sets.setdefault((rank // per_stage, rank // degrees.tp % parts), []).append(rank)
    return list(sets.values())


def slowest(times: Sequence[float], sets: list[list[int]]) -> dict[str, Any]:
    """Return the fields of a row: the rank whose time is the largest relative to the median of its other peers, this
    ratio, and the largest ratio of the other peers. They are None if a time is unknown, or no rank has a peer.
    """
    found: tuple[float, int | None, float | None] = (0.0, None, None)
    if all(time > 0 for time in times):  # false for UNKNOWN
        for ranks in sets:
            *others, last = sorted(ranks, key=times.__getitem__)
            if others:
                middle = median(times[rank] for rank in others)
                found = max(found, (times[last] / middle, last, times[others[-1]] / middle))
    ratio, rank, spread = found
    return {"slowest_rank": rank, "slowest_over_median": ratio or None, "others_over_median": spread}


def without_waits(collectives: Sequence[float], sets: list[list[int]], step_seconds: float) -> list[float]:
    """Return each rank's own time, from the times of its collectives: of the ranks that compute the same, the one with
    the shortest collectives has waited for none, and each other rank has waited as much longer as its collectives took.
    """
    times = [UNKNOWN] * len(collectives)
    for ranks in sets:
        shortest = min(collectives[rank] for rank in ranks)
        for rank in ranks:
            times[rank] = step_seconds - (collectives[rank] - shortest)
    return times
