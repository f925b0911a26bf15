"""`titan compare A B`: print how two runs differ in configuration, code and results, and where they diverge. The place
where they diverge is the first step that differs and, if activations were traced, the first module.
"""

import argparse
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import short_name, table, to_json
from titan_hydra.core.job.config.fault import as_typed
from titan_hydra.core.job.config.load import changes_of, known_keys
from titan_hydra.core.job.ranks import DEGREES
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.hang import names
from titan_hydra.core.job.run.records import flat
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.find import is_run
from titan_hydra.experiments.runs.view import add_runs, choose_one, tells

# the unit of a key's value follows from the end of the key's name
UNITS = (
    (r"_seconds$", "s"),
    (r"_minutes$", "min"),
    (r"_gib$", "GiB"),
)
# for any other key, the first words of the key's help text give the unit
UNIT_WORDS = r"^(?:[\w=]+: )?(?:optimizer |data-parallel )?(steps|samples|tokens|ranks|devices|CPU cores)\b"
RESULTS = (  # for each row of the table: the key of result.json, the title, and the format
    ("steps", "steps", ",.0f"),
    ("final_loss", "loss", ".4f"),
    ("validation_loss", "validation loss", ".4f"),
    ("tokens_per_second", "tokens/s per device", ",.0f"),
    ("memory_gib", "memory, GiB", ".1f"),
    ("mfu", "MFU", ".3f"),
    ("seconds", "time, s", ",.0f"),
)
LIVE = {"final_loss": "loss", "steps": "step"}  # keys of result.json that have another name in metrics.jsonl
MEASURED = ("loss", "grad_norm")  # fields of metrics.jsonl that are searched for the first step that differs


@dataclass(frozen=True)
class Side:
    """The contents of one of the two run directories."""

    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    state: str
    results: dict[str, Any]

    @property
    def name(self) -> str:
        return self.directory.name


@dataclass(frozen=True)
class Parting:
    """The steps at which a field of metrics.jsonl differs between the runs, each as (step, value of A, value of B)."""

    parted: list[tuple[int, Any, Any]]  # steps at which any bit differs
    far: list[tuple[int, Any, Any]]  # steps at which the values differ by more than the tolerance
    largest: float  # largest relative difference at any step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name, help="a run directory, a cell of the newest sweep, or the start of a hash")
    add_runs(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="relative difference up to which losses count as equal (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts, with values unrounded")


def main(args: argparse.Namespace) -> int:
    """Print three tables (one line for a table without differences), and below them where the runs diverge."""
    for target in (args.A, args.B):
        refuse_foreign(Path(target))
    a, b = (side(choose_one(target, args.runs).directory) for target in (args.A, args.B))
    if args.json:
        print(to_json(comparison(a, b, args.tolerance)))
        return Exit.DONE
    print_grid("configuration", a, b, configuration(a.config, b.config), "what it changes")
    print_grid("code and versions", a, b, _environment(a.environment, b.environment))
    print_grid("results", a, b, _results(a, b), "difference")
    print(*_curves(a.directory, b.directory, args.tolerance), *modules(a, b), sep="\n")
    return Exit.DONE


def refuse_foreign(path: Path) -> None:
    """Raise ConfigError if a path names a log of another program."""
    if (path.is_file() and path.name != layout.SWEEP.name) or (
        path.is_dir() and not is_run(path) and any(path.rglob("*.tfevents.*"))
    ):
        raise ConfigError(
            f"{path}: is no run of this program, so its configuration, code and modules are not known; "
            f"titan report RUN --with {path} puts it beside a run"
        )


def side(directory: Path) -> Side:
    """Read a run. The results of a run that is not done are the numbers of the last logged step."""
    state = rundir.inspect(directory)
    results = layout.RESULT.read(directory) if state.kind == "done" else None
    last = layout.METRICS.last(directory)
    results = results or {key: last.get(LIVE.get(key, key)) for key, _, _ in RESULTS}
    return Side(
        directory, flat(layout.CONFIG.read(directory)), layout.ENV.read(directory), state.damage or state.kind, results
    )


def comparison(a: Side, b: Side, tolerance: float) -> dict[str, Any]:
    """Return as JSON values everything that is printed about two runs."""
    keys = [(key, changes) for key, _, _, changes in configuration(a.config, b.config)]
    steps, curves = logged_by_both(a.directory, b.directory, tolerance)
    return {
        **{
            name: {"run": str(compared.directory), "state": compared.state, "results": compared.results}
            for name, compared in (("a", a), ("b", b))
        },
        "configuration": [
            {"key": key, "a": a.config.get(key), "b": b.config.get(key), "changes": changes} for key, changes in keys
        ],
        "code": [
            {"name": name, "a": first, "b": second}
            for name, first, second in _environment(a.environment, b.environment)
        ],
        "steps": {"number": len(steps), "first": min(steps, default=None), "last": max(steps, default=None)},
        **{
            name: {
                "same_bits": not curve.parted,
                "first_other_bits": curve.parted[0][0] if curve.parted else None,
                "first_beyond_tolerance": curve.far[0][0] if curve.far else None,
                "largest_difference": curve.largest,
            }
            for name, curve in curves.items()
        },
        "modules": [*modules(a, b)],
    }


def print_grid(title: str, a: Side, b: Side, rows: Iterable[tuple[str, ...]], *further: str) -> None:
    """Print a table with a column for each run, or one line if there are no rows."""
    if rows := list(rows):
        print(*table([title, short_name(a.name, 18), short_name(b.name, 18), *further], rows), "", sep="\n")
    else:
        print(f"no difference in {title}")


def configuration(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the keys that differ, in the schema's order. `changes` names what a difference in the key affects."""
    if not a or not b:
        yield layout.CONFIG.name, *("" if config else "cannot be read" for config in (a, b)), ""
        return
    known = known_keys()
    for key in [*(key for key in known if key in a or key in b), *sorted((a.keys() | b.keys()) - known.keys())]:
        if key not in a or key not in b or a[key] != b[key]:
            unit = unit_of(key, known[key].metadata["help"]) if key in known else ""
            values = [with_unit(config[key], unit) if key in config else "(no such key)" for config in (a, b)]
            yield key, *values, changes_of(key)[1] if tells(key) else "nothing"


def with_unit(value: Any, unit: str) -> str:
    """Format a value as on a command line; a number gets its unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return as_typed(value)
    if value == 1 and len(unit) > 2:  # the plural s is removed from "1 steps", but not from "1 s"
        unit = unit.removesuffix("s")
    return f"{as_typed(value)} {unit}".rstrip()


def unit_of(key: str, help: str) -> str:
    """Return the unit of a key's value, taken from its name or its help text; "" if neither has one."""
    for pattern, unit in UNITS:
        if re.search(pattern, key):
            return unit
    match = re.match(UNIT_WORDS, help)
    return match[1] if match else ""


def _environment(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, ...]]:
    """List how the runs differ in commit, uncommitted files, versions and machine."""
    rows: list[tuple[str, ...]] = [
        *([("code", a["code"], b["code"])] if "code" in a and "code" in b else []),
        ("commit", *(str(side.get("git_sha"))[:12] for side in (a, b))),
        ("not committed", *map(uncommitted, (a, b))),
    ]
    _, mine, theirs = rows[-1]
    if mine == theirs and a.get("git_diff") != b.get("git_diff"):
        rows[-1] = ("not committed", mine, f"{theirs}, other lines")
    both = [side.get("files") or {} for side in (a, b)]
    rows += [
        (f"files of {key}", *(f"{files[key]['bytes']:,} bytes, digest {files[key]['digest']}" for files in both))
        for key in sorted(both[0].keys() & both[1].keys())
        if both[0][key]["digest"] != both[1][key]["digest"]
    ]
    versions = [side.get("versions") or {} for side in (a, b)]
    rows += [
        (name, *(str(side.get(name, "-")) for side in versions))
        for name in sorted(versions[0].keys() | versions[1].keys())
    ]
    rows += [(name, *(str(side.get(name, "-")) for side in (a, b))) for name in ("host", "platform", "executable")]
    return [row for row in rows if row[1] != row[2]]


def uncommitted(environment: dict[str, Any]) -> str:
    """Return a phrase that names the tracked files with uncommitted changes."""
    files = re.findall(r"^diff --git a/(\S+)", environment.get("git_diff") or "", re.M)
    if len(files) > 4:
        return f"{', '.join(files[:4])} and {len(files) - 4} more"
    return ", ".join(files) or "nothing"


def _results(a: Side, b: Side) -> Iterator[tuple[str, ...]]:
    """Yield the results of A and B side by side, with their relative difference (B / A - 1)."""
    if a.state != b.state or a.state != "done":
        yield "state", a.state, b.state, ""
    for key, name, form in RESULTS:
        first, second = values = [side.results.get(key) for side in (a, b)]
        if values == [None, None]:
            continue
        change = second / first - 1 if None not in values and first else None
        yield (
            name,
            *("-" if value is None else format(value, form) for value in values),
            "=" if first == second else signed(change),
        )


def signed(change: float | None) -> str:
    """Format a relative difference in percent, with at least one significant digit."""
    if change is None:
        return ""
    return f"{change:+.1%}" if abs(change) >= 5e-4 else f"{100 * change:+.1g}%"


def _curves(a: Path, b: Path, tolerance: float) -> Iterator[str]:
    """Yield lines about losses and gradient norms: the first step at which any bit differs, and the first at which the
    values differ by more than the tolerance.
    """
    steps, curves = logged_by_both(a, b, tolerance)
    if not steps:
        yield "no step was logged by both"
        return
    yield f"{len(steps)} steps logged by both, {steps[0]} to {steps[-1]}"
    for name, curve in curves.items():
        if not curve.parted:
            yield f"{name}: the same bits in all of them"
            continue
        yield f"{name}: other bits from {_at_step(curve.parted[0], steps)}"
        if curve.far:
            yield f"{name}: off by more than {tolerance:g} from {_at_step(curve.far[0], steps)}"
        else:
            yield f"{name}: off by {curve.largest:.2g} at most"


def logged_by_both(a: Path, b: Path, tolerance: float) -> tuple[list[int], dict[str, Parting]]:
    """Return the steps that both runs have logged, and at which of these steps each field in MEASURED differs."""
    first, second = ({row["step"]: row for row in layout.METRICS.rows(run)[0]} for run in (a, b))
    steps = sorted(first.keys() & second.keys())
    curves = {}
    for name in MEASURED:
        pairs = [(step, first[step].get(name), second[step].get(name)) for step in steps]
        parted = [pair for pair in pairs if not _same(pair[1], pair[2])]
        far = [pair for pair in pairs if distance(pair[1], pair[2]) > tolerance]
        curves[name] = Parting(parted, far, max((distance(x, y) for _, x, y in pairs), default=0.0))
    return steps, curves


def _at_step(pair: tuple[int, float, float], steps: list[int]) -> str:
    """Format a step with the values of both runs. If the steps before it were not logged, add their range, as the
    difference may have begun there.
    """
    step, x, y = pair
    before = max((earlier for earlier in steps if earlier < step), default=0)
    unseen = f" (steps {before + 1} to {step - 1} were not logged by both)" if step - before > 1 else ""
    return f"step {step}{unseen}: {x!r} and {y!r}, off by {distance(x, y):.2g}"


def modules(a: Side, b: Side) -> Iterator[str]:
    """Yield lines that name the first step and the first module whose traces differ."""
    first, second = traces(a.directory), traces(b.directory)
    if not first or not second:
        without = " and ".join(name for name, run in (("A", first), ("B", second)) if not run)
        yield f"modules: {without} traced no activations; run both again with debug.trace_activations=true to find the module"
        return
    degrees = [f"parallelism.{degree}" for degree in DEGREES]
    if any(a.config.get(degree) != b.config.get(degree) for degree in degrees):
        yield "modules: the runs are split in different ways, so their ranks hold different parts"
        return
    steps = sorted(first.keys() & second.keys())
    for step in steps:
        parted = [key for key in first[step] if first[step][key]["hash"] != second[step].get(key, {}).get("hash")]
        if parted:
            key = min(parted, key=lambda key: first[step][key]["order"])
            # all fields but the first, the rank, name the tensor
            ranks = names({other.rank for other in parted if other[1:] == key[1:]})
            yield f"modules: first differ at step {step}, on {ranks}: {_where_to_look(key)}"
            norms = first[step][key]["norm"], second[step].get(key, {}).get("norm")
            yield f"         norm {norms[0]!r} and {norms[1]!r}; {len(parted)} of {len(first[step])} traced tensors differ in this step"
            return
    yield f"modules: the same bits in all {len(steps)} traced steps" if steps else "modules: no step was traced by both"


class TraceKey(NamedTuple):
    """Which tensor of a step a row of a trace describes."""

    rank: int
    when: str  # the pass: forward or backward; gradient for that of a parameter
    what: str  # in or out; "" for a gradient
    module: str
    call: int  # how many calls of the module in this step came before


def _where_to_look(key: TraceKey) -> str:
    """Return a phrase that names the code to examine if this tensor is the first that differs."""
    name = key.module
    caller = name.rpartition(".")[0]
    if caller in ("", "layers"):  # a list of layers has no code of its own
        caller = "the model"
    # in the backward, the gradient of a module's output enters the module, and that of its input leaves it
    match key.when, key.what:
        case "forward", "in":
            phrase = f"the input of {name} already differs; look at {caller}'s code before it"
        case "forward", "out":
            phrase = f"{name}: its inputs are the same, its outputs differ"
        case "backward", "out":
            phrase = (
                f"the gradient that enters {name} differs, the forward is the same; look at {caller}'s code after it"
            )
        case "backward", "in":
            phrase = f"{name}, in its backward: the gradient that enters is the same, the one that leaves differs"
        case _:
            phrase = f"the gradient of {name}; all activations and their gradients are the same"
    return phrase + (f", microbatch {key.call + 1}" if key.call else "")


def traces(run: Path) -> dict[int, dict[TraceKey, dict[str, Any]]]:
    """Return the traced tensors of all ranks by step. If a step was repeated, the tensors of the newest attempt count."""
    by_step: dict[int, dict[TraceKey, dict[str, Any]]] = {}
    for attempt in layout.ATTEMPT.all(run).values():
        for rank in layout.ACTIVATIONS.all(attempt):
            rows_of_file: dict[int, dict[TraceKey, Any]] = {}
            for row in layout.ACTIVATIONS.rows(attempt, rank)[0]:
                key = TraceKey(rank, row["pass"], row["what"], row["module"], row["call"])
                rows_of_file.setdefault(row["step"], {})[key] = row
            for step, rows in rows_of_file.items():
                by_step.setdefault(step, {}).update(rows)
    return by_step


def _same(x: float | None, y: float | None) -> bool:
    """Whether two values are bitwise equal; NaN equals NaN."""
    return x == y or (x != x and y != y)


def distance(x: float | None, y: float | None) -> float:
    """Return the difference relative to the larger of the two values; infinity if only one of them is finite."""
    if _same(x, y):
        return 0.0
    if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y))
