"""The table of a report: a row a cell with the paper's columns, what all cells share beside it, and what must be said under it."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from titan_hydra.config.fault import suggest
from titan_hydra.config.status import ConfigError
from titan_hydra.launch.find import Selection

from . import compare
from .band import Band, band
from .cells import Cell, labels
from .compare import Difference

MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"


@dataclass(frozen=True)
class Row:
    """One cell against the baseline. `why` says why it has no difference or band, "" if it has them."""

    cell: Cell
    label: str
    baseline: bool
    difference: float | None  # of tokens/s to the baseline's, as a fraction
    band: Band | None

    @property
    def rate(self) -> str:
        """Tokens/s, marked if the run is not over; the state where there is none."""
        text = rate(self.cell.rate)
        return self.cell.word if text is None else f"{text}*" if self.cell.partial else text

    @property
    def verdict(self) -> str | None:
        if self.baseline:
            return "baseline" if self.cell.losses else None
        return str(self.band) if self.band else None


# Title, machine name (for csv), text of a row, raw value of a row. What is None in every row is left out.
COLUMNS = (
    ("technique", "technique", lambda row: row.label, lambda row: row.label),
    ("tokens/s per device", "tokens_per_second", lambda row: row.rate, lambda row: row.cell.rate),
    ("IQR", "tokens_per_second_iqr", lambda row: rate(row.cell.iqr), lambda row: row.cell.iqr),
    ("steps", "measured_steps", lambda row: _text(row.cell.measured), lambda row: row.cell.measured),
    ("difference", "difference_percent", lambda row: percent(row.difference), lambda row: _cut(row.difference)),
    ("peak GiB", "memory_gib", lambda row: _number(row.cell.memory, ".1f"), lambda row: row.cell.memory),
    ("loss", "final_loss", lambda row: _number(row.cell.final_loss, ".4f"), lambda row: row.cell.final_loss),
    ("loss in band", "loss_in_band", lambda row: row.verdict, lambda row: row.verdict),
    ("MFU", "mfu", lambda row: _number(row.cell.mfu, ".1%"), lambda row: row.cell.mfu),
    ("GPUs", "gpus", lambda row: _text(row.cell.gpus), lambda row: row.cell.gpus),
    ("commit", "commit", lambda row: row.cell.commit, lambda row: row.cell.commit),
    ("torch", "torch", lambda row: row.cell.version("torch"), lambda row: row.cell.version("torch")),
    ("device", "device", lambda row: row.cell.device, lambda row: row.cell.device),
)
ALIKE = ("GPUs", "commit", "torch", "device")  # said once where all cells have the same
WORDS = ("technique", "loss in band", "commit", "torch", "device")  # columns that are aligned left


@dataclass(frozen=True)
class Report:
    """Everything that a table, a page or a plot is made of."""

    name: str
    rows: list[Row]
    repeats: list[Cell]
    found: list[Difference]
    allowed: set[str]
    selection: Selection

    @property
    def baseline(self) -> Row:
        return next(row for row in self.rows if row.baseline)

    @cached_property
    def columns(self) -> list[tuple]:
        """The columns in which some row has something to say."""
        return [column for column in COLUMNS if any(column[2](row) is not None for row in self.rows) and column[0] not in self.shared]

    @cached_property
    def shared(self) -> dict[str, str]:
        """What is the same for all cells that have it, by title of its column."""
        found = {title: {text(row) for row in self.rows} - {None} for title, _, text, _ in COLUMNS if title in ALIKE}
        return {title: values.pop() for title, values in found.items() if len(values) == 1}

    @property
    def caption(self) -> str:
        """What all cells share, in a line."""
        models = {row.cell.config.get("model.name") for row in self.rows} - {None}
        parts = [*models] if len(models) == 1 else []
        for title, said in (("GPUs", "{} ranks"), ("device", "{}"), ("torch", "torch {}"), ("commit", "commit {}")):
            if title in self.shared:
                parts.append("1 rank" if (title, self.shared[title]) == ("GPUs", "1") else said.format(self.shared[title]))
        return ", ".join(parts)

    @cached_property
    def texts(self) -> list[list[str]]:
        """The table's cells as they are shown."""
        return [[text(row) or NONE for _, _, text, _ in self.columns] for row in self.rows]

    @cached_property
    def notes(self) -> list[str]:
        """What must be said under the table."""
        return [*self._states(), *self._bands(), *self._drift(), *self._mixed()]

    def _states(self) -> list[str]:
        notes = []
        for row in self.rows:
            cell, steps = row.cell, row.cell.config.get("steps")
            if cell.partial:
                notes.append(f"* {row.label}: {cell.word} at step {cell.step} of {steps}; over {cell.measured} logged rows so far")
            elif cell.state.failure:
                notes.append(f"{row.label}: {cell.word} after step {cell.step}: {cell.state.failure.line}")
        return notes

    def _bands(self) -> list[str]:
        return [f"{row.label}: the loss left the baseline's band at {row.band.told}; whatever its speed, it does not learn the same"
                for row in self.rows if row.band and not row.band.inside]

    def _drift(self) -> list[str]:
        reference, notes = self.baseline.cell.rate, []
        for cell in self.repeats:
            if cell.rate and reference:
                drift = percent(cell.rate / reference - 1)
                notes.append(f"baseline again at the end: {drift}; differences of this size are noise of the nodes")
            else:
                notes.append(f"baseline again at the end: {cell.word}")
        return notes

    def _mixed(self) -> list[str]:
        notes = []
        for difference in self.found:
            leave = "on purpose" if difference.purpose else "allowed"
            lost = [name for name, without in (
                ("no difference in tokens/s", difference.work and not compare.is_allowed(difference.key, self.allowed)),
                ("losses are not compared", difference.learning)) if without]
            values = "; ".join(f"{value} ({', '.join(of)})" for value, of in difference.values.items())
            if lost or not difference.purpose:
                notes.append(f"{difference.key} differs ({leave}): {values}" + (f": {', '.join(lost)}" if lost else ""))
        return notes


def build(selection: Selection, cells: list[Cell], baseline: str | None = None, allowed: set[str] = frozenset()) -> Report:
    """Compare the cells of a selection. Raises ConfigError where there is nothing to compare, or what may not be."""
    repeats = [cell for cell in cells if cell.repeat]
    cells = [cell for cell in cells if not cell.repeat]
    if not cells:
        raise ConfigError(f"{selection.name}: no runs")
    if all(cell.rate is None and cell.final_loss is None for cell in cells):
        states = ", ".join(f"{cell.name}: {cell.word}" for cell in cells[:6]) + (", ..." if len(cells) > 6 else "")
        raise ConfigError(f"{selection.name}: no cell has numbers yet ({states})")
    shown = labels([cell.name for cell in cells], selection.manifest is not None)
    chosen = choose(cells, shown, baseline or selection.baseline)
    with_numbers = [(cell, label) for cell, label in zip(cells, shown, strict=True) if cell.rate is not None or cell.final_loss is not None]
    swept = compare.swept_keys([cell.overrides for cell in cells]) if selection.manifest else set()
    found = compare.differences(*map(list, zip(*with_numbers, strict=True)), swept)
    compare.refuse(found, allowed)
    rows = [Row(cell, label, cell is chosen, *_against(cell, chosen, allowed)) for cell, label in zip(cells, shown, strict=True)]
    return Report(selection.name, rows, repeats, found, allowed, selection)


def choose(cells: list[Cell], shown: list[str], name: str | None) -> Cell:
    """The baseline: the cell of that name, label or hash; the first without a name."""
    if name is None:
        return cells[0]
    for cell, label in zip(cells, shown, strict=True):
        if name in (cell.name, label, cell.directory.name, cell.directory.name.rpartition("-")[2]):
            return cell
    names = [cell.name for cell in cells]
    close = suggest(name, dict.fromkeys([*names, *shown]))
    hint = f"did you mean {' or '.join(close)}?" if close else f"cells: {', '.join(map(repr, names))}"
    raise ConfigError(f"--baseline {name}: no such cell; {hint}")


def _against(cell: Cell, baseline: Cell, allowed: set[str]) -> tuple[float | None, Band | None]:
    """Difference in tokens/s and the loss's band, where a cell can be compared with the baseline."""
    if cell is baseline:
        return None, None
    work = [key for key in compare.WORK if not compare.is_allowed(key, allowed)]
    difference = cell.rate / baseline.rate - 1 if cell.rate and baseline.rate and compare.same(cell, baseline, work) else None
    comparable = compare.same(cell, baseline, compare.LEARNING) and not cell.state.failure
    return difference, band(baseline, cell) if comparable else None


def rate(value: float | None) -> str | None:
    """Tokens per second: whole, or three digits of what is less than 100."""
    return None if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(fraction: float | None) -> str | None:
    """A difference with its sign, cut after two digits and not rounded: never more than was measured, as the paper does."""
    cut = _cut(fraction)
    return None if cut is None else f"{'+' if cut >= 0 else MINUS}{abs(cut):.2f} %"


def _cut(fraction: float | None) -> float | None:
    return None if fraction is None else math.floor(round(fraction * 1e4, 6)) / 100


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
