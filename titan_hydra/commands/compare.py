"""`titan compare`: find the first step at which two runs differ and, if activations were traced, the first module."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.job.ranks import DEGREES
from titan_hydra.runs import layout
from titan_hydra.runs.records import flat
from titan_hydra.runs.view import add_runs, choose_one

MEASURED = ("loss", "grad_norm")
SHOWN = 8  # keys that differ
IGNORED = ("name", "notes", "paths.", "launch.", "cluster.", "metrics.", "profiling.", "sweep.", "debug.", "checkpoint.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="run directory, or the start of a hash")
    parser.add_argument("b", help="the run to compare it with")
    add_runs(parser)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference that matters (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Print where the two runs first differ."""
    a, b = (_directory_of(target, args.runs) for target in (args.a, args.b))
    print(f"A  {a}\nB  {b}\n", *configurations(a, b), *_curves(a, b, args.tolerance), *modules(a, b), sep="\n")
    return Exit.DONE


def _directory_of(target: str, runs: Path) -> Path:
    """Return the directory of the run that `target` selects. Raises ConfigError for a sweep, and for a run without
    losses.
    """
    directory = choose_one(target, runs).directory
    if not layout.METRICS.of(directory).exists():
        raise ConfigError(f"{target}: {directory} has no {layout.METRICS.name} yet")
    return directory


def configurations(a: Path, b: Path) -> Iterator[str]:
    """Yield the keys in which the configurations differ, of those that can change a loss."""
    first, second = (flat(layout.CONFIG.read(run)) for run in (a, b))
    if not first or not second:
        yield f"configurations: {layout.CONFIG.of(b if first else a)} cannot be read"
        return
    differ = [key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key) and not key.startswith(IGNORED)]
    for key in differ[:SHOWN]:
        yield f"  {key}: {first.get(key)} and {second.get(key)}"
    if len(differ) > SHOWN:
        yield f"  and {len(differ) - SHOWN} keys more: titan diff lists them"
    yield "" if differ else "configurations: alike"


def _curves(a: Path, b: Path, tolerance: float) -> Iterator[str]:
    """Yield, for losses and gradient norms, the first step that differs in any bit and the first that differs by the
    tolerance.
    """
    first, second = ({row["step"]: row for row in layout.METRICS.rows(run)[0]} for run in (a, b))
    steps = sorted(first.keys() & second.keys())
    if not steps:
        yield "no step was logged by both"
        return
    yield f"{len(steps)} steps logged by both, {steps[0]} to {steps[-1]}"
    for name in MEASURED:
        pairs = [(step, first[step].get(name), second[step].get(name)) for step in steps]
        parted = [pair for pair in pairs if not _same(pair[1], pair[2])]
        far = [pair for pair in pairs if distance(pair[1], pair[2]) > tolerance]
        if not parted:
            yield f"{name}: the same bits in all of them"
            continue
        yield f"{name}: other bits from {_told(parted[0], steps)}"
        most = max(distance(x, y) for _, x, y in pairs)
        yield f"{name}: " + (f"off by more than {tolerance:g} from {_told(far[0], steps)}" if far else f"off by {most:.2g} at most")


def _told(pair: tuple[int, float, float], steps: list[int]) -> str:
    """Format a step with both values, and the unlogged steps before it in which the difference may have begun."""
    step, x, y = pair
    before = max((earlier for earlier in steps if earlier < step), default=0)
    unseen = f" (steps {before + 1} to {step - 1} were not logged by both)" if step - before > 1 else ""
    return f"step {step}{unseen}: {x!r} and {y!r}, off by {distance(x, y):.2g}"


def modules(a: Path, b: Path) -> Iterator[str]:
    """Yield the first step and module whose traces differ."""
    first, second = traces(a), traces(b)
    if not first or not second:
        without = " and ".join(name for name, run in (("A", first), ("B", second)) if not run)
        yield f"modules: {without} traced no activations; run both again with debug.trace_activations=true to find the module"
        return
    layouts = [layout.CONFIG.read(run).get("parallelism", {}) for run in (a, b)]
    if any(layouts[0].get(degree) != layouts[1].get(degree) for degree in DEGREES):
        yield "modules: the runs are split in different ways, so their ranks hold different parts"
        return
    steps = sorted(first.keys() & second.keys())
    for step in steps:
        parted = [key for key in first[step] if first[step][key]["hash"] != second[step].get(key, {}).get("hash")]
        if parted:
            key = min(parted, key=lambda key: first[step][key]["order"])
            ranks = sorted({rank for rank, *look in parted if look == list(key[1:])})
            yield f"modules: first differ at step {step}, on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {_words(*key[1:])}"
            norms = first[step][key]["norm"], second[step].get(key, {}).get("norm")
            yield f"         norm {norms[0]!r} and {norms[1]!r}; {len(parted)} of {len(first[step])} traced tensors differ in this step"
            return
    yield f"modules: the same bits in all {len(steps)} traced steps" if steps else "modules: no step was traced by both"


def _words(when: str, what: str, name: str, call: int) -> str:
    """Describe which code to examine, given the first traced tensor that differs."""
    outer = name.rpartition(".")[0]
    outer = "the model" if outer in ("", "layers") else outer
    microbatch = f", microbatch {call + 1}" if call else ""
    return {
        ("forward", "in"): f"the input of {name} already differs; look at {outer}'s code before it",
        ("forward", "out"): f"{name}: its inputs are the same, its outputs differ",
        ("backward", "out"): f"the gradient that enters {name} differs, the forward is the same; look at {outer}'s code after it",
        ("backward", "in"): f"{name}, in its backward: the gradient that enters is the same, the one that leaves differs",
    }.get((when, what), f"the gradient of {name}; all activations and their gradients are the same") + microbatch


def traces(run: Path) -> dict[int, dict[tuple, dict]]:
    """Return the traced tensors of all ranks by step; for a repeated step, those of the newest attempt."""
    found: dict[int, dict[tuple, dict]] = {}
    for attempt in layout.ATTEMPT.all(run).values():
        for rank in layout.ACTIVATIONS.all(attempt):
            own: dict[int, dict] = {}
            for row in layout.ACTIVATIONS.rows(attempt, rank)[0]:
                own.setdefault(row["step"], {})[rank, row["pass"], row["what"], row["module"], row["call"]] = row
            for step, rows in own.items():
                found.setdefault(step, {}).update(rows)
    return found


def _same(x: float | None, y: float | None) -> bool:
    """Whether two values are equal to the bit; NaN equals NaN."""
    return x == y or (x != x and y != y)


def distance(x: float | None, y: float | None) -> float:
    """Return the difference relative to the larger value; infinity if only one is finite."""
    if _same(x, y):
        return 0.0
    if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y))
