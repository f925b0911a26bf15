"""The table of a report: a row for each cell with the columns of the TorchTitan paper, the values that all cells share,
and notes.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.text import Column
from titan_hydra.core.job.config.fault import did_you_mean, quoted, suggest
from titan_hydra.experiments.runs.find import Selection

from . import compare
from .cells import FEW, Mean, ReportCell, averaged, labels
from .compare import Difference
from .digits import percent
from .row import (
    COLUMNS,
    FEW_STEPS,
    NOISE,
    NONE,
    ONE_RUN,
    PREDICTED,
    SHARED,
    ReportRow,
    against,
    objective_columns,
    task_columns,
)

DRAWN = 100  # maximum number of rows in a chart: readers cannot distinguish more lines, and browsers cannot draw them
FOREIGN = "foreign"  # the state of a run of another program (--with)
SLOW = 0.2  # a note is added if a run is slower than predicted by more than this fraction
# columns that become part of the caption if all cells have the same value
ALIKE = ("parameters", "FLOPs of a token", "tokens seen", "GPUs", "commit", "torch", "device")


@dataclass(frozen=True)
class Section:
    """An additional part of a report: a table with notes. `document` is what --json prints under the section's name."""

    name: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]
    document: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The data from which the table, the page and the plots are made."""

    name: str
    rows: list[ReportRow]
    repeats: list[ReportCell]
    found: list[Difference]
    allowed: set[str]
    selection: Selection
    over: str | None = None  # the key that --over names; rows are means over the values of this key
    # with --over: a text that counts the cells that have not started (and have no row), and those that still run
    waiting: str = ""
    section: Section | None = None  # the results of a search, if a search drew the cells
    remarks: tuple[str, ...] = ()  # notes about rows of other programs

    @property
    def own(self) -> list[ReportRow]:
        """The rows of runs of this program, which stand first."""
        return [row for row in self.rows if row.cell.state.kind != FOREIGN]

    @property
    def baseline(self) -> ReportRow:
        (row,) = [row for row in self.rows if row.baseline]
        return row

    @property
    def reference(self) -> ReportRow | None:
        """The baseline's row; None if the report has no other row."""
        return self.baseline if len(self.rows) > 1 else None

    @property
    def drawn(self) -> "Report":
        """The part of the report that charts show: the first rows and the baseline's row, at most DRAWN rows in all."""
        first = self.rows[:DRAWN]
        return replace(self, rows=first if any(row.baseline for row in first) else [self.baseline, *first[:-1]])

    @property
    def left_out(self) -> str:
        """A sentence about the rows that charts do not show; "" if charts show all rows."""
        if len(self.rows) <= DRAWN:
            return ""
        return f"the diagrams show {DRAWN} of {len(self.rows)} rows: --over KEY averages those that differ in one key, as seed"

    @cached_property
    def columns(self) -> list[Column[ReportRow]]:
        """The columns of the table: all that have a value in at least one row and are not in `shared`. Goodput is left
        out if every run was started only once.
        """
        again = any(cell.state.attempt > 1 for row in self.rows for cell in row.cell.single)
        left_out = {*self.shared, *([] if again else ["goodput"])}
        return [
            column
            for column in self.every
            if any(column.text(row) is not None for row in self.rows) and column.title not in left_out
        ]

    @property
    def every(self) -> tuple[Column[ReportRow], ...]:
        """All columns, including those without any value."""
        predicted = PREDICTED if any(row.prediction for row in self.rows) else ()
        return (*COLUMNS, *objective_columns(self.rows), *task_columns(self.rows), *predicted)

    @cached_property
    def varied(self) -> dict[str, list[Any]]:
        """For each key or group that the cells vary on purpose, its value in each row."""
        others = [None] * (len(self.rows) - len(self.own))
        return {key: [*values, *others] for key, values in compare.varied([row.cell for row in self.own]).items()}

    @cached_property
    def shared(self) -> dict[str, str]:
        """{title: value} for each column in ALIKE whose value is the same in all rows that have one."""
        alike = [column for column in COLUMNS if column.title in ALIKE]
        texts = {column.title: {column.text(row) for row in self.rows} - {None} for column in alike}
        return {title: values.pop() for title, values in texts.items() if len(values) == 1}

    @property
    def caption(self) -> str:
        """The values that all cells share: model, ranks, device, torch, commit."""
        models = {row.cell.config.get("model.name") for row in self.rows} - {None}
        parts = [*models] if len(models) == 1 else []
        for title, form in (("GPUs", "{} ranks"), ("device", "{}"), ("torch", "torch {}"), ("commit", "commit {}")):
            if title in self.shared:
                parts.append(
                    "1 rank" if (title, self.shared[title]) == ("GPUs", "1") else form.format(self.shared[title])
                )
        return ", ".join(parts)

    @property
    def command(self) -> str:
        """The command line that started the sweep; for runs without a sweep, the command line of this report."""
        sweep = self.selection.sweep
        if not sweep:
            return f"titan report {quoted([self.name])}"
        return f"{'titan' if sweep['command'][:1] == ['plan'] else 'python launch.py'} {quoted(sweep['command'])}"

    @property
    def origin(self) -> str:
        """A line that names the report's source. Figures contain it, as they may be shown without the report."""
        return "  \N{MIDDLE DOT}  ".join(filter(None, (self.name, self.caption, self.command)))

    @cached_property
    def texts(self) -> list[list[str]]:
        """The texts of the table, row by row."""
        return [[column.text(row) or NONE for column in self.columns] for row in self.rows]

    @cached_property
    def notes(self) -> list[str]:
        """The notes below the table."""
        counted = [self.waiting] if self.waiting else []
        return [
            *counted,
            *self._states(),
            *self._noise(),
            *self._bands(),
            *self._drift(),
            *self._slow(),
            *self._stragglers(),
            *self._mixed(),
            *self._forced(),
            *self.remarks,
        ]

    def _slow(self) -> list[str]:
        return [
            f"{row.label}: {-row.to_prediction:.0%} slower than predicted for hardware={row.prediction.job.hardware.name}"
            for row in self.rows
            if row.to_prediction is not None and row.to_prediction < -SLOW
        ]

    def _stragglers(self) -> list[str]:
        return [
            f"{row.label}: {slow}"
            for row in self.rows
            for run in row.cell.single
            if (slow := run.straggler) is not None
        ]

    def _states(self) -> list[str]:
        """Return notes about rows that are not done, that failed, that are damaged, or whose layout changed."""
        notes = []
        for row in self.rows:
            cell, steps = row.cell, row.cell.config.get("steps")
            if isinstance(cell, Mean):
                notes += [
                    f"{row.label}: {self.over}={value}: {member.word}"
                    + (", and left out" if member.rate is None else " so far")
                    for value, member in cell.members.items()
                    if not member.done
                ]
            elif cell.partial:
                notes.append(
                    f"* {row.label}: {cell.word} at step {cell.step} of {steps}; over {cell.measured} logged rows so far"
                )
            elif cell.state.failure:
                notes.append(f"{row.label}: {cell.word} after step {cell.step}: {cell.state.failure.line}")
            elif cell.state.damage:
                notes.append(f"{row.label}: damaged: {cell.state.damage}")
            if not isinstance(cell, Mean) and len(cell.stretches) > 1:
                notes.append(
                    f"{row.label}: its layout changed, and its rates are those of the last one: {'; '.join(map(str, cell.stretches))}"
                )
            if cell.unreadable:
                notes.append(f"{row.label}: cannot be read, and left out: {', '.join(cell.unreadable)}")
        return notes

    def _noise(self) -> list[str]:
        """Return the explanation of each mark of doubt that a row carries, and notes about machines that were shared."""
        notes, doubts = [], {row.doubt for row in self.rows}
        if NOISE in doubts:
            noise = "twice a mean's standard error" if self.over else "the larger of the two IQRs"
            notes.append(f"({NOISE}): a difference smaller than {noise} is not significant")
        alone = any(row.change and row.change[1] is None for row in self.rows)
        if ONE_RUN in doubts or alone:
            notes.append(f"({ONE_RUN}): a difference that rests on one run of a row has no error, and may be noise")
        if FEW_STEPS in doubts:
            notes.append(f"({FEW_STEPS}): fewer than {FEW} steps were measured, too few for a reliable rate")
        if shared := [row for row in self.rows if row.cell.beside]:
            notes.append(
                f"{self._whose(shared)}: ran beside other runs on one machine ({SHARED}), whose cores, memory and power they "
                "shared; compare their speeds with those of runs alone only after a run alone"
            )
        busy = [row for row in self.rows if row.cell.busy]
        loads = [run.load for row in busy for run in row.cell.single if run.busy]
        if busy:
            most = max(max(load.get("start", 0), load.get("end", 0)) for load in loads)
            notes.append(
                f"{self._whose(busy)}: other programs used the machine too (load up to {most:.1f} on {loads[0]['cores']:.0f} cores)"
            )
        return notes

    def _whose(self, rows: list[ReportRow]) -> str:
        if 1 < len(rows) == len(self.rows):
            return f"all {len(rows)} cells"
        return ", ".join(row.label for row in rows)

    def _bands(self) -> list[str]:
        return [
            f"{row.label}: the loss left the baseline's band at {row.band.departure}; whatever its speed, it does not learn the same"
            for row in self.rows
            if row.flagged
        ]

    def _drift(self) -> list[str]:
        """Return how far the repeated baseline is from the first: differences of this size may come from the nodes."""
        reference, notes = self.baseline.cell.rate, []
        for cell in self.repeats:
            if cell.rate and reference:
                drift = percent(cell.rate / reference - 1)
                notes.append(
                    f"baseline again at the end: {drift}; a difference of this size may come from the nodes alone"
                )
            else:
                notes.append(f"baseline again at the end: {cell.word}")
        return notes

    def _forced(self) -> list[str]:
        forced = [row.label for row in self.rows if row.cell.config.get("debug.balance_experts")]
        return [f"experts are balanced by force, so nothing was learned: {', '.join(forced)}"] if forced else []

    def _mixed(self) -> list[str]:
        """Return a note for each key in which rows differ, with the comparisons that this excludes."""
        notes = []
        for difference in self.found:
            lost, held_out = [], difference.key in compare.HELD_OUT
            if difference.work and not compare.is_allowed(difference.key, self.allowed):
                lost.append("no difference in tokens/s")
            if difference.learning:
                lost.append("losses have no band" if self.over else "losses are not compared")
            if held_out:
                lost.append("held-out losses are not compared")
            why = " (on purpose)" if difference.purpose else "" if held_out else " (allowed)"
            # with --over, the names of the rows already show what the sweep varies
            values = "" if self.over and difference.purpose else difference.shown()
            if lost or not difference.purpose:
                notes.append(": ".join(filter(None, (f"{difference.key} differs{why}", values, ", ".join(lost)))))
        return notes


def build(
    selection: Selection,
    cells: list[ReportCell],
    baseline: str | None = None,
    allowed: Set[str] = frozenset(),
    over: str | None = None,
) -> Report:
    """Compare the cells of a selection. Raises ConfigError if the selection has no cells, or if the cells differ in a
    key that must be equal and is not in `allowed`.
    """
    repeats = [cell for cell in cells if cell.repeat]
    cells = [cell for cell in cells if not cell.repeat]
    if not cells:
        raise ConfigError(f"{selection.name}: no runs")
    if over and not any(over in cell.config for cell in cells):
        close = suggest(over, (key for cell in cells for key in cell.config))
        raise ConfigError(f"--over {over}: no cell has such a key" + did_you_mean(close))
    sweep = selection.manifest is not None
    swept = compare.swept_keys([cell.overrides for cell in cells]) if sweep else set()
    known = [
        (cell, label)
        for cell, label in zip(cells, labels(cells, sweep), strict=True)
        if cell.rate is not None or cell.loss is not None
    ]
    differing = compare.differences([cell for cell, _ in known], [label for _, label in known], swept)
    allowed = {*allowed, *([over] if over else [])}
    compare.refuse(differing, allowed)
    of_sweep, waiting = selection.baseline, ""
    if over:
        cells, waiting, missing = begun_cells(cells)
        if baseline in missing:
            raise ConfigError(f"--baseline {baseline}: has not started")
        of_sweep = None if of_sweep in missing else of_sweep
        cells, differing = averaged(cells, over), [difference for difference in differing if difference.key != over]
    shown = labels(cells, sweep)
    chosen = choose_baseline(cells, shown, baseline or of_sweep)
    drift = max((abs(cell.rate / chosen.rate - 1) for cell in repeats if cell.rate and chosen.rate), default=0.0)
    rows = [against(cell, label, chosen, allowed, drift) for cell, label in zip(cells, shown, strict=True)]
    return Report(
        name=selection.name,
        rows=rows,
        repeats=repeats,
        found=differing,
        allowed=allowed,
        selection=selection,
        over=over,
        waiting=waiting,
    )


def begun_cells(cells: list[ReportCell]) -> tuple[list[ReportCell], str, set[str]]:
    """Return the cells that have started, or all cells if none has started. Also return a line with the numbers of
    cells that have not started and of cells that still run, and the names of the cells that have not started.
    """
    missing = {cell.name for cell in cells if cell.waiting} if not all(cell.waiting for cell in cells) else set()
    running = sum(cell.state.kind == "running" for cell in cells)
    parts = [f"not started, and left out: {len(missing)} of {len(cells)} cells"] if missing else []
    parts += [f"still running: {running}"] if running else []
    return [cell for cell in cells if cell.name not in missing], "; ".join(parts), missing


def choose_baseline(cells: list[ReportCell], shown: list[str], name: str | None) -> ReportCell:
    """Return the cell with this name, label or hash, or the `Mean` that contains it; the first cell if `name` is None."""
    if name is None:
        return cells[0]
    for cell, label in zip(cells, shown, strict=True):
        for candidate in (cell, *cell.single):
            if name in (candidate.name, label, candidate.directory.name, candidate.directory.name.rpartition("-")[2]):
                return cell
    names = [cell.name for cell in cells]
    hint = did_you_mean(suggest(name, [*names, *shown]), otherwise=f"; cells: {', '.join(map(repr, names))}")
    raise ConfigError(f"--baseline {name}: no such cell{hint}")
