"""Find the runs that a user names on the command line, by a run directory, a sweep's manifest or name, a folder of
runs, a run's name, or the start of a hash.

A sweep's manifest, `runs/_sweeps/<name>-<time>/manifest.json`, lists its cells in order:

    {"name": ..., "created": seconds, "user": ..., "command": [arguments], "baseline": cell name or null, "packed": false,
     "cells": [{"name": ..., "overrides": [...], "hash": ..., "directory": path relative to the runs folder}]}

A cell with "repeat": true is a repetition of the baseline at the end of a packed job.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import did_you_mean, quoted, suggest
from titan_hydra.core.job.run import layout


@dataclass(frozen=True)
class RunCell:
    """One run of a selection. The run's directory may not exist yet."""

    name: str
    directory: Path
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """The runs on which a command works, such as the cells of a sweep."""

    name: str
    cells: list[RunCell]
    baseline: str | None = None
    manifest: Path | None = None  # folder of the sweep; None if the runs belong to no sweep, or to several sweeps

    @cached_property
    def sweep(self) -> dict[str, Any]:
        """The content of the sweep's manifest; {} if the runs belong to no sweep, or to several sweeps."""
        return layout.SWEEP.read(self.manifest) if self.manifest else {}


def holds_runs(path: Path) -> bool:
    """Whether a folder is one of runs."""
    return any(map(is_run, path.iterdir())) or layout.SWEEPS.of(path).is_dir()


def select_runs(target: str, runs: Path) -> Selection:
    """Return the runs that `target` selects. Raises ConfigError if `target` is ambiguous, or if it selects no run; then
    the message suggests similar names.
    """
    path = Path(target)
    if path.name == layout.SWEEP.name:
        path = path.parent
    for folder in (path, layout.SWEEPS.of(runs) / target):
        if layout.SWEEP.of(folder).is_file():
            return sweep(folder.absolute())
    if is_run(path):
        return Selection(path.absolute().name, [run_cell(path.absolute())])
    if path.is_dir() and holds_runs(path):
        return folder_of_runs(path.absolute())
    named = {folder: sweep(folder) for folder in readable(runs)[::-1]}
    if latest := [sweep_found for sweep_found in named.values() if sweep_found.name == target]:
        return latest[-1]
    # If all runs of a sweep have the name `target` (as after `-m name=...`), the newest such sweep is selected, and no
    # single run.
    whole = [
        folder
        for folder in named
        if {cell.directory.name.rpartition("-")[0] for cell in named[folder].cells} == {target}
    ]
    inside = {cell.directory for folder in whole for cell in named[folder].cells}
    # for each run, its name and its hash
    every = {run: run.name.rpartition("-")[::2] for run in all_runs(runs) if run not in inside}
    matches = [run for run, (name, digest) in every.items() if target in (run.name, name) or digest.startswith(target)]
    matches += whole[-1:] or [folder for folder in named if folder.name.startswith(target)]
    if len(matches) == 1:
        match = matches[0]
        return named[match] if match in named else Selection(match.name, [run_cell(match)])
    if matches:
        names = ", ".join(match.name for match in matches[:6])
        raise ConfigError(f"{target}: could be any of {len(matches)}: {names}{', ...' if len(matches) > 6 else ''}")
    known = [known for run, (name, digest) in every.items() for known in (name, digest, run.name)]
    known += [known for folder in named for known in (folder.name, *(cell.name for cell in named[folder].cells))]
    close = suggest(target, sorted(set(known)))
    raise ConfigError(f"{target}: no such run or sweep in {runs}" + did_you_mean(close))


def sweep(folder: Path) -> Selection:
    """Read a sweep from its folder. Raises ConfigError if its manifest cannot be read."""
    content = layout.SWEEP.read(folder)
    if not content:
        raise ConfigError(f"{layout.SWEEP.of(folder)} cannot be read: it is not the manifest of a sweep")
    runs = folder.parents[1]
    cells = [RunCell(cell["name"], runs / cell["directory"], cell["overrides"]) for cell in content["cells"]]
    return Selection(content["name"], cells, content["baseline"], folder)


def folder_of_runs(runs: Path) -> Selection:
    return Selection(runs.name, [run_cell(run) for run in all_runs(runs)])


def run_cell(directory: Path) -> RunCell:
    """Return a run directory as a cell, with the overrides that were typed when the run was started."""
    return RunCell(directory.name, directory, layout.OVERRIDES.text(directory).splitlines())


def all_runs(runs: Path) -> list[Path]:
    """Return all run directories in a folder, by name."""
    return sorted(path for path in runs.iterdir() if is_run(path)) if runs.is_dir() else []


def sweeps(runs: Path) -> list[Path]:
    """Return the folders of all sweeps in a folder of runs, the one with the newest manifest first."""
    return sorted(
        (file.parent for file in layout.SWEEPS.of(runs).glob(f"*/{layout.SWEEP.name}")), key=written, reverse=True
    )


def written(folder: Path) -> float:
    """Return the time at which the manifest in a sweep's folder was written."""
    return layout.SWEEP.of(folder).lstat().st_mtime


def readable(runs: Path) -> list[Path]:
    """Return the folders of the sweeps whose manifests can be read, the newest first."""
    return [folder for folder in sweeps(runs) if manifest_of(folder)]


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the content of a sweep's manifest; {} if it is damaged, or if this user may not read it."""
    try:
        return layout.SWEEP.read(folder)
    except PermissionError:
        return {}


def runs_option(folder: Path) -> str:
    """Return the option ` --runs FOLDER` for a suggested command; "" for ./runs, the option's default."""
    return "" if folder.absolute() == Path("runs").absolute() else f" --runs {quoted([str(folder)])}"


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: it has config.json or attempts/, even if its other files are missing or
    damaged.
    """
    if not path.name.isprintable() or path.name.startswith((".", "_")):
        return False
    try:
        return layout.CONFIG.of(path).is_file() or layout.ATTEMPT.of(path).parent.is_dir()
    except PermissionError:
        return path.is_dir()  # the folder belongs to another user, whom `rundir.inspect` reports
