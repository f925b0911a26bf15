"""Ranks on this machine, attached to this terminal: a process for each rank (`local`), or one rank in launch.py's own
process (`inline`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.threads import cores
from titan_hydra.core.job.config import Fault, Job
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.ranks import devices_here, processes, visible_devices
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import code_here, edited, fingerprints
from titan_hydra.core.job.run.records import alive
from titan_hydra.experiments.launch.attach import Interrupts, attach, stop
from titan_hydra.experiments.launch.cell import Cell, user_sources
from titan_hydra.experiments.launch.executor import Executor
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner, Queue
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow, owner_of

from .leases import Lease, take_devices, who_holds

WAIT = 0.5  # seconds between two tries to lease devices that other runs hold


class Processes(Executor):
    """Runs each rank in a process of its own. A user's executor for this machine overrides `start`."""

    shown_holders = ""  # the last printed line about runs that hold the devices of a waiting cell

    @property
    def one_cell(self) -> bool:
        """Whether one cell runs at a time, on the first of the visible devices: so it is with a user's own `start`."""
        return type(self).start is not Processes.start

    @cached_property
    def leases(self) -> dict[Path, Lease]:
        """The devices that runs of this command line hold, by run directory."""
        return {}

    def start(self, directory: Path, attempt: Path, job: Job) -> subprocess.Popen[Any]:
        """Start all ranks of a claimed attempt. Return their parent process, which has its own session, forwards SIGTERM
        to the ranks, and ends after them.
        """
        from . import ranks

        lease = self.leases.get(directory) or Lease()
        parent = ranks.start(directory, attempt, job, lease, self.threads(job))
        lease.close()  # the ranks hold it now
        return parent

    def threads(self, job: Job) -> int | None:
        """Return the threads of each rank of a job that shares this machine with other cells; None if it runs alone."""
        if self.at_once == 1:
            return None
        ranks = self.at_once * processes(job)
        return max(cores() // min(ranks, devices_here() or ranks), 1)

    def run(self, cell: Cell, attempt: Path, interrupts: Interrupts) -> None:
        """Run a claimed attempt to its end."""
        # signals are counted before `start`, which imports modules: Python can lose a KeyboardInterrupt during an
        # import
        with interrupts.counted():
            parent = self.start(cell.directory, attempt, cell.job)
            attach(cell.directory, attempt, cell.job.steps, interrupts, parent, cell.label)

    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield a fault for each key that does not apply to this executor."""
        if cells[0].job.launch.packed:
            reason = "applies to batch jobs; on this machine cluster.max_parallel=1 runs the cells one after another"
            yield Fault("launch.packed", True, reason, legal=(False,))
        if (parallel := cells[0].job.cluster.max_parallel) > 1 and self.one_cell:
            reason = f"cluster.executor={cells[0].job.cluster.executor} runs one cell at a time"
            yield Fault("cluster.max_parallel", parallel, reason, legal=(0, 1))

    def most_at_once(self, cells: list[Cell]) -> int:
        """Return how many of these cells may run at once: as many as the visible devices suffice for, but at most
        cluster.max_parallel. Without devices, only that key lets cells run side by side.
        """
        limit, devices = cells[0].job.cluster.max_parallel, devices_here()
        if self.one_cell:
            return 1
        fits = max(devices // min(processes(cell.job) for cell in cells), 1) if devices else limit or 1
        return min(limit or fits, fits, len(cells))

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield how many of several cells would run at once, and on what."""
        if (at_once := self.most_at_once(cells)) > 1:
            devices = ", ".join(visible_devices())
            yield f"{at_once} at a time on {f'devices {devices}' if devices else 'the CPUs of this machine'}"

    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Run the cells, several at once if the devices suffice, and print how each ends."""
        from .one_by_one import run_one_by_one
        from .side_by_side import run_side_by_side

        self.at_once = self.most_at_once(cells)
        limit = min(cells[0].job.cluster.max_parallel, len(cells))
        if self.at_once < limit:
            least = min(processes(cell.job) for cell in cells)
            print(
                f"cluster.max_parallel={limit}: a cell takes {least} of {counted(devices_here(), 'device')}, so "
                f"{self.at_once} can run at once; `gpus` sets how many a cell takes",
                file=sys.stderr,
            )
        return (run_side_by_side if self.at_once > 1 else run_one_by_one)(cells, self)

    def try_to_hold(self, cell: Cell, show_holders: bool = False) -> bool:
        """Lease the devices of a cell if they are free. Return whether the cell may start: it may without a lease if this
        machine has no devices and no other cells run beside it. With `show_holders`, print once which other runs hold
        the devices.
        """
        ranks, visible = processes(cell.job), visible_devices()
        if cell.directory in self.leases or (not visible and self.at_once == 1):
            return True
        if lease := take_devices(ranks, cell.directory.name, visible[:ranks] if self.one_cell else visible):
            self.leases[cell.directory] = lease
            self.shown_holders = ""
            return True
        if show_holders and (holders := who_holds()) and holders != self.shown_holders:
            self.shown_holders = holders
            if self.one_cell:
                print(f"warning: {holders}; CUDA_VISIBLE_DEVICES chooses others", file=sys.stderr)
            else:
                name, of = cell.directory.name, "" if ranks == len(visible) else f" of {len(visible)}"
                print(f"{name}: waits for {counted(ranks, 'device')}{of}; {holders}", flush=True)
        return False

    def hold(self, cell: Cell, interrupts: Interrupts | None = None) -> bool:
        """Lease the devices of a cell, and wait until they are free. Return False if signals have come meanwhile. An
        executor of one cell does not wait, as its ranks use the same devices anyway.
        """
        for tries in count():
            # at first, the holder may be an earlier run of this launcher that is just ending
            if self.try_to_hold(cell, show_holders=tries > 1) or (self.one_cell and tries > 1):
                return True
            if interrupts and interrupts.received:
                return False
            time.sleep(WAIT)
        raise AssertionError

    def release(self, cell: Cell) -> None:
        """Release the devices of a cell, unless its ranks hold them."""
        if lease := self.leases.pop(cell.directory, None):
            lease.close()

    def devices_of(self, cell: Cell) -> str:
        """Return a phrase with the devices of a cell, such as " on devices 0, 1"; "" if it has none."""
        names = self.leases[cell.directory].devices if cell.directory in self.leases else []
        return f" on device{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""

    def owner(self, cells: list[Cell]) -> dict[str, Any]:
        """Return the field of attempt.json that names the copy of the code that an attempt of these cells runs; nothing for
        a user's executor that starts ranks in its own way, with the code of this checkout.
        """
        if type(self).start is not Processes.start:
            return {}
        return {"code": self.code_of(cells).name}

    def start_one(self, cell: Cell, interrupts: Interrupts) -> subprocess.Popen[Any] | None:
        """Start the ranks of a cell when its devices are free, unless another launcher is faster."""
        try:
            if not self.hold(cell, interrupts):
                return None
            number = rundir.state(cell.directory).attempt + 1
            attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, **self.owner([cell]))
            return None if attempt is None else self.start(cell.directory, attempt, cell.job)
        finally:
            self.release(cell)

    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run from its files and the processes of this machine."""
        return rundir.state_here(directory, attempt)

    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Ask the ranks of runs to stop, as Ctrl-C does, and print whom it has asked; yield a line for each run that it
        cannot ask. For a whole sweep, ask the sweep's launch.py instead, which then also starts no further cells.
        """
        signalled = set()
        for row in rows:
            attempt = layout.ATTEMPT.of(row.directory, row.state.attempt)
            launcher = owner_of(row)
            if not row.state.here:
                yield f"{row.cell}: runs on {row.state.host}; cancel it there"
                continue
            rundir.mark_cancelled(attempt)
            if whole and alive(launcher) and "ended" not in launcher:
                if launcher["pid"] not in signalled:  # a second signal would kill the ranks
                    os.kill(launcher["pid"], signal.SIGTERM)
                    signalled.add(launcher["pid"])
                whom = "its launcher"
            elif started(attempt):
                whom = stop(attempt)
            else:  # the launcher sees the mark as soon as it can signal the ranks
                whom = "its launcher" if rundir.host_of_running(attempt) else None
            print(
                f"{row.cell}: asked {whom} to save and stop at the end of this step"
                if whom
                else f"{row.cell}: ended by itself"
            )


class Inline(Processes):
    """Runs a single rank in this process, so that pdb and print work."""

    one_cell = True
    began: dict[str, str] | None = None  # fingerprints of the code when the first cell of this command line started

    def owner(self, cells: list[Cell]) -> dict[str, Any]:
        """Return {}, as the ranks run the code of this process. Raises ConfigError if that code has been edited since the
        first cell started: modules that are imported only now would be the edited ones.
        """
        now = fingerprints(code_here(user_sources(cells)))
        self.began = self.began or now
        if names := edited(self.began, now):
            raise ConfigError(
                f"{names}: edited while this command line runs its cells in one process (cluster={cells[0].job.cluster.name}); "
                "the same command line runs the others with the new code, and cluster=local runs all cells with one copy of it"
            )
        return {}

    def run(self, cell: Cell, attempt: Path, interrupts: Interrupts) -> None:
        """Run the rank of a claimed attempt. Raises KeyboardInterrupt if Ctrl-C has ended the rank."""
        from titan_hydra.core.train import worker

        status = worker.run_rank(str(cell.directory), int(attempt.name), inline=True)
        if status == 130:
            raise KeyboardInterrupt
        # a SIGTERM to this process reached the trainer's handler; it is counted here, so that no further cells start
        if status == Exit.REQUEUED:
            interrupts.received.append(signal.SIGTERM)

    def start_one(self, cell: Cell, interrupts: Interrupts) -> None:
        """Run the rank of a cell to its end."""
        number = rundir.state(cell.directory).attempt + 1
        attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, **self.owner([cell]))
        if attempt is not None:
            try:
                self.hold(cell)
                self.run(cell, attempt, interrupts)
            finally:
                rundir.end_attempt(attempt)
                self.release(cell)


def started(attempt: Path, seconds: float = 15) -> bool:
    """Wait at most `seconds` until the ranks can be signalled. Return False if they cannot, or the attempt has ended."""
    deadline = time.monotonic() + seconds
    while not rundir.running_ranks(attempt) and not alive(layout.RANKS.read(attempt)):
        if time.monotonic() > deadline or rundir.host_of_running(attempt) is None:
            return False
        time.sleep(0.1)
    return True
