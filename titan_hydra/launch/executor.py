"""The interface of executors: what launch.py and `titan` ask of the place where ranks run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.config import Fault, Job
from titan_hydra.runs.failure import Failure
from titan_hydra.runs.queue import Owner, Queue
from titan_hydra.runs.rundir import State
from titan_hydra.runs.view import RunRow

if TYPE_CHECKING:
    from .cell import Cell


class Executor(ABC):
    """Starts the ranks of cells and reports the state of their runs. An attempt is claimed in the run directory before
    its ranks start (`rundir.claim`); ranks write logs and results into that directory, and they are read there,
    whatever the executor. The cells of a command line have one executor; its record (`ExecutorKind`) holds what the
    rules need to know of it.
    """

    @abstractmethod
    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield what prevents starting these cells now; `states` are their runs'. With launch.mode=dry nothing starts,
        and the executor's programs may be missing.
        """

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield what launch.mode=dry prints below its table, such as the batch scripts of these cells."""
        return ()

    @abstractmethod
    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Start each cell that is to be started (`Cell.wants`), and print how it ends or how to follow it; `folder` is
        the sweep's. Returns the exit status.
        """

    def ask(self, runs: list[tuple[Path, Owner]]) -> Queue:
        """Return what the executor knows of the newest attempts of these runs beyond their folders, in one query for
        all; a run is (directory, attempt.json).
        """
        return Queue()

    @abstractmethod
    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run from its folder and from what `ask` returned."""

    @abstractmethod
    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Ask these runs to stop; `whole` if they are a whole sweep. Yields a line for each that cannot be stopped."""

    def hint(self, job: Job, failure: Failure) -> str:
        """Return overrides with keys of the executor that may prevent a failure; "" if there are none."""
        return ""
