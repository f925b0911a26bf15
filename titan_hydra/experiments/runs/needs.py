"""What may be removed or moved: which runs are still active, which other runs and sweeps need a run, what nothing needs.

A run needs another if a path in its configuration or in its record of files (env.json) leads into the other's directory:
initial weights, the base of adapters, data, a tokenizer. Only the runs of the same folder are asked.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_hydra.core.base.errors import ConfigError, denied
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.core.job.run.records import alive, flat
from titan_hydra.core.job.run.run import newest_attempt

from . import find, rundir
from .queue import QueuedJob, executor_of, is_here, owner_in

FRESH = 86400  # seconds for which what no run names is left alone, as a launcher may just have written it


@dataclass(frozen=True)
class Going:
    """The runs and the folders of sweeps on which a command works."""

    runs: list[Path] = field(default_factory=list)
    sweeps: list[Path] = field(default_factory=list)

    @property
    def homes(self) -> list[Path]:
        """The folders of runs in which they lie."""
        return [*dict.fromkeys([run.parent for run in self.runs] + [sweep.parents[1] for sweep in self.sweeps])]


class Need(NamedTuple):
    """A run, what needs it, and for what."""

    run: Path
    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.run.name}: {self.by} needs it ({self.why})"


def paths_named(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys of a run that name a path, and the path, absolute and without links."""
    environment = layout.ENV.read(run)
    folder = environment.get("folder") or os.getcwd()
    files = environment.get("files") or {}
    named = [(key, facts["path"]) for key, facts in files.items()]
    named += [(key, text) for key, value in flat(layout.CONFIG.read(run)).items() for text in _texts(value)]
    named += [(inputs.LOAD_PATH, path) for path in (layout.BASE.read(run).get("folder"),) if path]
    for key, path in dict.fromkeys(named):
        yield key, _real(folder, path)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of a configuration that may be paths."""
    if isinstance(value, str) and value and "\0" not in value:
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


@functools.cache
def _real(folder: str, path: str) -> str:
    return os.path.realpath(os.path.join(folder, os.path.expanduser(path)))


def needed(going: Going, together: bool) -> list[Need]:
    """Return what needs the runs of `going`, beside themselves. If they move `together`, a run still finds the weights of
    another there, but no other files.
    """
    real = {os.path.realpath(run): run for run in going.runs}
    needs_found: dict[tuple[Path, str], Need] = {}
    for home in going.homes:
        for other in find.all_runs(home):
            real_path = os.path.realpath(other)
            if real_path in real and not together:
                continue
            try:
                for key, path in paths_named(other):
                    inside = [run for run_path, run in real.items() if (path + "/").startswith(run_path + "/")]
                    if inside and not (real_path in real and (key == inputs.LOAD_PATH or inside[0] == real[real_path])):
                        needs_found.setdefault((inside[0], other.name), Need(inside[0], other.name, key))
            except PermissionError as error:
                print(f"{denied(error)}; what {other.name} needs is not known", file=sys.stderr)
        for need in _needed_by_sweeps(home, going):
            needs_found.setdefault((need.run, need.by), need)
    return [*needs_found.values()]


def _needed_by_sweeps(home: Path, going: Going) -> Iterator[Need]:
    """Yield what the sweeps that stay lose: a trial of a search, a baseline, a cell that goes with another sweep."""
    swept = {cell.directory for folder in going.sweeps for cell in find.sweep(folder).cells}
    for folder in find.readable(home):
        if folder in going.sweeps:
            continue
        cells = find.sweep(folder).cells
        left = any(cell.directory.is_dir() and cell.directory not in going.runs for cell in cells)
        for cell in cells:
            if cell.directory not in going.runs:
                continue
            if layout.JOURNAL.of(folder).exists():
                yield Need(cell.directory, folder.name, "a trial of this search")
            elif cell.name == find.sweep(folder).baseline and left:
                yield Need(cell.directory, folder.name, "the baseline of this sweep")
            elif cell.directory in swept:
                yield Need(cell.directory, folder.name, "a cell of this sweep too")


def sweeps_with(run: Path) -> list[Path]:
    """Return the folders of the sweeps that list a run as a cell."""
    return [
        folder for folder in find.readable(run.parent) if run in {cell.directory for cell in find.sweep(folder).cells}
    ]


def faults_of_state(going: Going, force: bool) -> Iterator[str]:
    """Yield why runs may not be touched: a run is active, the job of a run that is done has not ended, or a search that
    draws their cells goes on. With `force`, a run whose state is not known, and one whose job has not ended, may be.
    """
    repeats = [cell.directory for sweep in going.sweeps for cell in find.sweep(sweep).cells if cell.directory.is_dir()]
    runs = [*dict.fromkeys([*going.runs, *repeats])]
    for run, state in zip(runs, rundir.inspect_all(runs), strict=True):
        if state.kind == "unknown" and (state.damage or not force):
            reason = state.damage or state.refused or "its executor does not answer"
            yield f"{run.name}: whether it runs is not known: {reason}" + ("" if state.damage else "; --force goes on")
        elif state.active and state.kind != "unknown":
            yield f"{run.name}: is {state.kind}; {state.stopped_by(run.name)}"
        elif state.kind == "done" and not force and (job := job_of_done(run)):
            yield f"{run.name}: is done, but its job {job.id} is still {job.state}; wait, or --force goes on"
    for folder in going.sweeps or []:
        if driver := driver_of(folder):
            yield f"{folder.name}: a search draws its cells ({driver}); stop it first (titan stop {folder.name})"


def job_of_done(run: Path) -> QueuedJob | None:
    """Return the job of a run that is done, if its executor's queue still has it: a job ends after its ranks, and one that
    packs several cells lasts longer than each.
    """
    owner = owner_in(run, newest_attempt(run))
    if is_here(owner) or not owner.get("job_id"):
        return None
    try:
        job: QueuedJob | None = executor_of(run, owner).ask([(run, owner)]).jobs.get(owner["job_id"])
    except ConfigError:  # a user's own executor, whose module is not here
        return None
    return job if job and job.unfinished else None


def driver_of(folder: Path) -> str:
    """Return which process draws the cells of a sweep at this moment; "" if none does."""
    record = layout.LEASE.read(folder)
    if alive(record):
        return f"process {record['pid']}"
    try:
        with layout.DRIVER.of(folder).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return layout.DRIVER.text(folder).strip() or "another process"
    except OSError:  # there is no driver, or a file system without locks
        pass
    return ""


def faults_of_folders(going: Going) -> Iterator[str]:
    """Yield the folders that this user may not change, runs that are links (only the link would go), and what is no run."""
    for run in going.runs:
        if not layout.ATTEMPT.of(run).parent.is_dir():
            yield f"{run}: has no attempts, so it is no run, but a model or another folder; it is left alone"
        if run.is_symlink():
            yield f"{run}: is a link to {os.path.realpath(run)}; name that, or delete the link"
    for home in going.homes:
        if not os.access(home, os.W_OK | os.X_OK):
            yield denied(PermissionError(errno.EACCES, "may not be written", str(home)))
    for top in (*going.runs, *going.sweeps):
        closed = [path for path, _, _ in os.walk(top) if not os.access(path, os.R_OK | os.W_OK | os.X_OK)]
        if closed:
            yield denied(PermissionError(errno.EACCES, "may not be changed", closed[0]))


def codes_of(run: Path) -> set[str]:
    """Return the names of the snapshots of code that the attempts of a run import, or have imported."""
    attempts = layout.ATTEMPT.all(run).values()
    records = [layout.ENV.read(run), *map(layout.ENV.read, attempts), *map(layout.CLAIM.read, attempts)]
    return {record["code"] for record in records if isinstance(record.get("code"), str) and record["code"]}


def digests_of(run: Path) -> set[str]:
    """Return the digests of the files with which a run began, which the tables in `_files/` have in their names."""
    return {facts["digest"] for facts in (layout.ENV.read(run).get("files") or {}).values()}


def beside(runs: Iterable[Path], home: Path) -> list[Path]:
    """Return the snapshots of code and the tables of files in a folder of runs that these runs name."""
    runs = [*runs]
    codes = set().union(*map(codes_of, runs))
    digests = set().union(*map(digests_of, runs))
    return [path for path, name in _named(home) if name in codes or name.rpartition("-")[2] in digests]


def _named(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield the snapshots of code and the tables of files in a folder of runs, with the name by which runs know each."""
    for folder in (layout.CODE.of(home), layout.FILES.of(home)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.name.startswith("."):
                yield path, path.name.removesuffix(".json")


def unused(home: Path) -> list[Path]:
    """Return what no run in a folder of runs needs: snapshots of code, tables of files, notes about cells that are gone,
    and what a killed command has left. What is younger than a day stays.
    """
    needed_paths = {*beside(find.all_runs(home), home)}
    unneeded = [path for path, _ in _named(home) if path not in needed_paths]
    listed = {cell.directory.name for folder in find.readable(home) for cell in find.sweep(folder).cells}
    notes = layout.GONE.of(home)
    unneeded += [path for path in sorted(notes.glob("*.json")) if path.stem not in listed]
    unneeded += [path for parent in (home, layout.CODE.of(home)) for path in sorted(parent.glob(".new-*"))]
    unneeded += [
        path for parent in (home, layout.SWEEPS.of(home)) for path in sorted((parent / rundir.REPLACED).glob("*"))
    ]
    now = time.time()
    return [path for path in dict.fromkeys(unneeded) if now - path.lstat().st_mtime > FRESH]


def bytes_of(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder; a file with several names counts once."""
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    entries = [inner.lstat() for inner in (inside if path.is_dir() and not path.is_symlink() else [path])]
    return sum({(entry.st_dev, entry.st_ino): entry.st_size for entry in entries}.values())
