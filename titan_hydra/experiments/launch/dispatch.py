"""Turn composed cells into runs: read and check all cells, then give the cells without faults to their executor."""

import errno
import sys
import tempfile
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config import Fault, Job, identity, read
from titan_hydra.core.job.config.fault import counted, shown
from titan_hydra.core.job.config.field import BOOLEANS
from titan_hydra.core.job.config.registry import executor_named
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import warnings
from titan_hydra.core.job.run import inputs
from titan_hydra.experiments.compose.cells import with_count
from titan_hydra.experiments.compose.sweep import named
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.runs import manifest, rundir
from titan_hydra.experiments.runs.rundir import State

from . import own_kernels, show
from .cell import Cell, of_another_pass, to_start, without_proof
from .executor import Executor
from .layouts import checked_layouts, in_words

Begun = Callable[[list[Path]], None]


def dispatch(composed: list[tuple[Any, list[str]]], begun: Begun | None = None) -> int:
    """Run composed cells, each a pair (configuration, overrides). Return the exit status of the first cell that failed or
    was stopped, or 0. Before anything starts, `begun` is called with the run directories.
    """
    if not composed:  # there are no cells: Hydra has answered --help, --cfg or --info
        return Exit.DONE
    cells, faults = read_all(named(composed))
    skip = any(BOOLEANS.get(str(config.launch.skip_invalid).lower()) for config, _ in composed)
    for fault in faults:
        print(f"{'left out: ' if skip else ''}{fault}", file=sys.stderr)
    if not cells or (faults and not skip):
        return Exit.CONFIG
    if line_faults := list(faults_of_the_line(cells)):
        print(*line_faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    return begin(list(without_twins(cells)), begun)


def begin(cells: list[Cell], begun: Begun | None = None) -> int:
    """Start the cells that passed the checks; with launch.mode=dry only print them. Return the exit status.

    Nothing starts if `faults_of_the_place` finds a fault.
    """
    states = rundir.states([cell.directory for cell in cells])
    start = to_start(cells, states)
    if place_faults := list(faults_of_the_place(cells, states)):
        print(*place_faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    if begun:
        begun([cell.directory for cell in cells])
    show.passes(cells)
    if cells[0].job.launch.mode == "dry":
        show.dry_run(cells, states, gpu_hours(start))
        for text in _executor(cells).place(cells):
            print(text)
        return Exit.DONE
    show.predicted(start)
    try:
        for cell, state in zip(cells, states, strict=True):
            if state.kind == "done" and not cell.wants(state) and cell.job.launch.accept_changed:
                inputs.accept_of_done(cell.job, cell.directory, cell.runs)
        return go(cells, manifest.folder_of(cells))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"{cells[0].runs}: {error.strerror}; free disk space, then the same command line continues", file=sys.stderr
        )
        return Exit.BUG
    except KeyboardInterrupt:  # Ctrl-C came between two cells, or during a cell that runs in this process
        print("stopped; the same command line continues", file=sys.stderr)
        return 130


def read_all(composed: list[tuple[Any, list[str]]]) -> tuple[list[Cell], list[str]]:
    """Load, freeze and check all cells. Return the cells without faults, and a line for each fault: once, if several cells
    have it.
    """
    cells, notices = [], []
    numbers: dict[str, list[int]] = {}  # of the cells that have a fault
    for number, (config, typed) in enumerate(with_count(composed, "checked"), start=1):
        cell, faults, notes = examine(config, typed, number, len(composed))
        notices += notes
        for fault in dict.fromkeys(redact(str(fault)) for fault in faults):
            numbers.setdefault(fault, []).append(number)
        cells += [cell] if cell else []
    lines = [fault + _where(composed, having) for fault, having in numbers.items()]
    for notice in dict.fromkeys(map(str, notices)):
        print(f"warning: {notice}", file=sys.stderr)
    return cells, lines


def _where(composed: list[tuple[Any, list[str]]], numbers: list[int]) -> str:
    """Return the end of a fault's line: which cells have it; "" if there is only one cell."""
    of = len(composed)
    if of == 1:
        return ""
    if len(numbers) == of:
        return f"   (all {of} cells)"
    if len(numbers) > 1:
        return f"   (cells {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} of {of})"
    config, typed = composed[numbers[0] - 1]
    return f"   (cell {numbers[0]} of {of}: {shown(redact(config.sweep.cell or ' '.join(typed)))})"


def examine(
    config: Any, typed: list[str], number: int = 1, of: int = 1
) -> tuple[Cell | None, list[Fault], list[Fault]]:
    """Load, freeze and check one cell, and predict whether it fits. Return the cell (None if it has faults), the faults
    and the warnings.
    """
    job, faults = read(config)
    layouts: tuple[Job, ...] = ()
    notices: list[Fault] = []
    if job is not None:
        job = freeze(job)
        layouts, faults = checked_layouts(job)
        notices += [] if faults else warnings(job)
    predictions = [] if faults else [predict.of_launch(layout_job) for layout_job in (job, *layouts)]
    for prediction in filter(None, predictions):
        if job.launch.oom_check != "off" and (fault := predict.objection(prediction)):
            if prediction.job.gpus != job.gpus:
                fault = Fault("elastic", in_words(prediction.job), str(fault))
            refused = job.launch.oom_check == "refuse" and predict.too_large(prediction)
            (faults if refused else notices).append(fault)
    if faults:
        return None, faults, notices
    return (
        Cell(
            number=number,
            overrides=typed,
            job=job,
            directory=rundir.directory_of(job),
            of=of,
            prediction=predictions[0],
            layouts=layouts,
        ),
        faults,
        notices,
    )


def without_twins(cells: list[Cell]) -> Iterable[Cell]:
    """Yield the cells, except those with the same identity as an earlier cell; print a message about each of them."""
    first: dict[str, Cell] = {}
    for cell in cells:
        twin = first.setdefault(identity(cell.job), cell)
        if twin is cell:
            yield cell
        else:
            print(
                f"cell {cell.number} is the same experiment as cell {twin.number} ({twin.directory.name}): it runs once"
            )


def faults_of_the_line(cells: list[Cell]) -> Iterable[Fault]:
    """Yield a fault for each key whose value must be the same in all cells of a command line, but differs."""
    keys = ("mode", "packed", "wait", "stop_at_failure", "max_gpu_hours")
    for key in ("cluster.executor", "cluster.max_parallel", *(f"launch.{key}" for key in keys)):
        if len(values := list(dict.fromkeys(attrgetter(key)(cell.job) for cell in cells))) > 1:
            yield Fault(key, values, "all cells of a command line must have the same value", legal=tuple(values))
    if cells[0].job.launch.packed and len({repr(cell.job.cluster) for cell in cells}) > 1:
        yield Fault(
            "launch.packed", True, "packed cells share one job, but their cluster settings differ", legal=(False,)
        )


def faults_of_the_place(cells: list[Cell], states: list[State]) -> Iterable[Fault]:
    """Return the reasons why these cells cannot be started now: a run to be replaced is running or queued, the files of a
    run have changed since it began, the executor finds a fault, the GPU-hours exceed the limit, or a folder cannot be
    written. A dry run creates nothing.
    """
    launch, faults = cells[0].job.launch, []
    for cell, state in zip(cells, states, strict=True):
        if launch.force and state.kind in ("running", "queued"):
            faults.append(
                Fault(
                    "launch.force",
                    True,
                    f"{cell.directory.name} is {state.kind}; {state.stopped_by(cell.directory.name)}",
                )
            )
    began = {cell.directory: cell.job for cell, state in zip(cells, states, strict=True) if state.kind != "new"}
    done = {cell.directory for cell, state in zip(cells, states, strict=True) if state.kind == "done"}
    faults += [] if launch.force else inputs.check_files(began, cells[0].runs, done=done)
    counted_anew = [cell for cell in cells if cell.job.data.samples is not None and cell.directory not in began]
    faults += [fault for cell in counted_anew if not launch.force for fault in of_another_pass(cell)]
    faults += without_proof(to_start(cells, states))
    faults += own_kernels.under_a_ring([cell.job for cell in to_start(cells, states)])
    faults += _executor(cells).check(cells, states)
    if launch.max_gpu_hours is not None:
        start = to_start(cells, states)
        hours = gpu_hours(start)
        if hours is None:
            faults.append(
                Fault(
                    "launch.max_gpu_hours",
                    launch.max_gpu_hours,
                    "needs cluster.time_minutes: nothing else limits a job",
                )
            )
        elif hours > launch.max_gpu_hours:
            reason = f"{counted(len(start), 'cell')} could take {hours:,.1f} GPU-hours"
            faults.append(Fault("launch.max_gpu_hours", launch.max_gpu_hours, reason))
    for runs in {} if faults else {cell.runs for cell in cells}:
        try:
            if launch.mode != "dry":
                runs.mkdir(parents=True, exist_ok=True)
            # The temporary file has no name, so nothing is left if this process is killed.
            tempfile.TemporaryFile(dir=next(folder for folder in (runs, *runs.parents) if folder.exists())).close()
        except OSError as error:
            faults.append(Fault("paths.runs", runs, f"cannot be written: {error.strerror}"))
    return faults


def gpu_hours(cells: list[Cell]) -> float | None:
    """Return an upper bound of the cells' GPU-hours; None without a time limit. A packed job occupies as many devices as
    its largest cell until all cells have run, and runs the baseline twice.
    """
    hours = [cell.gpu_hours for cell in cells]
    if None in hours:
        return None
    return max(hours) * (len(hours) + 1) if cells and cells[0].job.launch.packed else sum(hours)


def go(cells: list[Cell], folder: Path | None) -> int:
    """Run checked cells on their executor, and return the exit status. `folder` is the folder of their sweep; None for a
    single cell.
    """
    return _executor(cells).submit(cells, folder)


def _executor(cells: list[Cell]) -> Executor:
    """Return the executor of these cells; all cells of a command line have the same executor."""
    executor: Executor = executor_named(cells[0].job.cluster.executor)
    return executor
