"""`titan diff A B`: print the differences of two runs in configuration, code and versions, and results."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.base.errors import Exit
from titan_hydra.base.text import table
from titan_hydra.config.fault import as_typed
from titan_hydra.config.load import known_keys
from titan_hydra.runs import layout, rundir
from titan_hydra.runs.records import flat
from titan_hydra.runs.view import add_runs, choose_one

UNITS = ((r"_seconds$", "s"), (r"_minutes$", "min"), (r"_gib$", "GiB"))  # by a key's name
# by its help's first words
UNIT_WORDS = r"^(?:[\w=]+: )?(?:optimizer |data-parallel )?(steps|samples|tokens|ranks|devices|CPU cores)\b"
RESULTS = (  # key of result.json, what it is called, its form
    ("steps", "steps", ",.0f"),
    ("final_loss", "loss", ".4f"),
    ("validation_loss", "validation loss", ".4f"),
    ("tokens_per_second", "tokens/s per device", ",.0f"),
    ("memory_gib", "memory, GiB", ".1f"),
    ("mfu", "MFU", ".3f"),
    ("seconds", "time, s", ",.0f"),
)
LIVE = {"final_loss": "loss", "steps": "step"}  # what a key of result.json is called in metrics.jsonl


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    config: dict[str, Any]
    environment: dict
    state: str
    numbers: dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name, help="a run directory, a cell of the newest sweep, or the start of a hash")
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Print three tables, or a line for each that has no difference."""
    a, b = (side(choose_one(target, args.runs).directory) for target in (args.A, args.B))
    grid("configuration", a, b, configuration(a.config, b.config))
    grid("code and versions", a, b, _environment(a.environment, b.environment))
    grid("results", a, b, _results(a, b), "difference")
    return Exit.DONE


def side(directory: Path) -> Side:
    """Read a run. One that is not done has the numbers of its last logged step."""
    state = rundir.inspect(directory)
    result = layout.RESULT.read(directory) if state.kind == "done" else None
    last = layout.METRICS.last(directory)
    numbers = result or {key: last.get(LIVE.get(key, key)) for key, _, _ in RESULTS}
    environment = layout.ENV.read(directory)
    return Side(directory.name, flat(layout.CONFIG.read(directory)), environment, state.damage or state.kind, numbers)


def configuration(a: dict, b: dict) -> Iterable[tuple[str, str, str]]:
    """Yield the keys that differ, in the schema's order."""
    known = known_keys()
    for key in [*(key for key in known if key in a or key in b), *sorted((a.keys() | b.keys()) - known.keys())]:
        if key not in a or key not in b or a[key] != b[key]:
            unit = unit_of(key, known[key].metadata["help"]) if key in known else ""
            yield key, *(with_unit(values[key], unit) if key in values else "(no such key)" for values in (a, b))


def with_unit(value: Any, unit: str) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{as_typed(value)} {unit.removesuffix('s') if value == 1 and len(unit) > 2 else unit}".rstrip() if number else as_typed(value)


def unit_of(key: str, help: str) -> str:
    """Return the unit of a key's number, taken from its name or its help."""
    named = next((unit for pattern, unit in UNITS if re.search(pattern, key)), "")
    told = re.match(UNIT_WORDS, help)
    return named or (told[1] if told else "")


def _environment(a: dict, b: dict) -> Iterable[tuple[str, ...]]:
    """List the differences in commit, uncommitted changes, versions and machine."""
    rows = [("commit", *(str(side.get("git_sha"))[:12] for side in (a, b))), ("not committed", *map(dirt, (a, b)))]
    if rows[1][1] == rows[1][2] and a.get("git_diff") != b.get("git_diff"):
        rows[1] = ("not committed", rows[1][1], f"{rows[1][2]}, other lines")
    names = sorted((a.get("versions") or {}).keys() | (b.get("versions") or {}).keys())
    rows += [(name, *(str((side.get("versions") or {}).get(name, "-")) for side in (a, b))) for name in names]
    rows += [(name, *(str(side.get(name, "-")) for side in (a, b))) for name in ("host", "platform", "executable")]
    return [row for row in rows if row[1] != row[2]]


def dirt(environment: dict) -> str:
    """Name the tracked files with uncommitted changes."""
    files = re.findall(r"^diff --git a/(\S+)", environment.get("git_diff") or "", re.M)
    return ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "") if files else "nothing"


def _results(a: Side, b: Side) -> Iterable[tuple[str, ...]]:
    """Yield the results side by side, and the relative difference of B from A."""
    if a.state != b.state or a.state != "done":
        yield "state", a.state, b.state, ""
    for key, name, form in RESULTS:
        values = [side.numbers.get(key) for side in (a, b)]
        if values == [None, None]:
            continue
        shown = ["-" if value is None else format(value, form) for value in values]
        change = values[1] / values[0] - 1 if None not in values and values[0] else None
        yield name, *shown, "=" if values[0] == values[1] else signed(change)


def signed(change: float | None) -> str:
    """Format a relative difference in percent, with at least one significant digit."""
    if change is None:
        return ""
    return f"{change:+.1%}" if abs(change) >= 5e-4 else f"{100 * change:+.1g}%"


def grid(title: str, a: Side, b: Side, rows: Iterable[tuple[str, ...]], *further: str) -> None:
    """Print a table, or that there is no difference."""
    if rows := list(rows):
        print(*table([title, a.name, b.name, *further], rows), "", sep="\n")
    else:
        print(f"no difference in {title}")
