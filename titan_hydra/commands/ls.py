"""`titan ls`: list all sweeps of a folder of runs, and the runs outside them, one line each, the newest first."""
from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.base.text import table
from titan_hydra.config.files import read_json
from titan_hydra.runs import find, rundir
from titan_hydra.runs.rundir import State
from titan_hydra.runs.view import add_runs

from .status import COLOURS, ORDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan ls`."""
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Print the lines; returns 0."""
    if not args.runs.is_dir():
        raise ConfigError(f"--runs={args.runs}: no such folder")
    rows, colours = [], []
    for when, name, states in sorted(entries(args.runs.absolute()), key=lambda entry: entry[0], reverse=True):
        kinds = Counter(state.kind for state in states)
        alone = next(iter(kinds), "new") if len(kinds) == 1 else ""
        counts = [kind if len(states) == 1 else f"{kinds[kind]} {kind}" for kind in ORDER if kinds[kind]]
        if len(states) == 1 and states[0].damage:
            counts = [f"damaged: {states[0].damage}"]
        rows.append([name, str(len(states)), ", ".join(counts), ago(when)])
        colours.append({"state": COLOURS[alone]} if alone else {})
    if rows:
        print(*table(["sweep or run", "cells", "state", "when"], rows, {"cells"}, ("sweep or run", "state"), colours), sep="\n")
    else:
        print(f"no runs in {args.runs}")
    return Exit.DONE


def entries(runs: Path) -> list[tuple[float, str, list[State]]]:
    """Return (time started, name, states of the cells) of every sweep, and of every run in no sweep."""
    sweeps = [(file, find.sweep(file)) for file in find.sweeps(runs)]
    damaged = [file for file in find.manifests(runs) if file not in dict(sweeps)]
    swept = [cell.directory for _, sweep in sweeps for cell in sweep.cells]
    directories = list(dict.fromkeys([*find.all_runs(runs), *swept]))
    states = dict(zip(directories, rundir.inspect_all(directories), strict=True))
    found = [(file.stat().st_mtime, file.parent.name, [states[cell.directory] for cell in sweep.cells]) for file, sweep in sweeps]
    found += [(file.stat().st_mtime, file.parent.name, [State("damaged", damage="manifest.json cannot be read")]) for file in damaged]
    for directory in directories:
        if directory not in set(swept):
            owner = read_json(directory / "attempts" / str(states[directory].attempt) / "attempt.json") or {}
            found.append((owner.get("started", directory.stat().st_mtime), directory.name, [states[directory]]))
    return found


def ago(moment: float) -> str:
    """Format a time briefly: 14:05 if it is today, else with the date."""
    then, now = time.localtime(moment), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%b %d %H:%M" if then[0] == now[0] else "%Y-%m-%d", then)
