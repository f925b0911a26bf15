"""`titan resume` without KEY=VALUE: run failed and interrupted cells again, from their frozen
configuration, through the same code as launch.py.

A cell that ran out of memory, or whose loss was not finite, would fail again. So such a cell runs again only with
--as-is; without it, a change is suggested instead.
"""

import argparse
import dataclasses
import sys
from itertools import groupby
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit, Kind
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.core.job.config.operation import Launch, Paths
from titan_hydra.core.job.config.user_code import edited_sources
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell, without_proof
from titan_hydra.experiments.launch.layouts import kept_layouts
from titan_hydra.experiments.runs.find import RunCell, Selection
from titan_hydra.experiments.runs.hints import hint
from titan_hydra.experiments.runs.view import RunRow, look

ONLY = {  # for each word that --only accepts: the classes of failure that it selects
    "failed": tuple(Kind),
    "oom": (Kind.OUT_OF_MEMORY,),
    "node": (Kind.NODE, Kind.HANG),
    "hang": (Kind.HANG,),
    "nan": (Kind.NOT_FINITE,),
    "time": (Kind.TIME_LIMIT,),
    "disk": (Kind.DISK,),
    "preempted": (Kind.PREEMPTED,),
    "killed": (Kind.KILLED,),
    "bug": (Kind.BUG,),
    "config": (Kind.CONFIG,),
    "unknown": (Kind.UNKNOWN,),
    "interrupted": (),
}
WOULD_FAIL_AGAIN = (Kind.OUT_OF_MEMORY, Kind.NOT_FINITE)


def run_again(selection: Selection, args: argparse.Namespace) -> int:
    """Run the chosen cells again. Returns the exit status of launch.py, or 0 if no cell is to run again."""
    rows, _ = look(selection.cells)
    again = []
    for row, cell in zip(rows, selection.cells, strict=True):
        if row.state.kind == "damaged":
            advice = "not run again; the command line that started it mends it"
            print(f"{row.hash}  {row.cell}: damaged {row.state.damage}: {advice}", file=sys.stderr)
        if not _fits(row, args.only or ["failed", "interrupted"]):
            continue
        if not args.as_is and row.state.failure and row.state.failure.kind in WOULD_FAIL_AGAIN:
            advise(row, cell)
        else:
            again.append((row, cell))
    if not again:
        only = f" ({', '.join(args.only)})" if args.only else ""
        print(f"{selection.name}: nothing to run again{only}")
        return Exit.DONE
    for row, _ in again:
        print(f"{row.hash}  {row.cell}: {row.state.failure.line if row.state.failure else row.state.kind}")
    cells = [
        Cell(
            number,
            cell.overrides,
            job := _job_of(cell.directory, args.runs),
            cell.directory,
            len(again),
            layouts=_layouts(job, cell.directory),
        )
        for number, (_, cell) in enumerate(again, 1)
    ]
    faults = list(without_proof(cells))
    for cell in cells:
        with inputs.at_first_folder(cell.job, cell.directory):
            faults += inputs.check_files({cell.directory: cell.job}, cell.runs)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    # cells are submitted separately for each cluster, as the runs of a folder may belong to several clusters, and for
    # each folder in which runs began
    statuses = []
    for _, group in groupby(sorted(cells, key=shared_line), key=shared_line):
        with inputs.at_first_folder((part := list(group))[0].job, part[0].directory):
            statuses.append(dispatch.go(part, selection.manifest))
    return next((status for status in statuses if status), Exit.DONE)


def _fits(row: RunRow, only: list[str]) -> bool:
    """Whether one of the words given with --only selects this run, according to its state."""
    if row.state.kind in ("interrupted", "not submitted"):
        return "interrupted" in only
    return row.state.failure is not None and any(row.state.failure.kind in ONLY[word] for word in only)


def advise(row: RunRow, cell: RunCell) -> None:
    """Print a command with changed overrides, to type instead of repeating the same run."""
    failure = row.state.failure
    print(f"{row.hash}  {row.cell}: {failure.kind}: it would fail again, so it is not run (--as-is runs it anyway)")
    advice = hint(failure)
    if "=" in advice.split(" ")[0]:
        print(f"          python launch.py {quoted([*cell.overrides, *advice.split()])}")
    elif advice:
        print(f"          try {advice}")


def shared_line(cell: Cell) -> str:
    """Return a text that is equal for cells that can be submitted by one command line."""
    return repr((cell.job.cluster, cell.job.launch, layout.ENV.read(cell.directory).get("folder")))


def _job_of(directory: Path, runs: Path) -> Job:
    """Return the job of a run. Its `launch` keys that apply only to the first start (force, retry, a limit) are
    dropped; those that apply to every start are kept. Raises ConfigError if the user's modules have been edited since.
    """
    job = load_job(directory)
    if fault := edited_sources(job.train):
        raise ConfigError(f"{directory.name}: {fault}")
    launch = Launch(retry="all", packed=job.launch.packed, require_proof=job.launch.require_proof)
    return dataclasses.replace(job, launch=launch, paths=Paths(str(runs.absolute())))


def _layouts(job: Job, directory: Path) -> tuple[Job, ...]:
    """Return the layouts of an elastic run; none for any other run. Their `launch` and `paths` are taken from `job`, as
    they may have changed.
    """
    layouts = kept_layouts(directory) if job.elastic else ()
    return tuple(dataclasses.replace(of_layout, launch=job.launch, paths=job.paths) for of_layout in layouts)
