"""The rows of the report's table, each a cell that is compared with the baseline, and the table's columns."""

from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Any

from titan_hydra.core.base.text import Column
from titan_hydra.core.job.run.records import beside_loss

from . import compare
from .band import Band, band
from .cells import FEW, Mean, ReportCell, error_of, mean
from .digits import MINUS, digits_of, percent, rate, truncated_percent, with_error

NONE = "\N{EN DASH}"
# reasons why a difference from the baseline is not reliable
FEW_STEPS, NOISE, ONE_RUN, SHARED = "few steps", "noise", "one run", "shared"


@dataclass(frozen=True)
class ReportRow:
    """A row of the table: one cell, compared with the baseline."""

    cell: ReportCell
    label: str
    baseline: bool = False
    difference: float | None = None  # relative difference between the tokens/s of the cell and of the baseline
    noise: float | None = None  # a relative difference up to this value cannot be distinguished from noise
    doubt: str = ""  # FEW_STEPS, NOISE, ONE_RUN or SHARED; "" if the difference is reliable
    # only for a `Mean`: the difference between its loss and the baseline's loss, with the standard error
    change: tuple[float, float | None] | None = None
    band: Band | None = None
    prediction: Any = None  # a Prediction of the planner, if an instrument has added it

    @property
    def predicted_rate(self) -> float | None:
        return self.prediction.speed.tokens_per_second if self.prediction and self.prediction.speed else None

    @property
    def predicted_gib(self) -> float | None:
        return self.prediction.peak.gib if self.prediction else None

    @property
    def to_prediction(self) -> float | None:
        """The relative difference between the measured and the predicted tokens/s."""
        return self.cell.rate / self.predicted_rate - 1 if self.cell.rate and self.predicted_rate else None

    @property
    def rate(self) -> str:
        """Tokens/s, marked with * if the run is not finished; if the run has no rate, its state."""
        if isinstance(self.cell, Mean):
            return with_error(self.cell.rate, error_of(self.cell.of("rate")), 0) or self.cell.word
        text = rate(self.cell.rate, self.cell.iqr)
        return self.cell.unknown if text is None else f"{text}*" if self.cell.partial else text

    @property
    def speed(self) -> str | None:
        """The difference in tokens/s, with as many digits as the noise justifies, followed by `doubt` in parentheses."""
        text = percent(self.difference, digits_of(self.noise))
        return f"{text} ({self.doubt})" if text and self.doubt else text

    @property
    def flagged(self) -> bool:
        """Whether the cell's loss left the baseline's band."""
        return self.band is not None and not self.band.inside

    @property
    def verdict(self) -> str | None:
        if self.baseline:
            return "baseline" if self.cell.losses else None
        return str(self.band) if self.band else None

    def loss(self, name: str) -> str | None:
        """Format the loss in attribute `name` of the cell; the loss of a `Mean` gets its standard error."""
        value = getattr(self.cell, name)
        if isinstance(self.cell, Mean):
            return with_error(value, error_of(self.cell.of(name)), 4)
        return None if value is None else f"{value:.4f}"


COLUMNS: tuple[Column[ReportRow], ...] = (  # a column without a text in any row is left out
    Column("technique", "technique", lambda row: row.label, word=True),
    Column("runs", "runs", lambda row: len(row.cell.members) or None),
    Column("tokens/s per device", "tokens_per_second", lambda row: row.cell.rate, lambda row: row.rate),
    Column("IQR", "tokens_per_second_iqr", lambda row: row.cell.iqr, lambda row: rate(row.cell.iqr, row.cell.iqr)),
    Column("steps", "measured_steps", lambda row: row.cell.measured),
    Column("difference", "difference_percent", lambda row: truncated_percent(row.difference), lambda row: row.speed),
    Column("goodput", "goodput", lambda row: row.cell.goodput, ".1%"),
    Column("peak GiB", "memory_gib", lambda row: row.cell.memory, ".1f"),
    Column("held-out loss", "held_out_loss", lambda row: row.cell.held_out, lambda row: row.loss("held_out")),
    Column(
        "lowest held out",
        "lowest_held_out_loss",
        lambda row: row.cell.lowest and row.cell.lowest[0],
        lambda row: _lowest(row),
    ),
    Column("mean loss", "mean_loss", lambda row: row.cell.loss, lambda row: row.loss("loss")),
    Column("to the baseline", "loss_difference", lambda row: row.change and row.change[0], lambda row: _change(row)),
    Column("loss in band", "loss_in_band", lambda row: row.verdict, word=True),
    Column("MFU", "mfu", lambda row: row.cell.mfu, ".1%"),
    Column("parameters", "parameters", lambda row: row.cell.parameters, ","),
    Column("FLOPs of a token", "flops_per_token", lambda row: row.cell.flops, ".3g"),
    Column("tokens seen", "tokens", lambda row: row.cell.tokens, ","),
    Column("GPUs", "gpus", lambda row: row.cell.gpus),
    Column("commit", "commit", lambda row: row.cell.commit, word=True),
    Column("torch", "torch", lambda row: row.cell.version("torch"), word=True),
    Column("device", "device", lambda row: row.cell.device, word=True),
)
PREDICTED: tuple[Column[ReportRow], ...] = (  # further columns of --predicted
    Column("predicted tokens/s", "predicted_tokens_per_second", lambda row: row.predicted_rate, ",.0f"),
    Column(
        "to prediction",
        "to_prediction_percent",
        lambda row: truncated_percent(row.to_prediction),
        lambda row: percent(row.to_prediction),
    ),
    Column("predicted GiB", "predicted_memory_gib", lambda row: row.predicted_gib, ".1f"),
)


def against(cell: ReportCell, label: str, baseline: ReportCell, allowed: set[str], drift: float) -> ReportRow:
    """Build a cell's row. The row has the differences from the baseline, unless a key that must be equal differs.
    `drift` is how much the baseline's rate changed in its second run, as a fraction.
    """
    if cell is baseline:
        return ReportRow(cell, label, baseline=True)
    work = [key for key in compare.WORK if not compare.is_allowed(key, allowed)]
    difference, noise, doubt = None, None, ""
    if cell.rate and baseline.rate and compare.same(cell, baseline, work):
        difference, noise, doubt = speed_of(cell, baseline, drift)
    comparable = (
        not cell.lost
        and cell.members.keys() == baseline.members.keys()
        and compare.same(cell, baseline, compare.LEARNING)
    )
    own_band = band(baseline, cell) if comparable else None
    return ReportRow(
        cell=cell,
        label=label,
        baseline=False,
        difference=difference,
        noise=noise,
        doubt=doubt,
        change=loss_change(cell, baseline),
        band=own_band,
    )


def speed_of(cell: ReportCell, baseline: ReportCell, drift: float) -> tuple[float, float | None, str]:
    """Return the relative difference between the tokens/s of two cells, its noise, and why it is not reliable."""
    difference = cell.rate / baseline.rate - 1
    sizes = [abs(side.noise / baseline.rate) for side in (cell, baseline) if side.noise is not None]
    noise = max(*sizes, drift) if len(sizes) == 2 else None
    doubt = ""
    if any(side.measured is not None and side.measured < FEW for side in (cell, baseline)):
        doubt = FEW_STEPS
    elif any(isinstance(side, Mean) and len(side.of("rate")) < 2 for side in (cell, baseline)):
        doubt = ONE_RUN
    elif noise is not None and abs(difference) < noise:
        doubt = NOISE
    elif cell.beside or baseline.beside:
        doubt = SHARED
    return difference, noise, doubt


def loss_change(cell: ReportCell, baseline: ReportCell) -> tuple[float, float | None] | None:
    """Return the difference between the losses of two `Mean` cells, with its standard error. None for other cells.

    The compared loss is the held-out loss if all members have one over the same samples. Values that both cells
    have (the same seeds) are paired, and others are left out; without any, the means are compared.
    """
    if not (isinstance(cell, Mean) and isinstance(baseline, Mean)):
        return None
    every = [*cell.members.values(), *baseline.members.values()]
    alike = all(one.held_out is not None and compare.same(one, every[0], compare.HELD_OUT) for one in every)
    name = "held_out" if alike else "loss"
    a, b = (
        {value: loss for value, one in side.members.items() if (loss := getattr(one, name)) is not None}
        for side in (cell, baseline)
    )
    if not a or not b:
        return None
    if common := a.keys() & b.keys():
        pairs = [a[value] - b[value] for value in a if value in common]
        return mean(pairs), error_of(pairs)
    errors = [error_of(list(side.values())) for side in (a, b)]
    return mean(list(a.values())) - mean(list(b.values())), None if None in errors else hypot(*errors)


def _lowest(row: ReportRow) -> str | None:
    """Format the lowest held-out loss with its step, and whether its checkpoint was kept; None if the last held-out
    loss is the lowest.
    """
    if row.cell.lowest is None or row.cell.lowest[1] == max(row.cell.validation):
        return None
    kept = ", kept" if row.cell.result.get("best_checkpoint") else ""
    return f"{row.cell.lowest[0]:.4f} (step {row.cell.lowest[1]}{kept})"


def task_columns(rows: list[ReportRow]) -> tuple[Column[ReportRow], ...]:
    """Return columns with the newest results of each evaluation task (validation.tasks) for which a run has results."""
    names = {name: None for row in rows for run in row.cell.single for name in run.tasks}
    columns = []
    for task in names:
        for metric in ("acc", "acc_norm", "perplexity"):
            value, text = partial(_task, task, metric, False), partial(_task, task, metric, True)
            columns.append(Column(f"{task} {metric}", f"{task}_{metric}", value, text))
    return tuple(columns)


def _task(task: str, metric: str, as_text: bool, row: ReportRow) -> Any:
    """Return a result of an evaluation task, averaged over a `Mean`; with `as_text`, formatted with its standard error."""
    results = (run.tasks.get(task, {}).get(metric) for run in row.cell.single)
    values = [value for value in results if value is not None]
    return with_error(mean(values), error_of(values), 4) if as_text else mean(values)


def objective_columns(rows: list[ReportRow]) -> tuple[Column[ReportRow], ...]:
    """Return columns with the numbers that objectives give beside their loss, and with their held-out values."""
    names = {name: None for row in rows for run in row.cell.single for name in _means_beside_loss(run)}
    return tuple(
        Column(name, name.replace("held-out ", "held_out/"), partial(_beside_loss, name), ".4g") for name in names
    )


def _means_beside_loss(cell: ReportCell) -> dict[str, float | None]:
    """Return the columns of a cell's objective by name, each a mean over the last rows as `loss` is, and their newest
    held-out values; {} for a failed run.
    """
    if cell.state.failure:
        return {}
    values: dict[str, float | None] = {
        name: cell.last_mean(column) for name, column in beside_loss(cell.columns).items()
    }
    for event in cell.events:
        if event["event"] == "validation":
            values |= {f"held-out {name}": value for name, value in beside_loss(event).items()}
    return values


def _beside_loss(name: str, row: ReportRow) -> float | None:
    """Return a number of an objective, averaged over a `Mean`."""
    numbers = (_means_beside_loss(run).get(name) for run in row.cell.single)
    return mean([value for value in numbers if value is not None])


def _change(row: ReportRow) -> str | None:
    """Format the change of the loss to the baseline with its error, and mark one that may be noise."""
    if row.change is None:
        return None
    value, error = row.change
    text = f"{'+' if value >= 0 else MINUS}{with_error(abs(value), error, 4)}"
    if error is None:
        return f"{text} ({ONE_RUN})"
    return f"{text} ({NOISE})" if abs(value) < 2 * error else text
