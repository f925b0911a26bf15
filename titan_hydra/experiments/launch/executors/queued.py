"""Functions that all executors with a queue of jobs share."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.base.amounts import time_of_day
from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.run.records import alive
from titan_hydra.experiments.launch.attach import Interrupts
from titan_hydra.experiments.launch.show import submitted, waiting
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner
from titan_hydra.experiments.runs.rundir import SILENCE, State

if TYPE_CHECKING:
    from titan_hydra.experiments.launch.cell import Cell

POLL = 5  # with launch.wait: seconds between two queries of the queue


def being_submitted(owner: Owner) -> bool:
    """Whether the process that claimed an attempt may still submit it. A process on another host may submit it within
    SILENCE seconds after the claim.
    """
    if owner["host"] == socket.gethostname():
        return alive(owner) and "ended" not in owner
    return "ended" not in owner and time.time() - owner["started"] < SILENCE


def guarded_setup(lines: list[str]) -> list[str]:
    """Return the lines of cluster.setup as shell lines that stop the shell at the first command that fails. The ranks
    would otherwise start with another interpreter or without a module. Two statuses are kept: asked to stop, and unfit.
    """
    passed_on = f"{int(Exit.REQUEUED)}|{int(Exit.UNHEALTHY)}"
    message = "cluster.setup: ${BASH_COMMAND:-a command} ended with status $status; no rank is started"
    handler = (
        f'status=$?; case $status in {passed_on}) exit $status;; esac; echo "{message}" >&2; exit {int(Exit.CONFIG)}'
    )
    return [f"trap '{handler}' EXIT", "set -e", *lines, "set +e", "trap - EXIT"] if lines else []


def submit_and_follow(
    cells: list[Cell],
    folder: Path | None,
    submit: Callable[[list[tuple[Cell, State]], list[State], Interrupts], int],
) -> int:
    """Submit every cell that is to be started, and print how to follow the cells. With launch.wait, follow them here.
    `submit` gets the cells to start and the states of all cells, and returns an exit status. Return the command's exit
    status.
    """
    interrupts, wait = Interrupts(), cells[0].job.launch.wait
    states = rundir.states([cell.directory for cell in cells])
    start = [(cell, state) for cell, state in zip(cells, states, strict=True) if cell.wants(state)]
    with interrupts.counted():
        status = submit(start, states, interrupts) if start else Exit.DONE
        states = follow(cells, interrupts) if wait else rundir.states([cell.directory for cell in cells])
    submitted(cells, states, folder)
    return status_after(states, status, interrupts, wait)


def follow(cells: list[Cell], interrupts: Interrupts) -> list[State]:
    """Print each change of a cell's state, and why queued cells wait, until no cell is queued or running (launch.wait).
    Ctrl-C ends only the printing; the jobs continue.
    """
    before: dict[Path, str] = {}
    while True:
        states = rundir.states([cell.directory for cell in cells])
        for cell, state in zip(cells, states, strict=True):
            description = waiting(state) if state.kind in ("queued", "unknown") else state.kind
            if before.get(cell.directory) != description:
                before[cell.directory] = description
                where = f" on {state.host}" if state.host and state.kind == "running" else ""
                print(f"{time_of_day()}  {cell.directory.name}: {description}{where}", flush=True)
        if interrupts.received or not any(state.active for state in states):
            return states
        deadline = time.monotonic() + POLL
        while time.monotonic() < deadline and not interrupts.received:
            time.sleep(0.2)


def status_after(states: list[State], status: int, interrupts: Interrupts, wait: bool) -> int:
    """Return the exit status of a command that submitted cells: the signal's status if a signal has ended the command;
    else `status`, if that is not 0; else the status of the first failed cell.
    """
    for state in states:
        status = status or (state.failure.status if state.failure else Exit.DONE)
    return interrupts.status if interrupts.received and not wait else status
