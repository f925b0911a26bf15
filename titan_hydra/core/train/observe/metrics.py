"""Measure a run and record the results in metrics.jsonl. The console and the trackers get copies of the rows.

docs/metrics.md defines the numbers. A number that is unknown is None; it is never estimated.
"""

import contextlib
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from titan_hydra.core.base.amounts import or_dash, time_of_day
from titan_hydra.core.base.text import finite_or_null
from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import all_ranks
from titan_hydra.core.job.run import layout, records
from titan_hydra.core.job.run.checkpoints import lowest_held_out
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.job.run.stretches import goodput_of

from .stragglers import OnDevice, OnHost, own_time_on, peers, slowest, without_waits
from .trackers import Tracker, open_trackers, trackable

# Dense bf16 peak in FLOP/s from the vendor's data sheet, by a part of the device's name; the first matching entry
# counts. (conf/hardware has the lower sustained rates, for fewer devices.)
PEAK_FLOPS = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A6000": 154.85e12,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GB300": 2.5e15,
    "B300": 2.25e15,
    "RTX PRO 6000 Blackwell Workstation": 503.8e12,
    "L40S": 362e12,
    "MI300X": 1300e12,
    "MI325X": 1300e12,
    "MI250X": 191.5e12,
}


class Clock:
    """Measures the seconds of each step, and how many of them are waits for data.

    A step ends when the host has its loss and norm, and the next step begins then: all time belongs to a step, except
    for what `leave_out` leaves out. A device makes the update of a step after the host has the loss, so on a device the
    time of a step has the update of the step before in it.
    """

    def __init__(self, own: OnHost | OnDevice) -> None:
        """Begin a clock. `own` measures the rank's own time of each step, without its waits for other ranks."""
        self.own = own
        self.steps: list[float] = []  # seconds of every step of this process, except the first
        self.window: list[
            tuple[float, float]
        ] = []  # for each step since the last row: seconds of the step, and seconds of waiting for data
        self.profiled = False  # whether a profiler is recording, which slows steps down
        self.disturbed = 0  # number of profiled steps since the last row
        self._first, self._began = True, 0.0

    def start(self) -> None:
        """Begin to fetch the batch of a step. The time of this process's first step begins here."""
        self._asked = time.perf_counter()
        if self._first:
            self._began = self._asked
        self.own.begin()

    def has_data(self) -> None:
        """Record that the step's batch has arrived."""
        self._data = time.perf_counter() - self._asked
        self.own.compute(self._data)

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave the time of the block out of the steps. What the device still has to do when the block begins belongs to
        a step, so the host waits for it first. Blocks must not be nested.
        """
        self.own.wait()
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def stop(self) -> None:
        """End the step, and begin the next. Call this when the step's loss is on the host."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.own.end()
        self.window.append((seconds, self._data))
        self.disturbed += self.profiled
        # the first step includes compilation and the creation of memory pools and communicators
        if not self._first and not self.profiled:
            self.steps.append(seconds)
        self._first = False


class Rows:
    """A .jsonl file to which rows are appended. While the disk is full, rows are kept in memory and the run continues."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        truncate(path, resumed_at)
        self.file, self.waiting = path.open("ab", buffering=0), b""

    def add(self, row: dict[str, Any]) -> None:
        """Write the rows that are kept in memory, then this row with the time of day."""
        failed = bool(self.waiting)
        self.waiting += layout.with_sum(row | {"time": round(time.time(), 3)})
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not failed:
                print(
                    f"WARNING: {error}: {self.file.name}; its rows are kept until there is room",
                    file=sys.stderr,
                    flush=True,
                )


class Metrics:
    """Collects the rows of a run on every rank and writes them on rank 0."""

    def __init__(self, job: Job, run: Run, device: torch.device, resumed_at: int, parameters: int) -> None:
        """Begin the rows after step `resumed_at` of a model with this number of `parameters`; only rank 0 opens files
        and trackers.
        """
        self.job, self.run, self.device, self.clock = job, run, device, Clock(own_time_on(device))
        self.ranks, self.peers = all_ranks(job), peers(job)
        self.tokens_per_step = job.data.global_batch * job.data.seq_len
        self.parameters, formula = parameters, family_of(job.model).flops
        # FLOPs per token, forward and backward
        self.flops = formula(job.model, job.data.seq_len, parameters) if formula else None
        self.peak = job.metrics.peak_flops or peak_flops(device)
        self.began, self.memory_reserved, self.validation_loss = time.time(), None, None
        self.rows: Rows | None = None  # None on ranks other than 0
        self.events: Rows | None = None
        self.trackers: list[Tracker] = []
        self.losses: list[float] = []  # the loss of each step since the last row
        self.columns: list[dict[str, float]] = []  # the objective's columns of each of these steps
        self.first_row = True  # whether this process has written no row
        self.mean_loss: float | None = None  # the value `loss_mean` of the last row
        self.tasks: dict[str, dict[str, float]] = {}  # the newest results of each evaluation task
        if run.rank == 0:
            self.rows, self.events = (
                Rows(entry.of(run.directory), resumed_at) for entry in (layout.METRICS, layout.EVENTS)
            )
            self.trackers = open_trackers(job, run, resumed_at)

    def due(self, step: int) -> bool:
        """Whether the step gets a row: the first step of this process or of the run, the last, or a log_every-th step."""
        return step in (1, self.job.steps) or step % self.job.metrics.log_every == 0 or len(self.clock.steps) == 0

    def own_times(self, step: int) -> list[float]:
        """Return a list with this rank's own time at the index of the rank, and zeros elsewhere. The sum of these lists
        over the ranks has the own times of all ranks. If the step gets no row, the list has only zeros, so that the
        collective has the same size in every step: the analysis of a hang (core/job/run/hang.py) compares sizes. Return [] if
        there is only one rank.
        """
        times = [0.0] * self.run.world_size if self.run.world_size > 1 else []
        if times and self.due(step):
            times[self.run.rank] = self.clock.own.per_step()
        return times

    def step(
        self,
        step: int,
        loss: float | None,
        grad_norm: float,
        lr: float,
        times: list[float],
        columns: dict[str, float],
        more: Sequence[Any] = (),
    ) -> None:
        """Collect a step's measurements, and write a row if one is due. `loss` is None, and `columns` (of the objective)
        empty, if no element of the step's batch counts; `times` is the sum of `own_times` over the ranks; each of `more`
        that is not None reads further fields, by a collective. All ranks must call this, because an all-reduce finds the
        largest memory of all ranks.
        """
        self.losses += [] if loss is None else [loss]
        self.columns += [columns] if columns else []
        due = self.due(step)
        self.clock.own.next_step(recorded=due)
        if due:
            self._record(step, loss, grad_norm, lr, times, more)

    def _record(
        self, step: int, loss: float | None, grad_norm: float, lr: float, times: list[float], more: Sequence[Any]
    ) -> None:
        """Write the row of a step, with means over the steps since the last row."""
        first, self.first_row = self.first_row, False
        self.mean_loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.losses.clear()
        memory, reserved = self._memory()
        seconds, data_seconds = (
            sum(column) / len(self.clock.window) for column in zip(*self.clock.window, strict=True)
        )
        self.clock.window.clear()
        rate = self.tokens_per_step / seconds / self.ranks
        row = {
            "step": step,
            "loss": loss,
            "loss_mean": self.mean_loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": rate,
            "tflops": self.flops and self.flops * rate / 1e12,
            "mfu": self._mfu(rate),
            "memory_gib": memory,
            "memory_reserved_gib": reserved,
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "tokens_seen": step * self.tokens_per_step,
        }
        if times and isinstance(self.clock.own, OnDevice):
            times = without_waits(times, self.peers, seconds)
        row |= slowest(times, self.peers if times else []) | dict(
            field for measured in more if measured for field in measured.read().items()
        )
        row |= self._means()
        if self.job.debug.balance_experts:
            row["balanced_experts"] = True
        if first:  # this is the first row of the process; its time includes compilation
            row["first_step"] = True
        # a profiler slows steps down, so the times of this row cannot be compared with those of other rows
        if self.clock.disturbed:
            row["profiled_steps"], self.clock.disturbed = self.clock.disturbed, 0
        if self.rows:
            with self.clock.leave_out():
                self.rows.add(row)
                print(console_line(row, self.job.steps), flush=True)
                self._track(row)

    def _means(self) -> dict[str, float | None]:
        """Return the means of the objective's columns over the steps since the last row."""
        rows, self.columns = self.columns, []
        return finite_or_null({name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {})

    def event(self, name: str, step: int, **values: Any) -> None:
        """Write a row to events.jsonl about an event: a validation, a checkpoint, bad files, ... A number that is not
        finite is null.
        """
        values = finite_or_null(values)
        if name == "validation":
            self.validation_loss = values["validation_loss"]
        elif name == "task":
            self.tasks[values["task"]] = {key: value for key, value in values.items() if key not in ("task", "seconds")}
        if self.events:
            self.events.add(row := {"event": name, "step": step} | values)
            print(event_line(row, self.job.steps), flush=True)
            self._track(trackable(row))

    def result(self, step: int) -> dict[str, Any]:
        """Return the numbers of result.json. Rates are medians over all steps of this process except the first."""
        rates = sorted(self.tokens_per_step / seconds / self.ranks for seconds in self.clock.steps)
        rate = median(rates) if rates else None
        quarter = quantiles(rates, n=4) if len(rates) > 1 else None
        seconds = time.time() - self.began
        # these are read from files, because the files also have the validations and steps of earlier processes
        lowest, lowest_step = lowest_held_out(self.run.directory)
        goodput = goodput_of(self.run.directory, layout.METRICS.rows(self.run.directory)[0], time.time())
        return {
            "steps": step,
            "final_loss": self.mean_loss,
            "validation_loss": self.validation_loss,
            "lowest_validation_loss": lowest,
            "lowest_validation_step": lowest_step,
            "tasks": self.tasks,
            "tokens": step * self.tokens_per_step,
            "parameters": self.parameters,
            "flops_per_token": self.flops,
            "tokens_per_second": rate,
            "tokens_per_second_iqr": quarter[2] - quarter[0] if quarter else None,
            "measured_steps": len(rates),
            "memory_gib": self.memory_reserved,
            "mfu": self._mfu(rate),
            "seconds": seconds,
            "goodput": goodput if self.job.fault_tolerance.replicas == 1 else None,
            "gpu_hours": seconds * self.ranks / 3600 if self.device.type == "cuda" else None,
            "world_size": self.ranks,
            "device": device_name(self.device),
        } | ({"balanced_experts": True} if self.job.debug.balance_experts else {})

    def close(self) -> None:
        for rows in filter(None, (self.rows, self.events)):
            rows.file.close()
        for tracker in self.trackers:
            tracker.close()

    def _track(self, row: dict[str, Any]) -> None:
        """Give a row to every tracker; one that fails gets no more rows."""
        for tracker in list(self.trackers):
            try:
                tracker.log(row)
            # trackers get only copies of the rows, so a failing tracker must never stop a run
            except Exception as error:
                print(f"warning: {tracker.name} failed and gets no more rows: {error}", flush=True)
                self.trackers.remove(tracker)

    def _mfu(self, rate: float | None) -> float | None:
        if self.peak is None or rate is None or self.flops is None or self.job.precision.converter or adapts(self.job):
            return None
        return self.flops * rate / self.peak

    def _memory(self) -> tuple[float | None, float | None]:
        """Return the peak of allocated and the peak of reserved memory since the last row, in GiB. Each is the largest
        of all ranks. Return (None, None) on a CPU.
        """
        if self.device.type != "cuda":
            return None, None
        stats = torch.cuda.memory_stats(self.device)
        peaks = torch.tensor(
            [stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats(self.device)
        active, reserved = (peaks / 2**30).tolist()
        self.memory_reserved = max(self.memory_reserved or 0.0, reserved)
        return active, reserved


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if the device's name is not in PEAK_FLOPS."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAK_FLOPS.items():
            if part in name:
                return peak
    return None


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor, on which a rank computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()


def console_line(row: dict[str, Any], steps: int) -> str:
    """Return the line that a step's row prints; `steps` is the number of steps of the job."""
    parts = [
        _step(row, steps),
        f"loss {or_dash(row['loss'], '.4f')} (mean {or_dash(row['loss_mean'], '.4f')})",
        f"norm {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
    ]
    # `tflops` is None if the family has no formula for FLOPs; nobody asks for those of a CPU, which has no device memory
    if row["tflops"] is not None and row["memory_reserved_gib"] is not None:
        parts.append(f"{row['tflops']:.2f} tflops")
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    if row["memory_reserved_gib"] is not None:
        parts.append(f"memory {row['memory_reserved_gib']:.1f} GiB")
    if row.get("balanced_experts"):
        parts.append("experts balanced by force")
    parts += columns_in(row)
    if row["step"] < steps:
        parts.append(f"{timedelta(seconds=round((steps - row['step']) * row['step_seconds']))} left")
    return "  ".join(parts)


def event_line(row: dict[str, Any], steps: int) -> str:
    """Return the line of an event, in the style of a step's line."""
    values = {key: value for key, value in row.items() if key not in ("event", "step")}
    if row["event"] == "validation":
        loss, seconds = or_dash(values["validation_loss"], ".4f"), f"{values['seconds']:.2f} s"
        parts = [f"validation loss {loss}", *columns_in(row), seconds]
    elif row["event"] == "checkpoint":
        held, seconds = values["seconds_held"], values["seconds"]
        parts = [
            "checkpoint saved",
            f"{seconds:.2f} s" + ("" if held == seconds else f", training waited {held:.2f} s"),
        ]
    else:
        parts = [
            row["event"],
            *(f"{key} {v:.4f}" if isinstance(v, float) else f"{key} {v}" for key, v in values.items()),
        ]
    return "  ".join([_step(row, steps), *parts])


def columns_in(row: dict[str, Any]) -> list[str]:
    """Return the objective's columns in a row, as text."""
    return [f"{name.partition('/')[2]} {or_dash(value, '.4g')}" for name, value in records.beside_loss(row).items()]


def _step(row: dict[str, Any], steps: int) -> str:
    return f"{time_of_day()}  step {row['step']:>{len(str(steps))}}/{steps}"


def truncate(path: Path, last_step: int) -> None:
    """Remove the rows after `last_step`, as a resumed run writes them again, and all lines that are not rows or whose
    checksum is wrong. A killed process may leave an incomplete last line; after a crash, a file system may have arbitrary
    bytes anywhere.
    """
    if not path.exists():
        return
    rows, garbage = [], 0
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            if not layout.right_sum(line):
                garbage += 1
            elif json.loads(line)["step"] <= last_step:
                rows.append(line.decode() + "\n")
        except (ValueError, TypeError, KeyError):
            garbage += 1
    if garbage:
        print(f"WARNING: {path}: {counted(garbage, 'line')} left out that cannot be read", flush=True)
    write_text(path, "".join(rows))
