"""Runs of other programs as rows of a report: `titan report NAME --with FILE...`.

A log does not say what its run was trained on. What a user states in a YAML file beside it (`Statement`) decides whether
its numbers are compared with those of the baseline.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import as_typed, counted
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import COUNT, LINE, Interval
from titan_hydra.experiments.runs.find import is_run
from titan_hydra.experiments.runs.rundir import State

from .band import band
from .cells import Mean, ReportCell
from .columns import MetricColumn
from .foreign_logs import ForeignLog, read_foreign
from .row import NONE, ReportRow, speed_of
from .stated import read_keys

LEARNED = ("data", "global_batch", "seq_len")  # what must be stated, and equal, where losses are compared
PLACED = ("gpus", "device")  # what must be known, and equal, besides these where tokens/s are compared
UNKNOWN = "its optimizer, schedule, precision, initial weights and order of data are not known"


@dataclass(frozen=True)
class Statement:
    """What a user states about a run of another program, in FILE.yaml beside the file."""

    label: str | None = key(None, "name of the row", LINE)
    data: str | None = key(
        None, "the baseline's `data.path` (without one, its `data.name`) if it had the same data", LINE
    )
    global_batch: int | None = key(None, "samples of a step", COUNT)
    seq_len: int | None = key(None, "tokens of a sample", COUNT)
    parameters: int | None = key(None, "parameters of the whole model", Interval(1, 10**15))
    gpus: int | None = key(None, "number of devices", COUNT)
    device: str | None = key(None, "name of the device, as the report has it", LINE)
    rate_of: str = key(
        "device", "whether tokens/s of the file are those of one device or of all", choices=("device", "job")
    )
    step_column: str | None = key(None, "the column of steps in a .csv or .tsv", LINE)
    loss_column: str | None = key(None, "the column of losses in a .csv or .tsv", LINE)
    rate_column: str | None = key(None, "the column of tokens/s in a .csv or .tsv", LINE)


@dataclass(frozen=True)
class ForeignCell(ReportCell):
    """A run of another program. What its file and its user do not say is None."""

    program: str = ""
    stated: Statement = Statement()
    backs: int = 0  # how often the steps of the file go back
    damage: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the file says itself

    partial = False
    unknown = NONE

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of the file's rows, as those of a run of ours that is not finished."""
        steady = [rate for rate in self.steady if isfinite(rate)]
        quarters = quantiles(steady, n=4) if len(steady) > 1 else None
        mib = self.facts.get("memory_mib")
        return {
            "tokens_per_second": median(steady) if steady else None,
            "tokens_per_second_iqr": quarters and quarters[2] - quarters[0],
            "measured_steps": len(steady) or None,
            "memory_gib": mib / 1024 if mib else max(self.column("memory_reserved_gib").values(), default=None),
        }

    def fact(self, name: str) -> Any:
        """Return a value that the user states or, if he does not, that the file has itself; None if neither does."""
        value = getattr(self.stated, name)
        return self.facts.get(name) if value is None else value

    parameters = property(lambda self: self.fact("parameters"))
    gpus = property(lambda self: self.fact("gpus"))
    device = property(lambda self: self.fact("device"))

    def experiment(self, *without: str) -> str:
        """Return a text that no other cell has, as nobody knows whether the experiment is another cell's."""
        return str(self.directory)

    def places(self, axis: str) -> dict[float, float]:
        """Return the position of each step on an x axis; NaN if it is not known."""
        known = {
            "step": self.column("step"),
            "tokens": self.column("tokens_seen"),
            "seconds": self.column("step_seconds"),
        }[axis]
        return super().places(axis) if known else dict.fromkeys(self.column("step"), nan)

    def on(self, axis: str, steps: Sequence[float]) -> list[float]:
        """Convert steps to coordinates on an axis; NaN if they are not known."""
        coordinates = self.places(axis)
        return [coordinates.get(step, nan) for step in steps]


def foreign_cells(files: Sequence[Path]) -> list[ForeignCell]:
    """Read the runs of other programs in these files. Raises ConfigError with a line for each file that has none, or of
    which the statement has a fault.
    """
    cells: list[ForeignCell] = []
    faults = []
    for file in files:
        try:
            cells += _cells_of(file)
        except ConfigError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{file}: cannot be read: {error.strerror}")
    if faults:
        raise ConfigError("\n".join(faults))
    names = [cell.name for cell in cells]
    for name in {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--with: {names.count(name)} runs are called {name}; give each a label in FILE.yaml")
    return cells


def _cells_of(file: Path) -> list[ForeignCell]:
    """Read the runs in a log of another program; FILE.yaml beside it may state what the log does not tell."""
    if file.is_dir() and is_run(file):
        raise ConfigError(f"{file}: is a run of this program; --with takes those of others")
    beside = Path(f"{file}.yaml")
    stated = read_keys(Statement, beside) if beside.exists() else Statement()
    columns = {column: name for column in ("step", "loss", "rate") if (name := getattr(stated, f"{column}_column"))}
    logs = read_foreign(file, columns)
    stem = file.name if file.is_dir() or ".tfevents." in file.name else file.name.partition(".")[0] or file.name
    return [
        _cell(file, stated, " ".join(filter(None, (stated.label or (stem if not run else ""), run))), log)
        for run, log in logs.items()
    ]


def _cell(file: Path, stated: Statement, name: str, log: ForeignLog) -> ForeignCell:
    """Build the cell of one run in a file, with the columns that can be computed from others."""
    settled = {column: log.settled(column) for column in log.columns}
    columns = {column: values for column, (values, _) in settled.items()}
    held_out = columns.pop("validation_loss", MetricColumn())
    if not any(gib > 0 for gib in columns.get("memory_reserved_gib", MetricColumn()).values()):  # as on a CPU
        columns.pop("memory_reserved_gib", None)
    damaged = [f"{counted(log.damaged_rows, 'row')} without a step"] if log.damaged_rows else []
    cell = ForeignCell(
        f"{name} (foreign)",
        file.absolute(),
        [],
        State("foreign"),
        events=[{"event": "validation", "step": step, "validation_loss": loss} for step, loss in held_out.items()],
        program=log.program,
        stated=stated,
        backs=max(back for _, back in settled.values()),
        damage=(*dict.fromkeys(log.damage), *damaged),
        facts=log.facts,
    )
    _complete(cell, columns)
    cell.columns.update(columns)
    return cell


def _complete(cell: ForeignCell, columns: dict[str, MetricColumn]) -> None:
    """Add the columns that follow from others: steps, rates of a device, seconds, tokens. A loss that is a mean over
    several steps is a mean.
    """
    steps = sorted({step for column in columns.values() for step in column})
    columns["step"] = MetricColumn(array("q", steps), array("d", steps))
    if cell.program == "Megatron-LM" and "loss" in columns:
        steps_with_loss = list(columns["loss"])
        if min((after - before for before, after in pairwise(steps_with_loss)), default=steps_with_loss[0]) > 1:
            columns["loss_mean"] = columns.pop("loss")
    gpus, length, batch = cell.gpus, cell.fact("seq_len"), cell.stated.global_batch
    if cell.stated.rate_of == "job" and (rates := columns.pop("tokens_per_second", None)) and gpus:
        columns["tokens_per_second"] = _mapped(rates, lambda step, rate: rate / gpus)
    samples = columns.pop("samples", MetricColumn())
    if (seconds := columns.get("step_seconds")) and "tokens_per_second" not in columns and gpus and length:
        columns["tokens_per_second"] = _mapped(
            seconds, lambda step, time: (samples.get(step) or batch or nan) * length / time / gpus if time > 0 else nan
        )
    elif batch and length and gpus and not seconds and (rates := columns.get("tokens_per_second")):
        columns["step_seconds"] = _mapped(rates, lambda step, rate: batch * length / gpus / rate if rate > 0 else nan)
    if batch and length:
        columns["tokens_seen"] = _mapped(columns["step"], lambda step, _: float(step * batch * length))


def _mapped(column: MetricColumn, value: Any) -> MetricColumn:
    """Return a column with other values at the same steps, without those that are not finite."""
    known = {step: new for step, old in column.items() if isfinite(new := value(step, old))}
    return MetricColumn(array("q", known), array("d", known.values()))


def foreign_rows(cells: Sequence[ForeignCell], baseline: ReportCell) -> tuple[list[ReportRow], list[str]]:
    """Return a row for each run of another program, and notes that say what was compared, and why the rest was not."""
    rows, notes = [], []
    for cell in cells:
        losses, speed = why_no_losses(cell, baseline), why_no_speed(cell, baseline)
        own_band = None if losses else band(baseline, cell)
        difference = noise = None
        doubt = ""
        if not speed and cell.rate and baseline.rate:
            difference, noise, doubt = speed_of(cell, baseline, 0.0)
        rows.append(
            ReportRow(
                cell=cell,
                label=cell.name,
                baseline=False,
                difference=difference,
                noise=noise,
                doubt=doubt,
                change=None,
                band=own_band,
            )
        )
        notes.append(_note(cell, losses or (None if own_band else "no step is logged by both runs"), speed))
    return rows, notes


def _note(cell: ForeignCell, losses: str | None, speed: str | None) -> str:
    """Return the line that says where a foreign row comes from, and why its losses or rates are not compared."""
    parts = [f"a run of another program ({cell.program}, {cell.directory.name})"]
    parts += [f"its steps go back {counted(cell.backs, 'time')}, and later rows count"] if cell.backs else []
    parts += cell.damage
    if losses and losses == speed:
        parts.append(f"neither losses nor tokens/s are compared: {losses}")
    else:
        parts.append(
            f"losses are not compared: {losses}" if losses else f"losses are compared by what is stated; {UNKNOWN}"
        )
        parts += [f"tokens/s are not compared: {speed}"] if speed else []
    return f"{cell.name}: {'; '.join(parts)}"


def why_no_losses(cell: ForeignCell, baseline: ReportCell) -> str | None:
    """Return why the losses of a run of another program cannot be compared with the baseline's; None if they can."""
    if missing := [name for name in LEARNED if getattr(cell.stated, name) is None]:
        return f"{', '.join(missing)} not stated in {cell.directory.name}.yaml"
    if other := _different(cell, baseline, (*LEARNED, "parameters")):
        return other
    if isinstance(baseline, Mean):
        return "the baseline is a mean over several runs"
    return "they are means over several steps" if not cell.losses and cell.means else None


def why_no_speed(cell: ForeignCell, baseline: ReportCell) -> str | None:
    """Return why the tokens/s of a run of another program cannot be compared with the baseline's; None if they can."""
    names = (*LEARNED, "parameters", *PLACED)
    if missing := [
        name for name in names if cell.fact(name) is None or (name in LEARNED and getattr(cell.stated, name) is None)
    ]:
        return f"{', '.join(missing)} not stated in {cell.directory.name}.yaml"
    return _different(cell, baseline, names)


def _different(cell: ForeignCell, baseline: ReportCell, names: Sequence[str]) -> str | None:
    """Return the first of these facts in which a run of another program differs from the baseline; None if in none."""
    facts = {name: cell.fact(name) if name != "data" else cell.stated.data for name in names}
    theirs = {
        "data": baseline.config.get("data.path") or baseline.config.get("data.name"),
        "global_batch": baseline.config.get("data.global_batch"),
        "seq_len": baseline.config.get("data.seq_len"),
        "parameters": baseline.parameters,
        "gpus": baseline.gpus,
        "device": baseline.device,
    }
    for name in names:
        if facts[name] is None or facts[name] == theirs[name]:
            continue
        if name == "data" and theirs[name] and Path(str(facts[name])).absolute() == Path(str(theirs[name])).absolute():
            continue
        return f"{name} is {as_typed(facts[name])}, and the baseline's {'not known' if theirs[name] is None else as_typed(theirs[name])}"
    return None
