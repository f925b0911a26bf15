"""Turn composed cells into runs: read and check all of them, then run each that needs it and print how it ended."""

import errno
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.base.redact import redact
from titan_hydra.config import Fault, Job, identity, read
from titan_hydra.config.cells import with_count
from titan_hydra.config.fault import counted, quoted, shown
from titan_hydra.config.rules.checks import check, warnings
from titan_hydra.config.sweep import named
from titan_hydra.job.freeze import freeze
from titan_hydra.job.ranks import all_ranks, processes
from titan_hydra.plan import predict
from titan_hydra.runs import layout, manifest, rundir
from titan_hydra.runs.rundir import State

from . import show, snapshot, worker
from .attach import Interrupts, attach

# launch.retry: the failures, by exit status, that it runs again.
RETRY = {"none": (), "oom": (Exit.OUT_OF_MEMORY,), "node": (Exit.UNHEALTHY, Exit.HANG), "failed": tuple(Exit), "all": tuple(Exit)}


@dataclass(frozen=True)
class Cell:
    """One cell that passed the checks."""

    number: int  # among all cells of the command line, from 1
    overrides: list[str]
    job: Job
    directory: Path
    of: int  # cells of the command line
    prediction: predict.Prediction | None = None

    @property
    def ranks(self) -> int:
        return all_ranks(self.job)

    @property
    def nodes(self) -> int:
        # each has nodes of its own
        groups = self.job.fault_tolerance.replicas if self.job.cluster.executor == "slurm" else 1
        return groups * math.ceil(self.ranks / groups / (self.job.cluster.gpus_per_node or self.ranks))

    @property
    def name(self) -> str:
        """The name of the cell in its sweep."""
        return self.job.sweep.cell or " ".join(self.overrides) or self.directory.name

    @property
    def runs(self) -> Path:
        """The folder of runs."""
        return Path(self.job.paths.runs).expanduser().absolute()

    def wants(self, state: State) -> bool:
        """Whether a run in this state is to be started (again)."""
        if state.active:
            return False
        again = state.kind == "failed" and state.failure.status in RETRY[self.job.launch.retry]
        return self.job.launch.force or again or state.kind in ("new", "not submitted", "interrupted")

    @property
    def gpu_hours(self) -> float | None:
        """The GPU-hours that the cell takes at most; None without a time limit."""
        minutes = self.job.cluster.time_minutes
        return None if minutes is None else self.ranks * minutes / 60


def dispatch(composed: list[tuple[Any, list[str]]]) -> int:
    """Run composed cells, (configuration, overrides) each. Returns the exit status of the first cell that did not end
    well, or 0.
    """
    if not composed:  # --help, --cfg, --info
        return Exit.DONE
    cells, faults = read_all(named(composed))
    skip = any(config.launch.skip_invalid is True for config, _ in composed)
    for fault in faults:
        print(f"{'left out: ' if skip else ''}{fault}", file=sys.stderr)
    if not cells or (faults and not skip):
        return Exit.CONFIG
    if line_faults := list(faults_of_the_line(cells)):
        print(*line_faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    return begin(list(without_twins(cells)))


def begin(cells: list[Cell]) -> int:
    """Start the cells that passed the checks, or only print them with launch.mode=dry. Returns the exit status.

    Nothing starts if `faults_of_the_place` finds a fault.
    """
    states = rundir.states([cell.directory for cell in cells])
    start = to_start(cells, states)
    if place_faults := list(faults_of_the_place(cells, states)):
        print(*place_faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    if cells[0].job.launch.mode == "dry":
        show.dry_run(cells, states, gpu_hours(start))
        if on_slurm(cells):
            from .executors.slurm import submit

            for array, text in submit.scripts(cells):
                print(f"\n--- {show.shape(array)}\n{text}")
        return Exit.DONE
    show.predicted(start)
    try:
        return go(cells, manifest.folder_of(cells))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"{cells[0].runs}: {error.strerror}; make room, and the same command line goes on", file=sys.stderr)
        return Exit.BUG
    except KeyboardInterrupt:  # between two cells, or in the one that runs in this process
        print("stopped; the same command line goes on", file=sys.stderr)
        return 130


def read_all(composed: list[tuple[Any, list[str]]]) -> tuple[list[Cell], list[str]]:
    """Type, freeze and check all cells. Returns those without faults, and the faults of the others, a line each."""
    cells, lines, notices = [], [], []
    for number, (config, overrides) in enumerate(with_count(composed, "checked"), start=1):
        job, faults = read(config)
        if job is not None:
            job = freeze(job)
            faults = check(job)
            notices += [] if faults else warnings(job)
        prediction = None if faults else predict.of_launch(job)
        if prediction and job.launch.oom_check != "off" and (fault := predict.objection(prediction)):
            refused = job.launch.oom_check == "refuse" and predict.too_large(prediction)
            (faults if refused else notices).append(fault)
        where = f"   (cell {number} of {len(composed)}: {shown(redact(' '.join(overrides)))})" if len(composed) > 1 else ""
        lines += [f"{redact(str(fault))}{where}" for fault in faults]
        if not faults:
            cells.append(Cell(number, overrides, job, rundir.directory_of(job), len(composed), prediction))
    for notice in dict.fromkeys(map(str, notices)):
        print(f"warning: {notice}", file=sys.stderr)
    return cells, lines


def without_twins(cells: list[Cell]) -> Iterable[Cell]:
    """Yield each experiment once: cells with the same identity as an earlier one are printed and left out."""
    first: dict[str, Cell] = {}
    for cell in cells:
        twin = first.setdefault(identity(cell.job), cell)
        if twin is cell:
            yield cell
        else:
            print(f"cell {cell.number} is the same experiment as cell {twin.number} ({twin.directory.name}): it runs once")


def faults_of_the_line(cells: list[Cell]) -> Iterable[Fault]:
    """Yield a fault for each key that must have one value for all cells of a command line but has several."""
    for key in ("cluster.executor", "launch.mode", "launch.packed", "launch.wait", "launch.max_gpu_hours"):
        if len(values := list(dict.fromkeys(attrgetter(key)(cell.job) for cell in cells))) > 1:
            yield Fault(key, values, "one command line has one value for all of its cells", legal=tuple(values))
    if cells[0].job.launch.packed and len({repr(cell.job.cluster) for cell in cells}) > 1:
        yield Fault("launch.packed", True, "the cells share one job, and their cluster settings differ", legal=(False,))


def faults_of_the_place(cells: list[Cell], states: list[State]) -> Iterable[Fault]:
    """Return the faults of starting these cells here and now: a run under way, those of SLURM, a folder that cannot be
    written, too many GPU-hours. A dry run writes nothing.
    """
    launch, faults = cells[0].job.launch, []
    for cell, state in zip(cells, states, strict=True):
        if launch.force and state.kind in ("running", "queued"):
            faults.append(
                Fault("launch.force", True, f"{cell.directory.name} is {state.kind}; stop it first (titan cancel {cell.directory.name})")
            )
    slurm, parallel, dry = on_slurm(cells), max(cell.job.cluster.max_parallel for cell in cells), launch.mode == "dry"
    faults += faults_of_slurm(to_start(cells, states), dry) if slurm else []
    if launch.packed and not slurm:
        faults.append(Fault("launch.packed", True, "is for SLURM: here cells share the machine anyway", legal=(False,)))
    if parallel > 1 and not slurm:
        faults.append(Fault("cluster.max_parallel", parallel, "cells run one after another on this machine", legal=(0, 1)))
    if launch.max_gpu_hours is not None:
        start = to_start(cells, states)
        hours = gpu_hours(start)
        if hours is None:
            faults.append(Fault("launch.max_gpu_hours", launch.max_gpu_hours, "needs cluster.time_minutes: there is no other bound"))
        elif hours > launch.max_gpu_hours:
            reason = f"{counted(len(start), 'cell')} could take {hours:,.1f} GPU-hours"
            faults.append(Fault("launch.max_gpu_hours", launch.max_gpu_hours, reason))
    for runs in {} if faults else {cell.runs for cell in cells}:
        try:
            if not dry:
                runs.mkdir(parents=True, exist_ok=True)
            # has no name
            tempfile.TemporaryFile(dir=next(folder for folder in (runs, *runs.parents) if folder.exists())).close()
        except OSError as error:
            faults.append(Fault("paths.runs", runs, f"cannot be written: {error.strerror}"))
    return faults


def faults_of_slurm(start: list[Cell], dry: bool) -> Iterable[Fault]:
    """Yield the faults of submitting these cells: no sbatch, code that cannot be copied, jobs beyond the site's limits.
    A dry run needs no SLURM.
    """
    from .executors.slurm import limits, submit

    if not dry and shutil.which("sbatch") is None:
        yield Fault("cluster.executor", "slurm", "there is no sbatch on this machine", legal=("local",))
        return
    try:
        if not dry:
            snapshot.files(snapshot.ROOT)
    except ConfigError as error:
        yield Fault("cluster.executor", "slurm", str(error))
    if start:
        yield from limits.faults(submit.planned(start))


def to_start(cells: list[Cell], states: list[State]) -> list[Cell]:
    """Return the cells that their runs' states leave to be started (again)."""
    return [cell for cell, state in zip(cells, states, strict=True) if cell.wants(state)]


def gpu_hours(cells: list[Cell]) -> float | None:
    """Return the GPU-hours that cells take at most, or None. A packed job holds its largest cell's devices, and repeats
    the baseline.
    """
    hours = [cell.gpu_hours for cell in cells]
    if None in hours:
        return None
    return max(hours) * (len(hours) + 1) if cells and cells[0].job.launch.packed else sum(hours)


def on_slurm(cells: list[Cell]) -> bool:
    """Whether these cells are submitted to SLURM; all cells of a command line use the same executor."""
    return cells[0].job.cluster.executor == "slurm"


def go(cells: list[Cell], folder: Path | None) -> int:
    """Run checked cells on their executor. `folder` is their sweep's, if they belong to one. Returns the exit
    status.
    """
    if on_slurm(cells):
        from .executors.slurm import submit

        return submit.run(cells, folder)
    return run_all(cells)


def run_all(cells: list[Cell]) -> int:
    """Run one cell after another. A failed cell does not stop the others, Ctrl-C does."""
    states: list[State] = []
    status = Exit.DONE
    interrupts = Interrupts()
    for number, cell in enumerate(cells, start=1):
        if len(cells) > 1:
            print(f"\n[{number}/{len(cells)}] {cell.directory.name}   {quoted(cell.overrides)}", flush=True)
        states.append(settle(cell, interrupts))
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


def settle(cell: Cell, interrupts: Interrupts) -> State:
    """Bring one cell to its end, whatever its state: start it, attach to it, or print why not. Returns its final
    state.
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
            return watch(cell, layout.ATTEMPT.of(cell.directory, state.attempt), interrupts)
        if state.kind in ("queued", "unknown"):
            print(f"{cell.directory.name}: {show.waiting(state)}", file=sys.stderr)
            return state
        if not fresh and state.kind == "done":
            print(show.result_line(cell.directory))
            return state
        if not fresh and state.kind == "failed" and state.failure.status not in RETRY[launch.retry]:
            show.failure(cell.directory, state.failure)
            print("  it failed before and was not started; launch.retry=failed runs it again", file=sys.stderr)
            return state
        attempt = rundir.claim(cell.directory, state.attempt + 1, cell.job, cell.overrides, fresh)
        if attempt is not None:
            return _start(cell, attempt, interrupts)


def _start(cell: Cell, attempt: Path, interrupts: Interrupts) -> State:
    """Run a claimed attempt to its end."""
    again = f", attempt {attempt.name}" if attempt.name != "1" else ""
    print(f"{cell.directory}{again}: {counted(processes(cell.job), 'rank')}", flush=True)
    try:
        if cell.job.cluster.executor == "inline":
            if worker.run_rank(str(cell.directory), int(attempt.name), inline=True) == 130:
                raise KeyboardInterrupt
            rundir.end_attempt(attempt)
            return tell(cell)
        with interrupts.counted():  # before the import: Python can lose a KeyboardInterrupt raised during one
            from .executors import ranks

            parent = ranks.start(cell.directory, attempt, cell.job)
            return watch(cell, attempt, interrupts, parent)
    finally:
        rundir.end_attempt(attempt)


def watch(cell: Cell, attempt: Path, interrupts: Interrupts, parent: subprocess.Popen[Any] | None = None) -> State:
    """Attach to an attempt until it is over, and print how it ended."""
    with interrupts.counted():
        attach(cell.directory, attempt, cell.job.steps, interrupts, parent, f"cell {cell.number} of {cell.of}" if cell.of > 1 else "")
    rundir.end_attempt(attempt)
    return tell(cell)


def tell(cell: Cell) -> State:
    """Print how a run has ended, and the command to continue."""
    state = rundir.state(cell.directory)
    if state.kind == "done":
        print(show.result_line(cell.directory))
    elif state.kind == "failed":
        show.failure(cell.directory, state.failure)
    else:
        print(f"{cell.directory.name}: {show.last_word(cell.directory, state)}; the same command line resumes it", file=sys.stderr)
    return state
