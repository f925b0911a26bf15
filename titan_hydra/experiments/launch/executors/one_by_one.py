"""Run cells on this machine, one after another: start each cell, or attach to a running one, and print how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config.fault import counted, quoted
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch import show
from titan_hydra.experiments.launch.attach import Interrupts, attach
from titan_hydra.experiments.launch.cell import RETRY, Cell
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.rundir import State

# A function that runs a claimed attempt to its end. Its arguments are the cell, the attempt's folder, and the counter
# of Ctrl-C signals.
RunAttempt = Callable[[Cell, Path, Interrupts], None]


def run_all(cells: list[Cell], run: RunAttempt, owner: Callable[[], dict[str, Any]]) -> int:
    """Run one cell after another, and return the exit status. The series ends at Ctrl-C, but not at a failed cell.
    `owner` returns further fields of attempt.json, and is called just before an attempt is claimed.
    """
    states: list[State] = []
    status = Exit.DONE
    interrupts = Interrupts()
    for number, cell in enumerate(cells, start=1):
        if len(cells) > 1:
            print(f"\n[{number}/{len(cells)}] {cell.directory.name}   {quoted(cell.overrides)}", flush=True)
        states.append(settle(cell, run, owner, interrupts))
        status = status or rundir.result_status(states[-1])
        if interrupts.received:
            break
    rest = [rundir.state(cell.directory) for cell in cells[len(states) :]]
    if len(cells) > 1:
        show.results(cells, states + rest)
    elif states[0].kind == "done":
        show.longer(cells[0])
    if interrupts.received and any(state.kind != "done" for state in [states[-1], *rest]):
        return interrupts.status
    return status


def settle(cell: Cell, run: RunAttempt, owner: Callable[[], dict[str, Any]], interrupts: Interrupts) -> State:
    """Start a cell, or attach to it if it is running, and wait for its end. If neither is possible, print the reason.
    Return the cell's final state.
    """
    launch, fresh = cell.job.launch, cell.job.launch.force
    while True:
        state = rundir.state(cell.directory)
        if state.kind == "running":
            if state.job or not state.here:
                print(
                    f"{cell.directory.name}: runs on {state.host}; attach to it there, or titan logs{show.where(cell)} -f "
                    f"{cell.directory.name}",
                    file=sys.stderr,
                )
                return state
            print(f"{cell.directory.name}: is running, attempt {state.attempt}; attached to it", flush=True)
            attempt = layout.ATTEMPT.of(cell.directory, state.attempt)
            with interrupts.counted():
                attach(cell.directory, attempt, cell.job.steps, interrupts, label=cell.label)
            rundir.end_attempt(attempt)
            return tell(cell)
        if state.kind in ("queued", "unknown"):
            print(f"{cell.directory.name}: {show.waiting(state)}", file=sys.stderr)
            return state
        if not fresh and state.kind == "done":
            print(show.result_line(cell.directory))
            return state
        if not fresh and state.kind == "failed" and state.failure.status not in RETRY[launch.retry]:
            show.failure(cell.directory, state.failure)
            print("  it failed earlier, so it was not started; launch.retry=failed runs it again", file=sys.stderr)
            return state
        claimed = rundir.claim(cell.directory, state.attempt + 1, cell.job, cell.overrides, fresh, **owner())
        if claimed is not None:
            return _start(cell, claimed, run, interrupts)


def _start(cell: Cell, attempt: Path, run: RunAttempt, interrupts: Interrupts) -> State:
    """Run a claimed attempt to its end."""
    again = f", attempt {attempt.name}" if attempt.name != "1" else ""
    print(f"{cell.directory}{again}: {counted(processes(cell.job), 'rank')}", flush=True)
    try:
        run(cell, attempt, interrupts)
    finally:
        rundir.end_attempt(attempt)
    return tell(cell)


def tell(cell: Cell) -> State:
    """Print how a run has ended, and return its state."""
    state = rundir.state(cell.directory)
    if state.kind == "done":
        print(show.result_line(cell.directory))
    elif state.kind == "failed":
        show.failure(cell.directory, state.failure)
    else:
        print(
            f"{cell.directory.name}: {show.last_word(cell.directory, state)}; the same command line resumes it",
            file=sys.stderr,
        )
    return state
