"""What launch.py prints: tables of cells, how a run ended, and what to type next."""
from __future__ import annotations

import sys
from pathlib import Path

from .failure import Failure
from .records import read_json
from .rundir import State


def table(columns: list[str], rows: list[list[object]]) -> None:
    """A table as wide as its content where nobody's terminal limits it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False).print(grid)


def differing(overrides: list[list[str]]) -> list[str]:
    """For each cell its overrides less those that all cells share."""
    common = set.intersection(*map(set, overrides)) if overrides else set()
    return [" ".join(override for override in cell if override not in common) for cell in overrides]


def results(cells: list, states: list[State]) -> None:
    """What came of each cell of a sweep."""
    rows = []
    for cell, changes, state in zip(cells, differing([cell.overrides for cell in cells]), states, strict=True):
        result = (read_json(cell.directory / "result.json") or {}) if state.kind == "done" else {}
        numbers = [_number(result.get(key), form) for key, form in (
            ("steps", "{}"), ("final_loss", "{:.4f}"), ("tokens_per_second", "{:,.0f}"), ("memory_gib", "{:.1f}"), ("seconds", "{:.0f}"))]
        rows.append([cell.directory.name, changes, state.failure.line if state.failure else state.kind, *numbers])
    table(["run", "overrides", "status", "steps", "loss", "tokens/s/device", "GiB", "seconds"], rows)


def plan(cells: list, states: list[State]) -> None:
    """launch.mode=dry: what would run, on how much, for how long at most."""
    rows = []
    for cell, changes, state in zip(cells, differing([cell.overrides for cell in cells]), states, strict=True):
        rows.append([cell.directory.name, changes, cell.ranks, cell.nodes, state.kind, _number(cell.gpu_hours, "{:,.1f}")])
    table(["run", "overrides", "ranks", "nodes", "state", "GPU-hours at most"], rows)


def result_line(directory: Path) -> str:
    """A finished run in one line."""
    result = read_json(directory / "result.json") or {}
    loss, rate = _number(result.get("final_loss"), "{:.4f}"), _number(result.get("tokens_per_second"), "{:,.0f}")
    return f"{directory.name}: done, {result.get('steps')} steps, loss {loss}, {rate} tokens/s per device ({directory}/result.json)"


def last_word(directory: Path, state: State) -> str:
    """What rank 0 said when it was stopped: how far it came."""
    said = (read_json(directory / "attempts" / str(state.attempt) / "rank_0.json") or {}).get("error") or {}
    return said.get("message") or "ended before it could save; it goes back to its newest checkpoint, if there is one"


def failure(directory: Path, why: Failure) -> None:
    """The guilty rank's own words, and where the rest of them is."""
    if why.detail:
        print(f"\n{why.detail}\n", file=sys.stderr)
    print(f"{directory.name}: failed ({why.status}): {why.line}", file=sys.stderr)
    if why.log:
        print(f"  log: {why.log}", file=sys.stderr)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
