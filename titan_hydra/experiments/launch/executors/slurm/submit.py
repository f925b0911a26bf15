"""Submit cells to SLURM: group the cells by the resources that they need, claim their attempts, write all files that
their jobs need, and only then call sbatch.

No cell runs twice and none is lost, even if the submitter dies or sbatch fails before a job's id is recorded. Each
claimed attempt records a token, which is also part of the job's name. The next launcher finds the job by this token. A
job's script starts no attempt with another token, and ranks stop if their attempt is not the newest.
"""

from __future__ import annotations

import getpass
import math
import re
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import USER
from titan_hydra.core.job.run.run import homes_of
from titan_hydra.experiments.launch.attach import Interrupts
from titan_hydra.experiments.launch.layouts import nodes_of, write_layouts
from titan_hydra.experiments.runs import manifest, rundir
from titan_hydra.experiments.runs.rundir import State

from . import squeue
from .keys import SlurmCluster
from .sbatch import JobLine, JobShape, SlurmBatch, SubmissionError

if TYPE_CHECKING:
    from titan_hydra.experiments.launch.cell import Cell

# errors of sbatch after which it is unknown whether SLURM has accepted the job
NO_ANSWER = r"timed out|connect|contact|communicat|zero bytes"
# errors of sbatch when the user would exceed the allowed number of jobs; each task of an array counts as a job
TOO_MANY = r"Submit\w*Limit|submit limit"
PATIENCE = 3  # seconds between two calls of squeue after an error that matches NO_ANSWER


@dataclass(frozen=True)
class Array:
    """Cells that are submitted as one job array, one packed job, or a single job."""

    token: str
    shape: JobShape
    cells: list[Cell]
    packed: bool = False
    exclude: tuple[str, ...] = ()  # hosts to exclude, in addition to the hosts that the configuration excludes

    @property
    def cluster(self) -> SlurmCluster:
        """The section `cluster` of the configuration, which is the same for all cells of the array."""
        return cast(SlurmCluster, self.cells[0].job.cluster)

    @property
    def words(self) -> str:
        """The resources of the array in words, which launch.mode=dry prints."""
        many, nodes, groups = len(self.cells), self.shape.nodes, self.cells[0].job.fault_tolerance.replicas
        kind = "one after another in one job" if self.packed else "one job array" if many * groups > 1 else "one job"
        fewest = f"{self.shape.fewest} to " if self.shape.fewest else ""
        per_node = f"{fewest}{counted(nodes, 'node')} x {counted(self.shape.ranks_per_node, 'GPU')}"
        of_groups = f" of {groups} replica groups" if groups > 1 else ""
        return f"{counted(many, 'cell')}{of_groups}, {kind}, {per_node}{' a task' * bool(of_groups)}"


class ArrayOrder:
    """The order in which the arrays of a command line run. An array waits for earlier jobs, so that at most
    cluster.max_parallel cells run at once, even cells with different resources.
    """

    def __init__(self, states: list[State]) -> None:
        """Count the cells of the command line that are already queued or running."""
        self.refused = Counter[str]()  # for each message with which SLURM has refused cells: the number of these cells
        active = [state.job.id.split("_")[0] for state in states if state.active and state.job]
        self.before: list[str] = []  # ids of the jobs that must end before the next array starts
        # `now`: ids of the jobs submitted after those in `before`; `used`: how many cells of these jobs may run at once
        self.now, self.used = list(dict.fromkeys(active)), len(active)

    def after(self, count: int, limit: int) -> str:
        """Return the ids, joined by colons, of the jobs for which an array of `count` cells must wait. `limit` is
        cluster.max_parallel; 0 means no limit.
        """
        if limit and self.now and self.used + min(count, limit) > limit:
            self.before, self.now, self.used = self.now, [], 0
        return ":".join(self.before) if limit else ""

    def submitted(self, job_id: str, count: int, limit: int) -> None:
        """Record that SLURM has accepted a job with `count` cells."""
        self.now.append(job_id.split("_")[0])
        self.used += min(count, limit or count)


def _shape_of(cell: Cell) -> JobShape:
    """Return the resources of a cell's job. With replica groups a cell has a job for each group, all with these
    resources.
    """
    minutes = cell.job.cluster.time_minutes
    if cell.layouts:
        return JobShape(
            nodes_of(cell.layouts[0]),
            max(job.gpus // nodes_of(job) for job in cell.layouts),
            minutes,
            nodes_of(cell.layouts[-1]),
        )
    ranks = processes(cell.job) // cell.job.fault_tolerance.replicas
    nodes = math.ceil(ranks / (cell.job.cluster.gpus_per_node or ranks))
    return JobShape(nodes, ranks // nodes, minutes)


def arrays_of(cells: list[Cell], packed: bool, limit: int) -> list[Array]:
    """Group cells with the same shape, number of replica groups and cluster settings into arrays of at most `limit`
    tasks. If `packed`, put all cells, in their order, into one job that has the largest shape.
    """
    if packed:
        shapes = [_shape_of(cell) for cell in cells]
        minutes = cells[0].job.cluster.time_minutes
        largest = JobShape(
            max(shape.nodes for shape in shapes),
            max(shape.ranks_per_node for shape in shapes),
            minutes and minutes * len(cells),
        )
        return [Array(secrets.token_hex(4), largest, cells, packed=True)]
    alike: dict[tuple[JobShape, int, str], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((_shape_of(cell), cell.job.fault_tolerance.replicas, repr(cell.job.cluster)), []).append(cell)
    return [
        Array(secrets.token_hex(4), shape, some[first : first + max(limit // groups, 1)])
        for (shape, groups, _), some in alike.items()
        for first in range(0, len(some), max(limit // groups, 1))
    ]


def batch_of(
    array: Array, folder: Path, attempts: list[list[Path]], name: str, code: Path, after: str = ""
) -> SlurmBatch:
    """Build the batch job of an array. Its files go to `folder`; `attempts` has a list for each cell, with one attempt
    for each replica group of the cell.

    The job starts when the jobs in `after` have ended (a text of ids, joined by colons).
    """
    lines = []
    for cell, attempts_of_cell in zip(array.cells, attempts, strict=True):
        shape, config = _shape_of(cell), cell.job.fault_tolerance
        restarts = 0 if config.name == "off" else config.max_restarts
        sizes = [(nodes_of(job), job.gpus) for job in cell.layouts] or [
            (shape.nodes, shape.nodes * shape.ranks_per_node)
        ]
        lines += [JobLine(sizes, attempt.parents[1], int(attempt.name), restarts) for attempt in attempts_of_cell]
    exclude = dict.fromkeys([*array.cluster.exclude, *array.exclude])
    cluster = replace(array.cluster, exclude=[*exclude])
    if after:
        dependency = ",".join(filter(None, [str(cluster.sbatch.get("dependency") or ""), f"afterany:{after}"]))
        cluster = replace(cluster, sbatch={**cluster.sbatch, "dependency": dependency})
    paths = [code, code / USER] if any(cell.job.train.imports for cell in array.cells) else [code]
    at_once = cluster.max_parallel * array.cells[0].job.fault_tolerance.replicas
    return SlurmBatch(folder, f"{name}-{array.token}", array.shape, lines, cluster, paths, array.packed, at_once)


def largest_array() -> int:
    """Return the maximum number of tasks that the cluster allows in an array."""
    return max(int(squeue.setting("MaxArraySize") or 1001) - 1, 1)


def planned(cells: list[Cell]) -> list[Array]:
    """Return the arrays in which these cells would be submitted. This works without SLURM."""
    packed, baseline = cells[0].job.launch.packed, baseline_of(cells)
    return arrays_of([*cells, baseline] if packed and len(cells) > 1 and baseline else cells, packed, largest_array())


def scripts(cells: list[Cell]) -> Iterable[tuple[Array, str]]:
    """Yield each array in which these cells would be submitted, with its batch script. This works without SLURM, and
    writes nothing.
    """
    runs = cells[0].runs
    for array in planned(cells):
        folder = layout.SWEEPS.of(runs) / "NAME-TIME" / array.token
        homes = [homes_of(cell.directory, cell.job.fault_tolerance.replicas) for cell in array.cells]
        attempts = [[layout.ATTEMPT.of(home, 1) for home in homes_of_cell] for homes_of_cell in homes]
        yield array, batch_of(array, folder, attempts, "NAME-TIME", layout.CODE.of(runs) / "HASH").text


def submit_line(
    start: list[tuple[Cell, State]], folder: Path | None, code: Path, states: list[State], interrupts: Interrupts
) -> int:
    """Submit the cells in `start`, which run the copy `code`; `states` are the states of all cells of the command line.
    Return the exit status.
    """
    if start[0][0].job.launch.packed:
        start = with_repeated_baseline(start, folder)
    return submit(start, folder, code, interrupts, ArrayOrder(states))


def baseline_of(cells: list[Cell]) -> Cell | None:
    """Return the cell with which all others are compared: the cell that sweep.baseline names, or the first cell. None
    if the named cell is not among `cells`.
    """
    named = cells[0].job.sweep.baseline
    return next((cell for cell in cells if cell.name == named), None if named else cells[0])


def with_repeated_baseline(start: list[tuple[Cell, State]], folder: Path | None) -> list[tuple[Cell, State]]:
    """In the packed job of a sweep, put the baseline first, and repeat it at the end. The difference between these two
    runs measures the drift of the machine.
    """
    baseline = baseline_of([cell for cell, _ in start])
    if folder is None or baseline is None:
        return start
    again = replace(baseline, directory=folder / "repeat" / baseline.directory.name)
    manifest.add_cell(folder, manifest.entry_of(again) | {"name": f"{baseline.name} (again)", "repeat": True})
    state = rundir.state(again.directory)
    return sorted(start, key=lambda pair: pair[0] is not baseline) + ([(again, state)] if again.wants(state) else [])


def submit(
    start: list[tuple[Cell, State]], folder: Path | None, code: Path, interrupts: Interrupts, order: ArrayOrder
) -> int:
    """Submit cells to SLURM; `start` has pairs (cell, its state), and `code` is the copy of the code that they run.
    `folder` is the folder of their sweep, None for a single cell. Return the exit status.
    """
    states = {cell.directory: state for cell, state in start}
    cells = [cell for cell, _ in start]
    status = Exit.DONE
    try:
        for array in arrays_of(cells, cells[0].job.launch.packed, largest_array()):
            if interrupts.received:
                break
            if claimed := _claim(array, states, code.name):
                mine, attempts = map(list, zip(*claimed, strict=True))
                exclude = unfit_hosts([states[cell.directory] for cell in mine])
                status = hand_over(replace(array, cells=mine, exclude=exclude), attempts, folder, code, order) or status
    finally:
        _print_refusals(order.refused)
    return status


def _claim(array: Array, states: dict[Path, State], code: str) -> list[tuple[Cell, list[Path]]]:
    """Claim the next attempt of each cell of an array. Return the cells, each with its claimed attempts: one attempt
    for each replica group.
    """
    owner = {
        "executor": "slurm",
        "token": array.token,
        "packed": array.packed,
        "job_id": None,
        "user": getpass.getuser(),
        "code": code,
        "cluster": squeue.setting("ClusterName"),
    }
    claimed = []
    for cell in array.cells:
        number = states[cell.directory].attempt + 1
        attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, cell.job.launch.force, **owner)
        if attempt is not None:  # None: meanwhile another launcher has claimed this attempt
            groups = rundir.claim_groups(cell.directory, cell.job.fault_tolerance.replicas, cell.overrides, **owner)
            claimed.append((cell, [attempt, *groups]))
    return claimed


def _print_refusals(refused: Counter[str]) -> None:
    """Print each reason for which SLURM has refused cells, with their number, and what to do if they were too many."""
    for reason, number in refused.items():
        print(f"SLURM refused {counted(number, 'cell')}: {reason}", file=sys.stderr)
    if any(re.search(TOO_MANY, reason, re.I) for reason in refused):
        print(
            "  the same command submits them once others have ended; launch.packed=true puts all cells into one job",
            file=sys.stderr,
        )


def unfit_hosts(states: list[State]) -> tuple[str, ...]:
    """Return the hosts that a health check found unfit in the last attempts of runs. A retry excludes them."""
    unfit = [state.failure for state in states if state.failure and state.failure.status == Exit.UNHEALTHY]
    return tuple(sorted({failure.host for failure in unfit if failure.rank is not None and failure.host}))


def hand_over(array: Array, claimed: list[list[Path]], folder: Path | None, code: Path, order: ArrayOrder) -> int:
    """Submit the claimed attempts of each cell in one array. If SLURM refuses the array because of a limit on the
    number of jobs, halve the number of cells per array, and try again.

    Return the exit status.
    """
    first, size, status, limit = 0, len(claimed), Exit.DONE, array.cells[0].job.cluster.max_parallel
    while first < len(claimed):
        size = min(size, len(claimed) - first)
        some = slice(first, first + size)
        part, attempts = (
            replace(array, cells=array.cells[some]),
            [attempt for of_cell in claimed[some] for attempt in of_cell],
        )
        if size < len(claimed):
            part = replace(part, token=secrets.token_hex(4))
        try:
            _sbatch(part, claimed[some], folder, code, order.after(1 if array.packed else size, limit))
        except SubmissionError as error:
            reason = str(error)
            if size > 1 and not array.packed and re.search(TOO_MANY, reason, re.I):
                size = (size + 1) // 2
                continue
            if refused := not re.search(NO_ANSWER, reason, re.I):
                attempts = [attempt for of_cell in claimed[first:] for attempt in of_cell]
            status = (
                after_refusal(attempts, len(claimed[first:] if refused else claimed[some]), reason, order.refused)
                or status
            )
            if refused:
                break
        if job_id := layout.CLAIM.read(attempts[0])["job_id"]:
            order.submitted(job_id, 1 if array.packed else size, limit)
        first += size
    return status


def _sbatch(array: Array, claimed: list[list[Path]], folder: Path | None, code: Path, after: str) -> None:
    """Write every file that the job needs, call sbatch, and record its job ids. Raises SubmissionError."""
    submission_folder = folder / array.token if folder else claimed[0][0] / "submission"
    name = folder.name if folder else array.cells[0].directory.name
    batch, attempts = (
        batch_of(array, submission_folder, claimed, name, code, after),
        [attempt for of_cell in claimed for attempt in of_cell],
    )
    for cell in array.cells:
        if cell.layouts:
            write_layouts(cell.directory, cell.layouts)
    batch.write()
    for index, attempt in enumerate(attempts):
        rundir.note(attempt, index=index, token=array.token)
        shutil.copy(layout.SBATCH.of(submission_folder), layout.SBATCH.of(attempt.parents[1]))
    job_ids, cluster = batch.submit_all()
    for attempt, job_id in zip(attempts, job_ids, strict=True):
        rundir.note(attempt, job_id=job_id, **({"cluster": cluster} if cluster else {}))


def after_refusal(attempts: list[Path], number: int, reason: str, refused: Counter[str]) -> int:
    """Check whether SLURM has accepted the job of `number` cells although sbatch failed, for example by a time-out. If
    SLURM has not accepted it, add the cells to `refused`. Return the exit status.

    After a time-out, an attempt counts as ended only if squeue answers and does not list a job with its token. If such a
    job appears later, the next command finds it.
    """
    owners = [layout.CLAIM.read(attempt) for attempt in attempts]
    uncertain, cells = re.search(NO_ANSWER, reason, re.I), counted(number, "cell")
    for pause in (0, PATIENCE) if uncertain else (0,):
        time.sleep(pause)
        queue = squeue.ask_queue(owners)
        if all(jobs := [squeue.find_job(queue, owner) for owner in owners]):
            for attempt, job in zip(attempts, jobs, strict=True):
                rundir.note(attempt, job_id=job.id)
            print(f"SLURM has accepted the {cells}, although sbatch reported an error: {reason}", file=sys.stderr)
            return Exit.DONE
    if uncertain and not queue.answers:
        print(
            f"It is not known whether SLURM has accepted the {cells}, as squeue does not answer; the same command asks "
            f"again. sbatch reported an error: {reason}",
            file=sys.stderr,
        )
        return Exit.BUG
    for attempt in attempts:
        rundir.note(attempt, ended=time.time(), refused=reason)
    refused[reason] += number
    return Exit.BUG
