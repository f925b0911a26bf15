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
    """Starts the ranks of cells, and knows what has become of them. The run directory is the truth: an attempt is
    claimed before its ranks start (`rundir.claim`), and they write into it, so that their logs and results are read
    there. The cells of a command line have one executor; its record (`ExecutorKind`) says what rules ask of it.
    """

    @abstractmethod
    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield the faults of starting these cells, whose runs are in these states, here and now. With launch.mode=dry
        nothing starts, and the executor may be missing.
        """

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield what launch.mode=dry prints below its table: what these cells would be started with."""
        return ()

    @abstractmethod
    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Start each cell whose state wants it and print how it ends, or how to follow it; `folder` is the sweep's.
        Returns the exit status.
        """

    def ask(self, runs: list[tuple[Path, Owner]]) -> Queue:
        """Return what is known of these runs' newest attempts outside of their folders: directory and attempt.json
        each. It is one question for all.
        """
        return Queue()

    @abstractmethod
    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run from its folder and from what `ask` returned."""

    @abstractmethod
    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Ask these runs to stop; `whole` if they are all of a sweep. Yields why some cannot be."""

    def hint(self, job: Job, failure: Failure) -> str:
        """Return overrides with keys of the executor that may prevent a failure; "" if there are none."""
        return ""
