"""Run cells on this machine, one after another: start each cell, or attach to a running one, and print how it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config.fault import counted, quoted
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch import show
from titan_hydra.experiments.launch.attach import Interrupts, attach
from titan_hydra.experiments.launch.cell import RETRY, Cell
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.rundir import State

if TYPE_CHECKING:
    from .local import Processes


def run_one_by_one(cells: list[Cell], executor: Processes) -> int:
    """Run one cell after another, and return the exit status. The series ends at Ctrl-C, but not at a failed cell, unless
    launch.stop_at_failure is set.
    """
    states: list[State] = []
    interrupts = Interrupts()
    for number, cell in enumerate(cells, start=1):
        if len(cells) > 1:
            print(f"\n[{number}/{len(cells)}] {cell.directory.name}   {quoted(cell.overrides)}", flush=True)
        states.append(settle(cell, executor, cells, interrupts))
        if interrupts.received or ends_the_line(cell, states[-1]):
            break
    rest = [rundir.state(cell.directory) for cell in cells[len(states) :]]
    return conclude(cells, states + rest, interrupts, [states[-1], *rest], states)


def ends_the_line(cell: Cell, state: State) -> bool:
    """Whether no further cell starts after a cell that has ended so."""
    if state.kind == "failed" and cell.job.launch.stop_at_failure:
        print(f"launch.stop_at_failure: {cell.directory.name} failed, so no further cell starts", file=sys.stderr)
        return True
    return False


def conclude(
    cells: list[Cell], states: list[State], interrupts: Interrupts, cut: list[State], ended: list[State]
) -> int:
    """Print the results of all cells. Return the exit status: that of the signal, if it found a cell not done (`cut`: the
    states of the cells that it could find so); else that of the first of the `ended` cells that failed or was stopped.
    """
    if len(cells) > 1:
        show.results(cells, states)
    elif states[0].kind == "done":
        show.suggest_longer_run(cells[0])
    if interrupts.received and any(state.kind != "done" for state in cut):
        return interrupts.status
    return next(filter(None, map(rundir.result_status, ended)), Exit.DONE)


def settle(cell: Cell, executor: Processes, cells: list[Cell], interrupts: Interrupts) -> State:
    """Start a cell, or attach to it if it is running, and wait for its end. If neither is possible, print the reason.
    Return the cell's final state.
    """
    while True:
        state = rundir.state(cell.directory)
        if can_attach(state):
            print(f"{cell.directory.name}: is running, attempt {state.attempt}; attached to it", flush=True)
            attempt = layout.ATTEMPT.of(cell.directory, state.attempt)
            with interrupts.counted():
                attach(cell.directory, attempt, cell.job.steps, interrupts, label=cell.label)
            rundir.end_attempt(attempt)
            return tell(cell)
        if is_left_out(cell, state):
            return state
        executor.hold(cell)
        try:
            claimed = claim_cell(cell, executor, cells, state)
            if claimed is not None:
                try:
                    executor.run(cell, claimed, interrupts)
                finally:
                    rundir.end_attempt(claimed)
                return tell(cell)
        finally:
            executor.release(cell)


def can_attach(state: State) -> bool:
    """Whether a run is running, and its ranks are processes of this machine that no job of an executor owns."""
    return state.kind == "running" and state.here and not state.job


def is_left_out(cell: Cell, state: State) -> bool:
    """Whether a cell is not started because of the state of its run. If so, print the reason."""
    launch, name = cell.job.launch, cell.directory.name
    if state.kind == "running":
        print(
            f"{name}: runs on {state.host}; attach to it there, or titan logs{show.where(cell)} -f {name}",
            file=sys.stderr,
        )
    elif state.kind in ("queued", "unknown"):
        print(f"{name}: {show.waiting(state)}", file=sys.stderr)
    elif launch.force:
        return False
    elif state.kind == "done":
        print(show.result_line(cell.directory))
    elif state.kind == "failed" and state.failure.status not in RETRY[launch.retry]:
        show.failure(cell.directory, state.failure)
        print("  it failed earlier, so it was not started; launch.retry=failed runs it again", file=sys.stderr)
    else:
        return False
    return True


def claim_cell(cell: Cell, executor: Processes, cells: list[Cell], state: State, number: str = "") -> Path | None:
    """Claim the next attempt of a cell and announce it. Return None if another launcher was faster. `number` is printed
    before it, with the cell's overrides, if other cells run beside it.
    """
    force, owner = cell.job.launch.force, executor.owner(cells)
    attempt = rundir.claim(cell.directory, state.attempt + 1, cell.job, cell.overrides, force, **owner)
    if attempt is not None:
        again = f", attempt {attempt.name}" if attempt.name != "1" else ""
        where = f"{counted(processes(cell.job), 'rank')}{executor.devices_of(cell)}"
        name = f"{number}{cell.directory.name}   {quoted(cell.overrides)}" if number else cell.directory
        print(f"{name}{again}: {where}", flush=True)
    return attempt


def tell(cell: Cell) -> State:
    """Print how a run has ended, and return its state."""
    state = rundir.state(cell.directory)
    if state.kind == "done":
        print(show.result_line(cell.directory))
    elif state.kind == "failed":
        show.failure(cell.directory, state.failure)
    else:
        again = "starts it from step 1" if cell.job.checkpoint.name == "off" else "resumes it"
        print(
            f"{cell.directory.name}: {show.last_word(cell.directory, state)}; the same command line {again}",
            file=sys.stderr,
        )
    return state
