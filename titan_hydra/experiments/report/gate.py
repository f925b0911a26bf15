"""Judge runs by the thresholds of a gate's file: `titan report NAME --gate FILE.yaml`.

A check that cannot be made (no such run, no rows, other work, other hardware) is missed, with its reason.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import to_json
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import BELOW_ONE, LINE, NATURAL, POSITIVE, Interval
from titan_hydra.experiments.runs.view import choose, choose_one

from . import compare
from .cells import ReportCell, gather, labels
from .stated import read_keys

ANY_NUMBER = Interval(float("-inf"), open_low=True)
TABLE = ("mean_loss", "held_out_loss", "memory_gib")  # the checks of one number of a cell
ROWS = 2  # a mean with a spread needs as many rows


@dataclass(frozen=True)
class Gate:
    """The thresholds of a gate. None: not checked."""

    mean_loss: float | None = key(None, "largest mean loss over the last rows of a run", ANY_NUMBER)
    held_out_loss: float | None = key(None, "largest held-out loss at a run's last validation", ANY_NUMBER)
    memory_gib: float | None = key(None, "largest peak of reserved memory on a rank, in GiB", POSITIVE)
    speed_baseline: str | None = key(None, "run with whose step times those of each run are compared", LINE)
    speed_tolerance: float = key(
        0.0, "fraction by which the mean step time may exceed the baseline's, if that is more than its noise", BELOW_ONE
    )
    failed_cells: int = key(0, "largest number of runs that failed, or were interrupted", NATURAL)


@dataclass(frozen=True)
class GateCheck:
    """The result of one comparison with a threshold. `cell` is None for a check of all cells together."""

    name: str
    cell: str | None
    passed: bool
    value: float | None = None
    allowed: float | None = None
    reason: str | None = None  # why the check could not be made, or what it rests on

    def __str__(self) -> str:
        """Return a line: passed or missed, the check, the cell, the value and what is allowed."""
        parts = [self.name, self.cell, self.reason if self.value is None else f"{self.value:.6g}"]
        if self.value is not None:
            parts += [f"at most {self.allowed:.6g}", self.reason]
        return (
            f"{'passed' if self.passed else 'MISSED'}  "
            + ": ".join(filter(None, parts[:2]))
            + (f": {', '.join(filter(None, parts[2:]))}")
        )


def gate_main(args: Namespace, forms: tuple[str, ...]) -> int:
    """Print the verdict of a gate about the selected runs. Return Exit.MISSED if a check is missed. Raises ConfigError if
    the gate's file has faults, or if another option asks for a form of the report.
    """
    others = {name: name for name in (*forms, "over", "baseline", "html", "plots", "serve", "output")}
    for option, name in (others | {"with": "foreign"}).items():
        if getattr(args, name):
            raise ConfigError(f"--gate: prints a verdict on each run, and takes no --{option}")
    allowed = {name.strip() for name in args.allow.split(",") if name.strip()}
    gate = read_gate(args.gate)
    checks = list(checks_of(gate, args.target, args.runs, allowed))
    missed = sum(not check.passed for check in checks)
    if args.json:
        result = {"gate": str(args.gate), "passed": not missed, "missed": missed}
        print(to_json({"name": args.target, **result, "checks": [asdict(check) for check in checks]}))
    else:
        verdict = f"missed: {missed} of {counted(len(checks), 'check')}" if missed else "passed"
        print(*checks, f"{args.gate}: {verdict}", sep="\n")
    return Exit.MISSED if missed else Exit.DONE


def read_gate(file: Path) -> Gate:
    """Read a gate's file. Raises ConfigError with a line for each fault, also for a tolerance without a baseline."""
    gate = read_keys(Gate, file)
    if gate.speed_tolerance and not gate.speed_baseline:
        raise ConfigError(f"{file}: speed_tolerance={gate.speed_tolerance}: needs speed_baseline: RUN")
    return gate


def checks_of(gate: Gate, target: str | None, runs: Path, allowed: Set[str]) -> Iterator[GateCheck]:
    """Yield every check of a gate. A run that failed is judged by `failed_cells` alone, and one that is not over cannot
    be judged.
    """
    try:
        selection = choose(target, runs)
    except (ConfigError, OSError) as error:
        yield GateCheck(
            name="failed_cells",
            cell=None,
            passed=False,
            value=None,
            allowed=gate.failed_cells,
            reason=f"cannot be judged: {error}",
        )
        return
    cells = [cell for cell in gather(selection) if not cell.repeat]
    named = dict(zip(labels(cells, selection.manifest is not None), cells, strict=True)) if cells else {}
    yield from _failed(gate, named)
    done = {label: cell for label, cell in named.items() if cell.done}
    wanted = [name for name in TABLE if getattr(gate, name) is not None]
    for name in [*wanted, *(["step_seconds"] if gate.speed_baseline else [])] if not done else ():
        yield GateCheck(
            name=name,
            cell=None,
            passed=False,
            value=None,
            allowed=getattr(gate, name, None),
            reason="cannot be judged: no run is done",
        )
    for name in wanted:
        for label, cell in done.items():
            yield _number(name, label, cell, getattr(gate, name))
    if gate.speed_baseline and done:
        yield from _speeds(gate, named, done, runs, allowed)


def _failed(gate: Gate, named: dict[str, ReportCell]) -> Iterator[GateCheck]:
    """Yield the check of the number of failed runs, and a missed one for each run that is not over."""
    lost = [label for label, cell in named.items() if cell.lost or cell.state.kind == "interrupted"]
    reason = ", ".join(f"{label} ({named[label].word})" for label in lost) or None
    if named:
        yield GateCheck(
            name="failed_cells",
            cell=None,
            passed=len(lost) <= gate.failed_cells,
            value=len(lost),
            allowed=gate.failed_cells,
            reason=reason,
        )
    else:
        yield GateCheck(
            name="failed_cells",
            cell=None,
            passed=False,
            value=None,
            allowed=gate.failed_cells,
            reason="cannot be judged: no runs",
        )
    for label, cell in named.items():
        if not cell.done and label not in lost:
            yield GateCheck(
                name="failed_cells",
                cell=label,
                passed=False,
                value=None,
                allowed=None,
                reason=f"cannot be judged: {cell.word}",
            )


def _number(name: str, label: str, cell: ReportCell, limit: float) -> GateCheck:
    value = {"mean_loss": cell.loss, "held_out_loss": cell.held_out, "memory_gib": cell.memory}[name]
    if value is None:
        return GateCheck(
            name=name,
            cell=label,
            passed=False,
            value=None,
            allowed=limit,
            reason=f"cannot be judged: the run has no {name}",
        )
    if not isfinite(value):
        return GateCheck(
            name=name, cell=label, passed=False, value=None, allowed=limit, reason=f"{value} is not a finite number"
        )
    return GateCheck(name, label, value <= limit, value, limit)


def _speeds(
    gate: Gate, named: dict[str, ReportCell], done: dict[str, ReportCell], runs: Path, allowed: Set[str]
) -> Iterator[GateCheck]:
    """Yield a check of the step times of each run that is done, except the baseline."""
    name = gate.speed_baseline or ""
    try:
        baseline = named.get(name) or _single(name, runs)
    except (ConfigError, OSError) as error:
        yield GateCheck("step_seconds", None, False, reason=f"cannot be judged: speed_baseline: {error}")
        return
    others = {label: cell for label, cell in done.items() if cell.directory.resolve() != baseline.directory.resolve()}
    if not others:
        yield GateCheck(
            "step_seconds", None, False, reason=f"cannot be judged: {name} is the only run, and the baseline"
        )
    for label, cell in others.items():
        yield _speed(label, cell, baseline, gate.speed_tolerance, allowed)


def _single(name: str, runs: Path) -> ReportCell:
    """Return the run that a gate names as its baseline."""
    from titan_hydra.experiments.runs.find import Selection

    cell = choose_one(name, runs)
    (cell_of_run,) = gather(Selection(name, [cell]))
    return cell_of_run


def _speed(label: str, cell: ReportCell, baseline: ReportCell, tolerance: float, allowed: Set[str]) -> GateCheck:
    """Compare the mean step times of two runs. The limit is above the baseline's mean by the spread of its step times or
    by the tolerance, whichever is more.
    """
    times, reference = step_times(cell), step_times(baseline)
    reason = not_alike(cell, baseline, allowed)
    if not baseline.done:
        reason = f"the baseline is {baseline.word}"
    elif min(len(times), len(reference)) < ROWS:
        who = "the run" if len(times) < ROWS else "the baseline"
        reason = f"{who} has {counted(min(len(times), len(reference)), 'row')} of steady step times, and a spread needs {ROWS}"
    if reason:
        return GateCheck("step_seconds", label, False, reason=f"cannot be judged: {reason}")
    usual, spread = mean(reference), stdev(reference)
    limit, value = usual + max(spread, tolerance * usual), mean(times)
    basis = f"the baseline's {len(reference)} rows have a mean of {usual:.4g} s and a spread of {spread:.2g} s"
    if cell.busy or baseline.busy:
        basis += "; other programs used the machine"
    return GateCheck(name="step_seconds", cell=label, passed=value <= limit, value=value, allowed=limit, reason=basis)


def step_times(cell: ReportCell) -> list[float]:
    """Return the step times of a run's rows, without the first row of each attempt and without profiled rows."""
    profiled, first = cell.column("profiled_steps"), cell.column("first_step")
    times = cell.column("step_seconds", 1).items()
    return [seconds for step, seconds in times if step not in profiled and step not in first and isfinite(seconds)]


def not_alike(cell: ReportCell, baseline: ReportCell, allowed: Set[str]) -> str | None:
    """Return in what the work or the hardware of two runs differs, or is not known; None if it is the same."""
    data = [name for name in compare.LEARNING if name.startswith("data.")]
    for name in dict.fromkeys((*compare.WORK, *data, "gpus", "device")):
        if compare.is_allowed(name, allowed):
            continue
        of_run, of_baseline = (compare.value_of(value, name) for value in (cell, baseline))
        if of_run is not compare.UNKNOWN and of_run == of_baseline:
            continue
        if compare.UNKNOWN in (of_run, of_baseline) and of_run is of_baseline and name not in ("gpus", "device"):
            continue  # a key that neither run has
        values: list[Any] = [
            "not known" if value is compare.UNKNOWN else compare.shown_value(name, value, (of_run, of_baseline))
            for value in (of_run, of_baseline)
        ]
        return f"{name} differs: {values[0]}; in the baseline {values[1]}; --allow {name} compares them"
    read = {key for value in (cell, baseline) for key in value.files if key.startswith("data.")}
    for name in sorted(read):
        if cell.files.get(name) != baseline.files.get(name) and not compare.is_allowed(name, allowed):
            return f"{name}: the runs have read other bytes"
    return None
