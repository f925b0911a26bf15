"""Functions for the commands that show the progress of runs. They select runs, and collect what a table shows of each
run.

They read only the end of long files, and ask each executor once for all runs.
"""

import argparse
import functools
import math
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.load import known_keys
from titan_hydra.core.job.run import checkpoints, layout, stragglers
from titan_hydra.core.job.run.checkpoints import complete_at
from titan_hydra.core.job.run.run import homes_of
from titan_hydra.experiments.compose.sweep import differing, key_of

from . import find, rundir
from .find import RunCell, Selection
from .queue import Owner, Queue, ask, owner_in
from .rundir import State

# A running cell counts as silent after SILENT seconds without progress, or after the time of STEPS_SILENT steps if
# longer.
SILENT, STEPS_SILENT = 60.0, 10
FIRST_STEP = 300.0  # maximum seconds without progress before the first row, as the first step compiles
# phases that may last for any time; in them, a cell does not count as silent
LASTING = ("start", "validation", "checkpoint", "end")


@dataclass(frozen=True)
class RunRow:
    """What is known about a run at one moment. A field that is None is unknown."""

    cell: str
    directory: Path
    state: State
    steps: int | None = None  # number of steps of the whole run
    step: int | None = None  # the last step that is done
    tokens_per_second: float | None = None
    loss: float | None = None
    where: str | None = None  # the run's host, or SLURM's list of nodes
    # seconds that the newest attempt has waited (if queued), has run so far, or took in total
    seconds: float | None = None
    to_go: float | None = None  # predicted seconds until the last step of the run is done, at the present rate
    silent: float | None = None  # number of seconds without progress, if it is larger than expected
    phase: str | None = None  # phase of a running cell: start, checkpoint, ..., or a part of a step
    cancelled: str | None = None  # the user who cancelled the newest attempt
    best: str | None = None  # with checkpoint.keep_best: the best step so far, and its held-out loss
    slow: str | None = None  # a rank that was slow in most of the newest rows, with its host

    @property
    def hash(self) -> str:
        return self.directory.name.rpartition("-")[2]


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the option --runs."""
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of run directories (default: runs)"
    )


def add_target(
    parser: argparse.ArgumentParser, default: str = "the newest sweep, or all runs where there is none"
) -> None:
    """Add the argument that selects runs, and the option --runs."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help=f"a sweep, one of its cells, a run's name or directory, a folder of runs, or the start of a hash (default: {default})",
    )
    add_runs(parser)


def choose(target: str | None, runs: Path) -> Selection:
    """Return the runs that `target` selects: the cell of a sweep that tables show under this name, or what
    find.select_runs finds. None selects the newest sweep or, if there is none, all runs.
    """
    if not runs.is_dir() and (target is None or not Path(target).exists()):
        raise ConfigError(f"--runs={runs}: no such folder; start a run first, or say where the runs are")
    runs = runs.absolute()
    newest = find.readable(runs)
    for folder in find.sweeps(runs):
        if folder not in newest:
            print(f"{layout.SWEEP.of(folder)} cannot be read: its sweep is left out", file=sys.stderr)
    if target is None:
        target = str(newest[0] if newest else runs)
    if not _holds_something(Path(target)) and target not in [find.sweep(folder).name for folder in newest]:
        for folder in newest:
            cells = find.sweep(folder).cells
            if named := [
                cell for cell, name in zip(cells, short_names(cells), strict=True) if target in (cell.name, name)
            ]:
                return Selection(target, named)
    selection = find.select_runs(target, runs)
    if len(selection.cells) == 1 and (directory := selection.cells[0].directory).is_dir():
        next(directory.iterdir(), None)  # raises PermissionError if this user may not read the directory
    if selection.manifest or len(selection.cells) < 2:
        return selection
    return replace(selection, cells=sorted(selection.cells, key=lambda cell: begun(cell.directory), reverse=True))


def begun(directory: Path) -> float:
    """Return the time at which a run's newest attempt was claimed; 0 if there is none, or if this user may not read it."""
    try:
        return layout.ATTEMPT.of(directory).parent.stat().st_mtime
    except OSError:
        return 0.0


def choose_one(target: str, runs: Path) -> RunCell:
    """Return the run that `target` selects. Raises ConfigError if `target` selects several runs."""
    selection = choose(target, runs)
    if len(selection.cells) != 1:
        hashes = [cell.directory.name.rpartition("-")[2] for cell in selection.cells[:6]]
        names = [f"{name} ({digest})" for name, digest in zip(short_names(selection.cells), hashes, strict=False)]
        more = ["..."] if len(selection.cells) > 6 else []
        raise ConfigError(f"{target}: {len(selection.cells)} runs, and one is needed: {', '.join([*names, *more])}")
    return selection.cells[0]


def _holds_something(path: Path) -> bool:
    """Whether a path names a file, or a folder with a run, a model or runs in it."""
    if not path.is_dir():
        return path.exists()
    try:
        return find.is_run(path) or bool(complete_at(path)) or find.holds_runs(path)
    except OSError:  # a folder of another user
        return True


def place_of(target: str, runs: Path) -> Path:
    """Return `target` if it is a path, else the directory of the run that it selects. A folder that holds neither a run
    nor a model does not hide the run of its name.
    """
    folder = Path(target)
    if "/" in target or _holds_something(folder):
        return folder
    try:
        return choose_one(target, runs).directory
    except ConfigError:
        if folder.is_dir():
            return folder
        raise


def look(cells: list[RunCell]) -> tuple[list[RunRow], dict[str, Queue]]:
    """Return a row for each run, and the answers of the executors. Each executor is asked once for all runs."""
    queues = ask([cell.directory for cell in cells])
    names, now = short_names(cells), rundir.file_time(cells[0].directory.parent) if cells else 0.0
    return [
        _row(name, cell.directory, rundir.inspect(cell.directory, queues), now)
        for name, cell in zip(names, cells, strict=True)
    ], queues


def owner_of(row: RunRow) -> Owner:
    """Return the attempt.json of a row's run: the record of who claimed the run's newest attempt; {} if it is damaged."""
    return owner_in(row.directory, row.state.attempt)


def short_names(cells: list[RunCell]) -> list[str]:
    """Return the names of cells for tables, without hashes. If cells have no names, or equal names, the returned names
    consist of the overrides in which the cells differ.
    """
    overrides = [list(filter(tells, cell.overrides)) for cell in cells]
    if all(cell.name == " ".join(cell.overrides) for cell in cells):
        return [" ".join(changes) or cell.name for cell, changes in zip(cells, differing(overrides), strict=True)]
    names = [cell.name.removesuffix("-" + cell.directory.name.rpartition("-")[2]) for cell in cells]
    twins: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        twins.setdefault(name, []).append(index)
    for same in twins.values():
        if len(same) > 1:
            for index, changes in zip(
                same, map(" ".join, differing([overrides[index] for index in same])), strict=True
            ):
                names[index] = (changes or names[index]) if len(twins) == 1 else f"{names[index]} {changes}".rstrip()
    return names


def tells(override: str) -> bool:
    """Whether an override belongs to the experiment. It does if its key is part of a run's identity, or is unknown."""
    return identities().get(key_of(override), True)


@functools.cache
def identities() -> dict[str, bool]:
    """Return for each key whether it is part of a run's identity, and for each group whether any of its keys is."""
    known, in_identity = known_keys(), {}
    groups = {name.rpartition(".")[0] for name in known}
    for name in reversed(known):  # in the reversed order, keys come before their groups
        in_identity[name] = in_identity.get(name, False) if name in groups else known[name].metadata["identity"]
        group = name.rpartition(".")[0]
        in_identity[group] = in_identity.get(group, False) or in_identity[name]
    return in_identity


def _row(cell: str, directory: Path, state: State, file_now: float) -> RunRow:
    """Read the files that show a run's progress. `file_now` is the present time by the clock of the file system that
    holds these files.
    """
    if state.kind in ("new", "damaged", "removed"):
        return RunRow(cell, directory, state)
    home, number, _ = shown_group(directory, state)
    attempt = layout.ATTEMPT.of(home, number)
    result = layout.RESULT.read(directory) if state.kind == "done" else {}
    last = layout.METRICS.last(home)
    status = layout.STATUS.read(attempt)
    rank = layout.RANK.read(attempt)
    config = layout.CONFIG.read(directory)
    steps, step = config.get("steps"), result.get("steps", status.get("step") or last.get("step"))
    now, phase, silent, step_seconds = time.time(), None, None, None
    if state.kind == "running":
        beat = layout.BEAT.read(attempt)
        # a row of an earlier attempt does not tell the speed of this one
        if modified(layout.METRICS.of(home)) > modified(layout.RANK.of(attempt)):
            step_seconds = last.get("step_seconds") or None
        if beat:
            # the present time by the clock of rank 0's host: the time in its last heartbeat, plus the age of the
            # heartbeat's file
            now = beat["time"] + file_now - modified(layout.BEAT.of(attempt))
        phase, silent = _phase(beat), silence(beat, now, step_seconds)
    return RunRow(
        cell,
        directory,
        state,
        steps=steps,
        step=step,
        tokens_per_second=result.get("tokens_per_second", last.get("tokens_per_second")),
        loss=result.get("final_loss") or last.get("loss"),
        where=_where(state, rank, config),
        seconds=duration(state, attempt, rank, status, now),
        to_go=(steps - step) * step_seconds if step_seconds and steps and step is not None else None,
        silent=silent,
        phase=phase,
        cancelled=layout.CANCELLED.read(attempt).get("by")
        if state.kind in ("interrupted", "queued", "running")
        else None,
        best=_best(home) if config.get("checkpoint", {}).get("keep_best") else None,
        slow=_slow(home, attempt),
    )


def _phase(beat: dict[str, Any]) -> str:
    """Return the phase that a heartbeat of rank 0 names; "start" without a heartbeat. Every step passes through the
    phases of LASTING but the start, so one of them counts only once it has lasted for a second.
    """
    phase = beat.get("phase", "start")
    return "step" if beat and phase in LASTING[1:] and beat["time"] - beat["since"] < 1 else phase


def modified(file: Path) -> float:
    """Return the time at which a file was written; 0 if there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _slow(home: Path, attempt: Path) -> str | None:
    slow = stragglers.slow_rank(layout.METRICS.newest(home, stragglers.NEWEST))
    return stragglers.straggler_line(slow, attempt) if slow else None


def _best(home: Path) -> str | None:
    best_step = checkpoints.best(layout.CHECKPOINTS.of(home))
    return (
        f"best: step {checkpoints.step_of(best_step)}, held out {checkpoints.held_out_loss(best_step):.4f}"
        if best_step
        else None
    )


def jobs_of(directory: Path, state: State) -> list[tuple[Path, int, State]]:
    """Return (run folder, newest attempt, state) for each job of a run: one job, or on SLURM one for each replica group."""
    homes = homes_of(directory, max(len(state.groups), 1))
    return [(home, job.attempt, job) for home, job in zip(homes, state.groups or (state,), strict=True)]


def shown_group(directory: Path, state: State) -> tuple[Path, int, State]:
    """Return the job whose progress is shown for a run: the first running job, else the first job."""
    jobs = jobs_of(directory, state)
    running = [job for job in jobs if job[2].kind == state.kind == "running"]
    return (running or jobs)[0]


def silence(beat: dict[str, Any], now: float, step_seconds: float | None) -> float | None:
    """Return the seconds since rank 0's last progress if they are too many, else None. They are too many if the last
    heartbeat is older than SILENT (rank 0 writes a heartbeat every second). They are also too many if the phase has
    lasted much longer than a step, except in phases that may take any time.
    """
    if not beat:
        return None
    if now - beat["time"] > SILENT:
        return now - beat["time"]
    patience = FIRST_STEP if step_seconds is None else max(SILENT, STEPS_SILENT * step_seconds)
    still = now - beat["since"]
    return still if beat["phase"] not in LASTING and still > patience else None


def _where(state: State, rank: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return where a run is running: the job's list of nodes, or rank 0's host and the number of further nodes. None
    while the run is queued.
    """
    if state.kind == "queued":
        return None
    if named := state.host or (state.job.nodes if state.job else None):
        return named
    ranks, per_node = config.get("gpus"), config.get("cluster", {}).get("gpus_per_node")
    more = math.ceil(ranks / per_node) - 1 if ranks and per_node else 0
    return f"{rank['host']} +{more}" if more and "host" in rank else rank.get("host")


def duration(state: State, attempt: Path, rank: dict[str, Any], status: dict[str, Any], now: float) -> float | None:
    """Return the seconds that the newest attempt has waited (if queued), has run so far, or took in total. `rank` is rank
    0's record, and `status` the content of status.json.
    """
    claimed = layout.CLAIM.read(attempt).get("started")
    if state.kind == "queued":
        began = rank.get("ended", claimed)  # a requeued job has been waiting since its last end
    else:
        began = rank.get("started") or (moment(state.job.start) if state.job else None) or claimed
    ended = now if state.active else rank.get("ended") or status.get("time")
    return max(ended - began, 0.0) if began and ended else None


def moment(written: str) -> float | None:
    """Convert a time that a queue has written in ISO 8601 to seconds since 1970; None for N/A and the like."""
    try:
        return datetime.fromisoformat(written).timestamp()
    except ValueError:
        return None
