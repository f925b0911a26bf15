"""Record a few steps by torch's profiler (a trace and a table), a memory snapshot, and the phases of all steps
(profiling=on).

    attempts/<n>/profile/trace_<rank>.json.gz    torch's trace; opens in https://ui.perfetto.dev
    attempts/<n>/profile/summary_<rank>.txt      torch's table of the longest kernels and operators (summary.txt for rank 0)
    attempts/<n>/profile/memory_<rank>.pickle    a memory snapshot (on CUDA); opens in https://pytorch.org/memory_viz
    attempts/<n>/profile/phases_<rank>.json      data, forward and backward, optimizer, ... of every step; opens in Perfetto too

Recorded steps are slower than others, and so is the step before them, which warms up the profiler. No rate includes
these steps.
"""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titan_hydra.core.base.private import dump_memory_snapshot
from titan_hydra.core.job.config.operation import Profiling
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run

from . import memory
from .metrics import Metrics
from .watchdog import Watchdog

SHOWN = 40  # number of rows of torch's table in summary_<rank>.txt


class Profiler:
    """Records the steps that the keys of `profiling` choose; with profiling=off, no step."""

    def __init__(self, config: Profiling, run: Run, device: torch.device, metrics: Metrics, watch: Watchdog) -> None:
        """Prepare the folder of the traces; `count` is the number of steps that this process has begun."""
        self.config, self.run, self.device, self.metrics, self.clock = config, run, device, metrics, metrics.clock
        self.watch, self.on, self.count = watch, config.name == "on", 0
        self.memory = config.memory and device.type == "cuda"  # whether memory allocations are also recorded
        self.profiler: profile | None = None
        self.folder = layout.PROFILE.of(run.attempt)
        if self.on:
            self.folder.mkdir(exist_ok=True)
            watch.on_phase = Phases(self.folder / f"phases_{run.rank}.json", run.rank).at

    def begins(self, step: int) -> None:
        """Mark the beginning of a step, which ends the previous step. The first recorded step is the step number
        profiling.first_step of this process.
        """
        if not self.on:
            return
        self.ends()
        self.count, self.step = self.count + 1, step
        if self.count == max(self.config.first_step - 1, 1):
            with self.clock.leave_out():
                self.record(int(self.config.first_step > 1))

    def ends(self) -> None:
        """Mark the end of a step. Stop recording if it is the last step to record."""
        if not self.clock.profiled:
            return
        last = self.count == self.config.first_step + self.config.steps - 1
        with self.clock.leave_out() if last else nullcontext():  # after the last one, files are written for seconds
            if self.profiler is not None:
                self.profiler.step()
            if last:
                self.stop()

    def record(self, warm_up: int) -> None:
        """Start recording, after `warm_up` steps. Ranks that do not record also mark these steps as profiled."""
        self.clock.profiled = True
        if self.run.rank == 0 or self.config.all_ranks:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            turns = schedule(wait=0, warmup=warm_up, active=self.config.steps, repeat=1)
            self.profiler = profile(activities=activities, schedule=turns, on_trace_ready=self.write)
            if self.memory:
                self.watch.records_memory = False
                memory.record("all", max_entries=1_000_000)
            self.profiler.start()

    def stop(self) -> None:
        """Stop recording. torch then calls `write`, even if the run ends before the last step to record."""
        if self.profiler is not None:
            self.profiler.stop()
        self.profiler, self.clock.profiled = None, False

    def close(self) -> None:
        if self.on:
            self.ends()
            self.stop()

    def write(self, profiler: profile) -> None:
        """Write the trace, the summary and, if it is recorded, the memory's history of the steps that have ended."""
        began, rank = time.perf_counter(), self.run.rank
        trace = self.folder / f"trace_{rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        if self.memory:
            dump_memory_snapshot(str(self.folder / f"memory_{rank}.pickle"))
            memory.record(None)
        summary = self.folder / (f"summary_{rank}.txt" if rank else "summary.txt")
        by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        summary.write_text(profiler.key_averages().table(sort_by=by, row_limit=SHOWN, max_name_column_width=80) + "\n")
        self.metrics.event("profile", self.step, seconds=time.perf_counter() - began, trace=str(trace))


class Phases:
    """Writes the phases of a rank as a Chrome trace: a JSON array without a closing bracket. So a viewer can also open
    the trace of a killed run.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.file, self.rank = path.open("w", buffering=1), rank
        self.last: tuple[str, int, float] | None = None
        self.file.write("[\n")
        self.put({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    def at(self, phase: str, step: int, now: float) -> None:
        """Record that a phase begins at the time `now`, and that the previous phase ends."""
        if self.last is not None:
            name, of, began = self.last
            self.put({"name": name, "ph": "X", "ts": began * 1e6, "dur": (now - began) * 1e6, "args": {"step": of}})
        self.last = (phase, step, now)

    def put(self, event: dict) -> None:
        self.file.write(json.dumps(event | {"pid": self.rank, "tid": self.rank}) + ",\n")
