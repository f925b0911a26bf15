"""Run several cells at once on this machine, each on devices of its own: start a cell as soon as its devices are free,
show all running cells, and print how each of them ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch.attach import POLL, Interrupts, PlainDisplay, Watch, displays
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.rundir import State

from .one_by_one import can_attach, claim_cell, conclude, ends_the_line, is_left_out, tell

if TYPE_CHECKING:
    from .local import Processes


def run_side_by_side(cells: list[Cell], executor: Processes) -> int:
    """Run cells, at most `executor.at_once` at a time, and return the exit status. Ctrl-C asks all running cells to save
    and stop. The others go on after a failed cell, unless launch.stop_at_failure is set.
    """
    series = Series(cells, executor)
    with series.interrupts.counted(), displays(several=True) as display:
        series.run(display)
    states = [series.states.get(cell.directory) or rundir.state(cell.directory) for cell in cells]
    cut = [state for cell, state in zip(cells, states, strict=True) if cell.directory not in series.before]
    # a cell that was stopped because another one failed does not hide the failure
    return conclude(cells, states, series.interrupts, cut, sorted(states, key=lambda state: state.kind != "failed"))


@dataclass
class RunningCell:
    """A cell whose ranks run now."""

    cell: Cell
    attempt: Path
    watch: Watch


class Series:
    """The cells of a command line: those that wait, those that run, and the states of those that have ended."""

    def __init__(self, cells: list[Cell], executor: Processes) -> None:
        self.cells, self.executor = cells, executor
        self.waiting = list(cells)
        self.running: list[RunningCell] = []
        self.states: dict[Path, State] = {}
        self.before: set[Path] = set()  # directories of the cells that had ended before the first signal
        self.interrupts = Interrupts()
        self.failed = False  # whether launch.stop_at_failure ends the series

    def run(self, display: Callable[[int, str], PlainDisplay]) -> None:
        """Run all cells to their ends, or until this process is asked to stop."""
        while self.running or (self.waiting and not self.ends):
            while not self.ends and self.waiting and len(self.running) < self.executor.at_once:
                if not self.begin(self.waiting[0], display):
                    break
                self.waiting.pop(0)
            for running_cell in list(self.running):
                # after a failed cell, the others are asked as by one Ctrl-C
                requests = len(self.interrupts.received) or int(self.failed)
                if running_cell.watch.running:
                    running_cell.watch.step(requests)
                else:
                    self.end(running_cell)
            time.sleep(POLL)

    @property
    def ends(self) -> bool:
        """Whether no further cell starts."""
        return self.failed or bool(self.interrupts.received)

    def begin(self, cell: Cell, display: Callable[[int, str], PlainDisplay]) -> bool:
        """Start a cell, attach to it, or find out that it is not to be started. Return False if it must wait for devices,
        or another launcher has just claimed it.
        """
        state = rundir.state(cell.directory)
        number = f"[{self.cells.index(cell) + 1}/{len(self.cells)}] "
        attached = can_attach(state)
        if not attached and is_left_out(cell, state):
            self.note(cell, state)
            return True
        parent = None
        if attached:
            attempt: Path | None = layout.ATTEMPT.of(cell.directory, state.attempt)
            print(f"{number}{cell.directory.name}: is running, attempt {state.attempt}; attached to it", flush=True)
        elif not self.executor.try_to_hold(cell, show_holders=not self.running):
            return False
        else:
            try:
                if (attempt := claim_cell(cell, self.executor, self.cells, state, number)) is not None:
                    parent = self.executor.start(cell.directory, attempt, cell.job)
            except BaseException:
                self.executor.release(cell)
                raise
        if attempt is None:
            self.executor.release(cell)
            return False
        shown = display(cell.job.steps, number)
        self.running.append(RunningCell(cell, attempt, Watch(cell.directory, attempt, parent, shown)))
        return True

    def end(self, running_cell: RunningCell) -> None:
        """Record the end of a cell, print it, and release its devices."""
        running_cell.watch.close()
        rundir.end_attempt(running_cell.attempt)
        self.executor.release(running_cell.cell)
        self.running.remove(running_cell)
        self.note(running_cell.cell, tell(running_cell.cell))

    def note(self, cell: Cell, state: State) -> None:
        """Record the state of a cell that has ended, or is not started."""
        self.states[cell.directory] = state
        if not self.interrupts.received:
            self.before.add(cell.directory)
        if not self.failed and ends_the_line(cell, state):
            self.failed = True
