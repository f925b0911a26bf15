"""`titan status`: print a table with the states of a sweep's runs, then failures and commands to type next. --all lists
all sweeps and runs of a folder.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_hydra.core.base.amounts import ago, lasting, on_a_clock, or_dash, time_of_day
from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import Column, table, table_of, to_json
from titan_hydra.core.job.config.fault import counted, quoted, shown
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.stretches import stretches_of
from titan_hydra.experiments.runs import find, rundir
from titan_hydra.experiments.runs.find import Selection, all_runs, runs_option
from titan_hydra.experiments.runs.hints import hint
from titan_hydra.experiments.runs.queue import Queue, silent
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow, add_target, choose, look, moment

COLOURS = {
    "done": "green",
    "running": "cyan",
    "queued": "yellow",
    "failed": "red",
    "interrupted": "magenta",
    "not submitted": "magenta",
    "damaged": "red",
    "unknown": "dim",
    "new": "dim",
    "removed": "dim",
}
ORDER = ("done", "running", "queued", "failed", "damaged", "interrupted", "unknown", "not submitted", "new", "removed")
# States, the most important first. If the screen has too few lines, rows with the last of these states are left out.
SHOWN_FIRST = (
    *("running", "failed", "damaged", "unknown", "queued", "interrupted", "not submitted", "new", "done", "removed"),
)
PHASES = {"start": "starting", "validation": "validating", "checkpoint": "writing a checkpoint", "end": "ending"}
FAILURES = 8  # maximum number of failed runs for which the reason is printed
NAME = 56  # maximum length at which a cell's name is cut
# seconds between two refreshes: for local runs, and for runs in a queue (less often, as other users need the queue too)
REFRESH, REFRESH_QUEUE = (
    2,
    10,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-f", "--follow", action="store_true", help="repeat until no run is queued or running")
    how.add_argument(
        "--all",
        action="store_true",
        help="print a line for each sweep and for each run outside sweeps, with the newest first",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON for scripts, with all known values, which are not rounded"
    )


def main(args: argparse.Namespace) -> int:
    """Print the table once, or repeatedly with --follow. Returns 0 in any case, even if runs have failed."""
    if args.follow and args.json:
        raise ConfigError("--json: prints one document, and --follow goes on; repeat `titan status --json`")
    if args.all:
        return _all(args)
    selection = choose(args.target, args.runs)
    if args.follow:
        return _follow(args, selection)
    rows, queues = look(selection.cells)
    if args.json:
        print(to_json({"name": selection.name, "silent": [*silent(queues)], "cells": [_as_json(row) for row in rows]}))
        return Exit.DONE
    print(*_table(rows), "", *_below(args, selection, rows, queues), sep="\n")
    return Exit.DONE


def _all(args: argparse.Namespace) -> int:
    """Print for each sweep how many cells are in each state, and for each run outside sweeps its state."""
    if args.target:
        raise ConfigError(f"--all {args.target}: lists everything in --runs={args.runs}, so it takes no TARGET")
    if not args.runs.is_dir():
        raise ConfigError(f"--runs={args.runs}: no such folder")
    newest_first = sorted(entries(args.runs.absolute()), key=lambda entry: entry[0], reverse=True)
    if args.json:
        print(
            to_json(
                [
                    {"name": name, "started": when, "states": Counter(state.kind for state in states)}
                    for when, name, states in newest_first
                ]
            )
        )
        return Exit.DONE
    rows, colours = [], []
    for when, name, states in newest_first:
        kinds = Counter(state.kind for state in states)
        description = ", ".join(f"{kinds[kind]} {kind}" for kind in ORDER if kinds[kind])
        if len(states) == 1:
            description = f"damaged: {states[0].damage}" if states[0].damage else states[0].kind
        rows.append([name, str(len(states)), description, ago(when)])
        colours.append({"state": COLOURS[next(iter(kinds))]} if len(kinds) == 1 else {})
    if rows:
        print(
            *table(["sweep or run", "cells", "state", "when"], rows, {"cells"}, ("sweep or run", "state"), colours),
            sep="\n",
        )
    else:
        print(f"no runs in {args.runs}")
    return Exit.DONE


def entries(runs: Path) -> list[tuple[float, str, list[State]]]:
    """Return (start time, name, states of the cells) for every sweep, and for every run outside sweeps."""
    sweeps = {folder: find.sweep(folder).cells if find.manifest_of(folder) else [] for folder in find.sweeps(runs)}
    swept = {cell.directory for cells in sweeps.values() for cell in cells}
    alone = [run for run in find.all_runs(runs) if run not in swept]
    directories = [*alone, *swept]
    states = dict(zip(directories, rundir.inspect_all(directories), strict=True))
    rows = []
    for folder, cells in sweeps.items():
        damaged = State("damaged", damage=f"{layout.SWEEP.name} cannot be read")
        rows.append((find.written(folder), folder.name, [states[cell.directory] for cell in cells] or [damaged]))
    for directory in alone:
        claim = (
            {}
            if states[directory].damage
            else layout.CLAIM.read(layout.ATTEMPT.of(directory, states[directory].attempt))
        )
        rows.append((claim.get("started", directory.stat().st_mtime), directory.name, [states[directory]]))
    return rows


def _follow(args: argparse.Namespace, selection: Selection) -> int:
    """Print the table repeatedly until all runs are over; without a terminal, print only a line for each change of
    state.
    """
    if not sys.stdout.isatty():
        return follow_in_lines(selection)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            rows, queues = look(selection.cells)
            lines = list(_below(args, selection, rows, queues))
            rows_shown, left_out = fitting(rows, live.console.height - len(lines) - 4)
            live.update(Text.from_ansi("\n".join([*_table(rows_shown), *left_out, "", *lines])), refresh=True)
            if not any(row.state.may_change for row in rows):
                return Exit.DONE
            time.sleep(_pause(queues))


def follow_in_lines(selection: Selection) -> int:
    """Print one line for each change of a cell's state, for a log."""
    before: dict[Path, str] = {}
    while True:
        rows, queues = look(selection.cells)
        for row in rows:
            text = (
                f"{row.state.kind} {_note(row)}".rstrip() if row.state.kind != "running" else f"running on {row.where}"
            )
            if before.setdefault(row.directory, "") != row.state.kind:
                before[row.directory] = row.state.kind
                print(f"{time_of_day()}  {row.hash}  {row.cell}: {text}", flush=True)
        if not any(row.state.may_change for row in rows):
            print(summary(rows))
            return Exit.DONE
        time.sleep(_pause(queues))


def _pause(queues: dict[str, Queue]) -> int:
    """Return the seconds until the next refresh."""
    return REFRESH_QUEUE if any(queue.jobs for queue in queues.values()) else REFRESH


def fitting(rows: list[RunRow], lines: int) -> tuple[list[RunRow], list[str]]:
    """Return the rows that fit on the screen, without the least urgent states, and a line that counts the rows left
    out.
    """
    if len(rows) <= max(lines, 3):
        return rows, []
    rows_shown = sorted(rows, key=lambda row: SHOWN_FIRST.index(row.state.kind))[: max(lines, 3)]
    return [row for row in rows if row in rows_shown], [f"... and {len(rows) - len(rows_shown)} more"]


def _step(row: RunRow) -> str:
    return f"{or_dash(row.step)}/{row.steps}" if row.steps else "-"


def _cell(row: RunRow) -> str:
    return row.cell if len(row.cell) <= NAME else f"{row.cell[: NAME - 1]}\N{HORIZONTAL ELLIPSIS}"


COLUMNS: tuple[Column[RunRow], ...] = (
    Column("cell", "cell", lambda row: row.cell, _cell, word=True),
    Column("hash", "hash", lambda row: row.hash, word=True),
    Column("state", "state", lambda row: row.state.kind, word=True),
    Column("step", "step", lambda row: row.step, _step),
    Column("tokens/s", "tokens_per_second", lambda row: row.tokens_per_second, ",.0f"),
    Column("loss", "loss", lambda row: row.loss, ".4f"),
    Column("where", "where", lambda row: row.where, lambda row: row.where or None, word=True),
    Column("time", "seconds", lambda row: row.seconds, lambda row: on_a_clock(row.seconds)),
)


def _table(rows: list[RunRow]) -> list[str]:
    columns = (*COLUMNS, Column("", "note", _note, word=True))
    colours = [{"state": COLOURS[row.state.kind]} | ({"": "red"} if row.silent else {}) for row in rows]
    return table_of(columns, rows, ("cell", "where", ""), colours, ("time", "where"))


def _note(row: RunRow) -> str:
    """Return the text in the last column of a run's row: an unusual condition, or the remaining time."""
    state, job, parts = row.state, row.state.job, []
    if state.kind == "failed":
        parts.append(str(state.failure.kind))
    if state.damage:
        parts.append(state.damage)
    if state.refused:
        parts.append(shown(state.refused, 60))
    if row.cancelled:
        parts.append(f"cancelled by {row.cancelled}")
    if state.kind == "queued" and job:
        parts.append(job.why or job.state.lower())
        if start := moment(job.start):
            parts.append(f"starts in {lasting(start - time.time())}" if start > time.time() else "starts soon")
    if row.silent:
        parts.append(f"silent for {lasting(row.silent)} ({row.phase})")
    elif row.phase in PHASES:
        parts.append(PHASES[row.phase])
    elif state.kind == "running":
        parts.append("first step" if row.to_go is None else f"{on_a_clock(row.to_go)} to go")
    if row.best:
        parts.append(row.best)
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt}")
    if 0 < (some := sum(group.kind == "running" for group in state.groups)) < len(state.groups):
        parts.append(f"{some} of {len(state.groups)} replica groups run")
    return ", ".join(parts)


def _below(
    args: argparse.Namespace, selection: Selection, rows: list[RunRow], queues: dict[str, Queue]
) -> Iterable[str]:
    """Yield the lines below the table: failures, summary, and commands to type next."""
    failed = [row for row in rows if row.state.failure]
    for row in failed[:FAILURES]:
        yield f"{row.hash}  {row.cell}: {row.state.failure.kind}: {row.state.failure.line}"
        if advice := hint(row.state.failure):
            yield f"          try {advice}"
    if len(failed) > FAILURES:
        yield f"          ... and {len(failed) - FAILURES} more failed"
    slow = [row for row in rows if row.slow]
    for row in slow[:FAILURES]:
        yield f"{row.hash}  {row.cell}: {row.slow}"
    if failed or slow:
        yield ""
    for stretch in stretches_of(rows[0].directory) if len(rows) == 1 and not rows[0].state.damage else ():
        yield str(stretch)
    for line in silent(queues).values():
        yield f"{line}; its jobs' states are those in their files"
    yield summary(rows)
    runs = runs_option(args.runs)
    target = f" {quoted([args.target])}" if args.target else ""
    steps = list(next_steps(rows, runs, target))
    if selection.manifest and {row.state.kind for row in rows} == {"done"}:
        steps.append((f"titan report{runs} {quoted([selection.manifest.name])}", "the table"))
    if selection.manifest and (others := len(set(all_runs(args.runs.absolute())) - {row.directory for row in rows})):
        steps.append((f"titan status{runs} --all", counted(others, "other run")))
    width = max((len(command) for command, _ in steps), default=0)
    yield from (f"  {command:<{width}}   {text}" for command, text in steps)


def summary(rows: list[RunRow]) -> str:
    """Count the cells by state: 12 cells: 9 done, 2 running, 1 failed (out of memory)"""
    kinds = Counter(row.state.kind for row in rows)
    classes = Counter(str(row.state.failure.kind) for row in rows if row.state.failure)
    why = ", ".join(kind if count == kinds["failed"] else f"{count} {kind}" for kind, count in classes.items())
    parts = [f"{kinds[kind]} {kind}{f' ({why})' if kind == 'failed' else ''}" for kind in ORDER if kinds[kind]]
    return f"{counted(len(rows), 'cell')}: {', '.join(parts)}" if rows else "no runs"


def next_steps(rows: list[RunRow], runs: str, target: str) -> Iterable[tuple[str, str]]:
    """Yield commands that the user may want to type next for these runs, each with what it does."""
    kinds = {row.state.kind for row in rows}
    first = {row.state.kind: row for row in reversed(rows)}
    stopped = bool(kinds & {"interrupted", "not submitted"})
    failed = " --only failed" * stopped
    only = " --only interrupted" * ("failed" in kinds)
    if "failed" in kinds:
        yield f"titan logs{runs} {first['failed'].hash} --guilty", "the failing rank's last words"
        yield f"titan resume{runs}{target}{failed}", "run failed cells again"
    if "interrupted" in kinds:
        yield f"titan resume{runs}{target}{only}", "continue from the newest checkpoints"
    if "not submitted" in kinds:
        yield f"titan resume{runs}{target}{only}", "submit what was not"
    if "running" in kinds:
        yield f"titan logs{runs} {first['running'].hash} -f", "what rank 0 prints"
    if kinds & {"queued", "running"}:
        yield f"titan status{runs}{target} -f", "follow"
        yield f"titan stop{runs}{target}", "stop what runs or waits"


def _as_json(row: RunRow) -> dict[str, Any]:
    """Return everything that is known about a run as JSON values: the columns of the table, and more."""
    state, failure, job = row.state, row.state.failure, row.state.job
    return {column.name: column.value(row) for column in COLUMNS} | {
        "directory": str(row.directory),
        "damage": state.damage or None,
        "refused": state.refused or None,
        "attempt": state.attempt,
        "steps": row.steps,
        "to_go_seconds": row.to_go,
        "silent_seconds": row.silent,
        "phase": row.phase,
        "cancelled_by": row.cancelled,
        "slow_rank": row.slow,
        "job": {"id": job.id, "state": job.state, "reason": job.reason, "start": job.start} if job else None,
        "groups": [
            {"state": group.kind, "attempt": group.attempt, "job": group.job and group.job.id} for group in state.groups
        ],
        "failure": {
            "kind": str(failure.kind),
            "rank": failure.rank,
            "status": int(failure.status),
            "line": failure.line,
            "host": failure.host,
            "hint": hint(failure),
            "log": str(failure.log) if failure.log else None,
        }
        if failure
        else None,
    }
