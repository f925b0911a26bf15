"""Run cells as jobs of a SLURM cluster. Cells that need the same resources are submitted as one job array."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titan_hydra.core.base.errors import Kind
from titan_hydra.core.job.config import Fault, Job
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.experiments.launch.executor import Executor
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner, Queue
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow

from . import squeue, states
from .keys import SlurmCluster

if TYPE_CHECKING:
    from titan_hydra.experiments.launch.attach import Interrupts
    from titan_hydra.experiments.launch.cell import Cell


class Slurm(Executor):
    """Submits by sbatch, through submitit, and asks squeue, sacct and the run directories for the state of a job."""

    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield the reasons why these cells cannot be submitted: sbatch is missing, or a job exceeds the site's limits. A
        dry run works without SLURM.
        """
        from titan_hydra.experiments.launch.cell import to_start

        from . import limits, submit

        dry = cells[0].job.launch.mode == "dry"
        if not dry and shutil.which("sbatch") is None:
            yield Fault("cluster.executor", "slurm", "there is no sbatch on this machine", legal=("local",))
            return
        if start := to_start(cells, states):
            yield from limits.faults(submit.planned(start))

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield a text for each array: its resources, the layouts of its elastic runs (one for each number of nodes),
        and its batch script.
        """
        from titan_hydra.experiments.launch.layouts import in_words, nodes_of

        from . import submit

        for array, text in submit.scripts(cells):
            layouts = (f"{nodes_of(job)}: {in_words(job)}\n" for cell in array.cells for job in cell.layouts)
            yield f"\n--- {array.words}\n{''.join(layouts)}{text}"

    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Submit every cell that is to be started. With launch.wait, follow the cells until they have ended."""
        from titan_hydra.experiments.launch.executors.queued import submit_and_follow

        from . import submit

        def start_all(start: list[tuple[Cell, State]], *others: Any) -> int:
            return submit.submit_line(start, folder, self.code_of(cells), *others)

        return submit_and_follow(cells, folder, start_all)

    def start_one(self, cell: Cell, interrupts: Interrupts) -> None:
        """Submit one cell, as a separate job."""
        from . import submit

        start, code = [(cell, rundir.state(cell.directory))], self.code_of([cell])
        submit.submit(start, None, code, interrupts, submit.ArrayOrder([]))

    def ask(self, runs: list[tuple[Path, Owner]]) -> Queue:
        """Ask SLURM about the jobs of these runs and of their replica groups."""
        owners = [(directory, owner) for directory, owner in runs if "token" in owner]
        groups = [
            other for directory, owner in owners for _, _, other in states.submitted_groups(directory, owner["token"])
        ]
        return squeue.ask_queue([*(owner for _, owner in owners), *groups])

    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run. If its attempt.json is damaged, use only the other files."""
        return (
            states.run_state(directory, attempt, owner, queue)
            if "token" in owner
            else rundir.state_here(directory, attempt)
        )

    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Cancel the jobs of these runs."""
        from .cancel import cancel_jobs

        return cancel_jobs(rows)

    def hint(self, job: Job, failure: Failure) -> str:
        """Return overrides of cluster keys that may prevent another failure of this kind; "" if there are none."""
        cluster = cast(SlurmCluster, job.cluster)
        if failure.kind == Kind.OUT_OF_MEMORY and failure.rank is None:
            return "cluster.sbatch={mem: 0}"
        if failure.kind == Kind.NODE and failure.host:
            return f"cluster.exclude=[{','.join([*cluster.exclude, failure.host])}]"
        if failure.kind == Kind.PREEMPTED:
            return f"cluster.max_requeues={2 * cluster.max_requeues}"
        return ""
