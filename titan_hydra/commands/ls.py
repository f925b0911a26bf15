"""`titan ls`: list all sweeps of a folder of runs, and the runs outside them, one line each, the newest first."""

import argparse
import time
from collections import Counter
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.base.text import table
from titan_hydra.runs import find, layout, rundir
from titan_hydra.runs.rundir import State
from titan_hydra.runs.view import add_runs

from .status import COLOURS, ORDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    sweeps = {folder: find.sweep(folder).cells if find.manifest_of(folder) else [] for folder in find.sweeps(runs)}
    swept = [cell.directory for cells in sweeps.values() for cell in cells]
    directories = list(dict.fromkeys([*find.all_runs(runs), *swept]))
    states = dict(zip(directories, rundir.inspect_all(directories), strict=True))
    damaged = State("damaged", damage=f"{layout.SWEEP.name} cannot be read")
    found = [
        (find.written(folder), folder.name, [states[cell.directory] for cell in cells] or [damaged]) for folder, cells in sweeps.items()
    ]
    for directory in directories:
        if directory not in set(swept):
            owner = {} if states[directory].damage else layout.CLAIM.read(layout.ATTEMPT.of(directory, states[directory].attempt))
            found.append((owner.get("started", directory.stat().st_mtime), directory.name, [states[directory]]))
    return found


def ago(moment: float) -> str:
    """Format a time briefly: 14:05 if it is today, else with the date."""
    then, now = time.localtime(moment), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%b %d %H:%M" if then[0] == now[0] else "%Y-%m-%d", then)
