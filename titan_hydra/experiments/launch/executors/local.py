"""Ranks on this machine, attached to this terminal: a process for each rank (`local`), or one rank in launch.py's own
process (`inline`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config import Fault, Job
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


class Processes(Executor):
    """Runs each rank in a process of its own. A user's executor for this machine overrides `start`."""

    def start(self, directory: Path, attempt: Path, job: Job) -> subprocess.Popen[Any]:
        """Start all ranks of a claimed attempt. Return their parent process, which has its own session, forwards SIGTERM
        to the ranks, and ends after them.
        """
        from . import ranks

        return ranks.start(directory, attempt, job)

    def run(self, cell: Cell, attempt: Path, interrupts: Interrupts) -> None:
        """Run a claimed attempt to its end."""
        # signals are counted before `start`, which imports modules: Python can lose a KeyboardInterrupt during an
        # import
        with interrupts.counted():
            parent = self.start(cell.directory, attempt, cell.job)
            attach(cell.directory, attempt, cell.job.steps, interrupts, parent, cell.label)

    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield a fault for each key that applies only to batch jobs."""
        if cells[0].job.launch.packed:
            yield Fault(
                "launch.packed",
                True,
                "applies to batch jobs: on this machine cells run one after another anyway",
                legal=(False,),
            )
        if (parallel := max(cell.job.cluster.max_parallel for cell in cells)) > 1:
            yield Fault("cluster.max_parallel", parallel, "cells run one after another on this machine", legal=(0, 1))

    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Run one cell after another, and print how each ends."""
        from . import one_by_one

        return one_by_one.run_all(cells, self.run, lambda: self.owner(cells))

    def owner(self, cells: list[Cell]) -> dict[str, Any]:
        """Return the field of attempt.json that names the copy of the code that an attempt of these cells runs; nothing for
        a user's executor that starts ranks in its own way, with the code of this checkout.
        """
        if type(self).start is not Processes.start:
            return {}
        return {"code": self.code_of(cells).name}

    def start_one(self, cell: Cell, interrupts: Interrupts) -> subprocess.Popen[Any] | None:
        """Start the ranks of a cell, unless another launcher is faster."""
        number = rundir.state(cell.directory).attempt + 1
        attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, **self.owner([cell]))
        return None if attempt is None else self.start(cell.directory, attempt, cell.job)

    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run from its files and the processes of this machine."""
        return rundir.state_here(directory, attempt)

    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Ask the ranks of runs to stop, as Ctrl-C does. For a whole sweep, ask the sweep's launch.py instead, which
        then also starts no further cells.
        """
        told = set()
        for row in rows:
            attempt = layout.ATTEMPT.of(row.directory, row.state.attempt)
            launcher = owner_of(row)
            if not row.state.here:
                yield f"{row.cell}: runs on {row.state.host}; cancel it there"
                continue
            rundir.mark_cancelled(attempt)
            if whole and alive(launcher) and "ended" not in launcher:
                if launcher["pid"] not in told:  # a second signal would kill the ranks
                    os.kill(launcher["pid"], signal.SIGTERM)
                    told.add(launcher["pid"])
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
                self.run(cell, attempt, interrupts)
            finally:
                rundir.end_attempt(attempt)


def started(attempt: Path, seconds: float = 15) -> bool:
    """Wait at most `seconds` until the ranks can be signalled. Return False if they cannot, or the attempt has ended."""
    deadline = time.monotonic() + seconds
    while not rundir.running_ranks(attempt) and not alive(layout.RANKS.read(attempt)):
        if time.monotonic() > deadline or rundir.host_of_running(attempt) is None:
            return False
        time.sleep(0.1)
    return True
