"""Find runs by what is typed: a run directory, a sweep's manifest or name, a folder of runs, or the start of a hash.

A sweep's manifest, `runs/_sweeps/<name>-<time>/manifest.json`, lists its cells in order:

    {"name": ..., "created": seconds, "user": ..., "command": [arguments], "baseline": cell name or null, "packed": false,
     "cells": [{"name": ..., "overrides": [...], "hash": ..., "directory": path relative to the runs folder}]}

A cell with "repeat": true is the baseline run again at the end of a packed job.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.fault import quoted, suggest
from titan_hydra.config.files import read_json

SWEEPS = "_sweeps"


@dataclass(frozen=True)
class RunCell:
    """One run as a cell of a selection: its name in it, its directory (which need not exist yet), its overrides."""

    name: str
    directory: Path
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """Runs that a command treats together. `manifest` is the sweep's folder, None for runs of no sweep or of several."""

    name: str
    cells: list[RunCell]
    baseline: str | None = None
    manifest: Path | None = None

    @cached_property
    def sweep(self) -> dict[str, Any]:
        """The content of the sweep's manifest; {} for runs of no sweep or of several."""
        return read_json(self.manifest / "manifest.json") or {} if self.manifest else {}


def select(target: str | None, runs: Path) -> Selection:
    """Return the runs that `target` selects; None selects all in the folder `runs`. Raises ConfigError with the nearest names if there is
    none.
    """
    if target is None:
        return folder_of_runs(runs)
    path = Path(target)
    for manifest in (path, path / "manifest.json", runs / SWEEPS / target / "manifest.json"):
        if manifest.name == "manifest.json" and manifest.is_file():
            return sweep(manifest.absolute())
    if is_run(path):
        return Selection(path.absolute().name, [run_cell(path.absolute())])
    if path.is_dir() and (any(map(is_run, path.iterdir())) or (path / SWEEPS).is_dir()):
        return folder_of_runs(path.absolute())
    named = sweeps(runs)[::-1]
    latest = [file for file in named if (read_json(file) or {}).get("name") == target]
    if latest:
        return sweep(latest[-1])
    matches = [run for run in all_runs(runs) if run.name == target or run.name.rpartition("-")[2].startswith(target)]
    matches += [file for file in named if file.parent.name.startswith(target)]
    if len(matches) == 1:
        match = matches[0]
        return sweep(match) if match.name == "manifest.json" else Selection(match.name, [run_cell(match)])
    if matches:
        names = ", ".join(match.parent.name if match.name == "manifest.json" else match.name for match in matches[:6])
        raise ConfigError(f"{target}: could be any of {len(matches)}: {names}{', ...' if len(matches) > 6 else ''}")
    known = [run.name for run in all_runs(runs)] + [run.name.rpartition("-")[2] for run in all_runs(runs)]
    close = suggest(target, known + [file.parent.name for file in named])
    raise ConfigError(f"{target}: no such run or sweep in {runs}" + (f"; did you mean {' or '.join(close)}?" if close else ""))


def sweep(manifest: Path) -> Selection:
    """Read the cells of one manifest."""
    content = read_json(manifest)
    if content is None:
        raise ConfigError(f"{manifest} cannot be read: it is no sweep's manifest")
    runs = manifest.parents[2]
    cells = [RunCell(cell["name"], runs / cell["directory"], cell["overrides"]) for cell in content["cells"]]
    return Selection(content["name"], cells, content["baseline"], manifest.parent)


def folder_of_runs(runs: Path) -> Selection:
    """Return all runs of a folder, by name."""
    return Selection(runs.name, [run_cell(run) for run in all_runs(runs)])


def run_cell(directory: Path) -> RunCell:
    """Return a single run as a cell."""
    file = directory / "overrides.txt"
    return RunCell(directory.name, directory, file.read_text(errors="replace").splitlines() if file.is_file() else [])


def all_runs(runs: Path) -> list[Path]:
    """Return every run directory of a folder."""
    return sorted(path for path in runs.iterdir() if is_run(path)) if runs.is_dir() else []


def manifests(runs: Path) -> list[Path]:
    """Return every manifest of a folder of runs, the last written first."""
    return sorted(runs.glob(f"{SWEEPS}/*/manifest.json"), key=lambda file: file.stat().st_mtime, reverse=True)


def sweeps(runs: Path) -> list[Path]:
    """Return the readable manifests, the last written first."""
    return [file for file in manifests(runs) if read_json(file)]


def runs_option(folder: Path) -> str:
    """Return titan's option --runs for a folder other than ./runs, with a blank before it; "" for ./runs."""
    return "" if folder.absolute() == Path("runs").absolute() else f" --runs {quoted([str(folder)])}"


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: it has config.json or attempts/, even if its other files are missing or damaged."""
    ours = path.name.isprintable() and not path.name.startswith((".", "_"))
    return ours and ((path / "config.json").is_file() or (path / "attempts").is_dir())
