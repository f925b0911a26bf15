"""The interface of executors: the methods by which launch.py and `titan` start and follow ranks, wherever these run."""

from __future__ import annotations

import argparse
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.job.config import Fault, Job
from titan_hydra.core.job.run import code
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.experiments.runs.queue import Owner, Queue
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow

from .cell import Cell, user_sources

if TYPE_CHECKING:
    from .attach import Interrupts


class Executor(ABC):
    """Starts the ranks of cells and reports the state of their runs. Three things are the same for every executor: an
    attempt is claimed in the run directory before its ranks start (`rundir.claim`), ranks write logs and results into
    that directory, and `titan` reads them there. All cells of a command line have the same executor; the executor's
    record (`ExecutorKind`) holds the facts that the rules need.
    """

    at_once = 1  # number of cells that share this machine; it is set before the first of them starts
    cancels_unseen = False  # whether `cancel` can cancel a run although `ask` got no answer
    code: Path | None = None  # the copy of the code that the cells of this command line run; None: not taken yet

    @property
    def one_cell(self) -> bool:
        """Whether only one cell at a time may run on the devices of this machine."""
        return False

    def code_of(self, cells: list[Cell]) -> Path:
        """Return the copy of the code that these cells run. It is taken once, when the first cell of the command line
        starts, so that what is edited later does not reach later cells, restarts and trials.
        """
        if self.code is None:
            self.code = code.take_snapshot(cells[0].runs, user_sources(cells))
        return self.code

    @abstractmethod
    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield a fault for each reason why these cells cannot be started now; `states` are the states of their runs.
        With launch.mode=dry nothing starts, so it is no fault if the executor's programs are missing.
        """

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield the texts that launch.mode=dry prints below its table, such as the batch scripts of these cells."""
        return ()

    @abstractmethod
    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Start each cell that is to be started (`Cell.wants`), and print how it ends or how to follow it. Return the exit
        status. `folder` is the folder of the cells' sweep, if they belong to one.
        """

    def start_one(self, cell: Cell, interrupts: Interrupts) -> subprocess.Popen[Any] | None:
        """Start a cell for a search, and return while the cell runs (an executor with `single` returns when it has
        ended). The returned value is the parent process of the cell's ranks if that is a child of this process, else
        None.
        """
        self.submit([cell], None)
        return None

    def ask(self, runs: list[tuple[Path, Owner]]) -> Queue:
        """Return what the executor knows about the newest attempts of these runs in addition to the files in their
        folders. One query serves all runs. A run is a pair (directory, content of attempt.json).
        """
        return Queue()

    @abstractmethod
    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run from its folder and from what `ask` returned."""

    @abstractmethod
    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Ask these runs to stop, and yield a line for each that cannot be stopped. `whole`: the runs are a whole
        sweep.
        """

    def hint(self, job: Job, failure: Failure) -> str:
        """Return overrides of the executor's own keys that may prevent another failure of this kind, or ""."""
        return ""


@dataclass(frozen=True)
class SiteOption:
    """An option of conf/cluster for a site."""

    name: str  # the site's own name for itself, from which the option's default name is made
    text: Callable[[str], str]  # returns the text of the option's file, given the option's name
    gpus: int  # number of devices of a node
    note: str = ""  # a line that names the other possible choices


@dataclass(frozen=True)
class ClusterSite:
    """How `titan cluster init` finds out about an executor's site. An executor whose `program` is installed on this
    machine is the default. `add_arguments` adds options to the command, and `option` asks the program and returns an
    option of conf/cluster.
    """

    program: str
    add_arguments: Callable[[Any], None]
    option: Callable[[argparse.Namespace], SiteOption]
