"""The data of a report's diagrams: bar charts and line charts. matplotlib draws them into files, plotly on the page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from operator import methodcaller
from typing import Any

from titan_hydra.experiments.compose.sweep import differing, key_of

from .band import WINDOW, coarser, off_by, tolerances
from .cells import Mean, ReportCell, common, error_of
from .compare import HELD_OUT
from .digits import percent
from .row import ReportRow
from .style import DASHES, LINES, line_style, short
from .table import Report

# Keys whose values may grow with the number of devices. Cells form one scaling curve if all their other keys are equal.
GROWS = ("gpus", "data.global_batch", "parallelism.dp_shard", "parallelism.dp_replicate")
AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}
ROWS = (  # charts that show a column of metrics.jsonl: (name, title, unit, column)
    ("grad_norm", "Gradient norm", "before clipping", "grad_norm"),
    ("lr", "Learning rate", "", "lr"),
    ("rate", "Throughput over time", "tokens/s per device", "tokens_per_second"),
    ("memory_over_time", "Memory over time", "GiB reserved, the largest over all ranks", "memory_reserved_gib"),
    ("step_seconds", "Step times", "seconds", "step_seconds"),
)
POINTS, TOGETHER = 2000, 15_000  # maximum number of points: POINTS for one line, TOGETHER for all lines of a chart


@dataclass(frozen=True)
class Look:
    """How a row's lines are drawn: their colour (a name in style.py) and dashes. The baseline's lines are broad and
    grey.
    """

    colour: str
    dash: str
    baseline: bool = False


@dataclass(frozen=True)
class Curve:
    """One line of a chart: values over steps or devices. `row` is the number of a row of the table, or -1 if the line
    belongs to no row. `low` and `high` bound an area around the line.
    """

    row: int
    label: str
    x: Sequence[float]
    y: list[float | None]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    faint: bool = False  # whether the line is thin and without a label; then another line of the same row has the label


@dataclass(frozen=True)
class Lines:
    """A line chart. `bands` are areas that lines should not leave: (label, steps, limits), from 0 up to the limits."""

    name: str
    title: str
    unit: str
    lines: list[Curve]
    over: str = "step"  # the x axis: step, devices, training FLOPs or parameters
    log: bool = False
    bands: list[tuple[str, list[float], list[float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """The bar of a row of the table. To the right of the bar stand its formatted value and a remark."""

    row: int
    value: float | None
    text: str
    remark: str
    spread: float | None = None  # length of the thin line to each side: half the IQR, or the standard error


@dataclass(frozen=True)
class Bars:
    """A bar chart with a bar for each row of the table, and a line at the value `limit`."""

    name: str
    title: str
    unit: str
    bars: list[Bar]
    limit: float | None = None


def bar_charts(report: Report) -> Iterator[Bars]:
    """Yield the bar charts of throughput and of peak memory that have at least one bar."""
    reference = report.baseline.cell.memory
    speeds, memory = [], []
    for number, row in enumerate(report.rows):
        cell = row.cell
        remarks = [
            row.speed,
            "baseline" if row is report.reference else None,
            "loss left the band" if row.flagged else None,
        ]
        spread = error_of(cell.of("rate")) if isinstance(cell, Mean) else cell.iqr and cell.iqr / 2
        speeds.append(Bar(number, cell.rate, row.rate, ", ".join(filter(None, remarks)), spread))
        change = percent(cell.memory / reference - 1) if cell.memory and reference and not row.baseline else ""
        memory.append(Bar(number, cell.memory, cell.unknown if cell.memory is None else f"{cell.memory:.1f}", change))
    if any(bar.value is not None and isfinite(bar.value) for bar in speeds):
        spreads = "thin lines: " + ("standard errors" if report.over else "half the IQR to each side")
        unit = "tokens/s per device" + (f" ({spreads})" if any(bar.spread for bar in speeds) else "")
        yield Bars("throughput", "Throughput", unit, speeds)
    if any(bar.value is not None and isfinite(bar.value) for bar in memory):
        limits = {row.cell.config.get("cluster.device_memory_gib") for row in report.rows} - {None}
        yield Bars(
            "memory",
            "Peak memory",
            "GiB reserved, the largest over all ranks",
            memory,
            limits.pop() if len(limits) == 1 else None,
        )


def curves(report: Report) -> Iterator[Lines]:
    """Yield all line charts, even those without lines. The charts of losses and of their distances from the baseline
    come first. A row has a line if it has at least two values and has not failed.
    """
    learned = [difference.key for difference in report.found if difference.learning]
    unit = "nats per token" + (f"; not all comparable: {', '.join(learned[:3])}" if learned else "")
    yield lines_of(report, "loss", "Loss", unit, lambda cell: cell.means)
    yield distances(report)
    yield both_losses(report)
    yield from sizes(report)
    for name, title, unit, key in ROWS:
        # the first row is left out of times and memory, as they include the start-up
        first = 0 if key in ("lr", "grad_norm") else 1
        yield lines_of(report, name, title, unit, methodcaller("column", key, first))
    yield scaling(report)


def drawn(report: Report) -> list[Lines]:
    """Return the line charts that have at least one line."""
    return [chart for chart in curves(report) if chart.lines]


def lines_of(
    report: Report, name: str, title: str, unit: str, values: Callable[[ReportCell], Mapping[int, float]]
) -> Lines:
    """Chart `values` over steps, with a line for each row that has at least two finite values and has not failed."""
    lines = []
    for number, row in enumerate(report.rows):
        if row.cell.state.failure:
            continue
        points = dict(thin([(step, value) for step, value in values(row.cell).items() if isfinite(value)], report))
        if len(points) < 2:
            continue
        errors = row.cell.errors if name == "loss" and isinstance(row.cell, Mean) else {}
        low = [loss - errors.get(step, 0) for step, loss in points.items()] if errors else []
        high = [loss + errors.get(step, 0) for step, loss in points.items()] if errors else []
        lines.append(
            Curve(row=number, label=_label(report, row), x=list(points), y=list(points.values()), low=low, high=high)
        )
    return Lines(name, title, unit, lines)


def _label(report: Report, row: ReportRow) -> str:
    return f"{row.label} (baseline)" if row is report.reference else row.label


def both_losses(report: Report) -> Lines:
    """Chart the held-out loss of each row and, as a thin line, its training loss."""
    chart = lines_of(
        report,
        "validation",
        "Held-out and training loss",
        f"nats per token; thin: training{_other_samples(report)}",
        lambda cell: cell.validation,
    )
    rows = {line.row for line in chart.lines}
    training = lines_of(report, "training", "", "", lambda cell: cell.means).lines
    return replace(chart, lines=[*(replace(line, faint=True) for line in training if line.row in rows), *chart.lines])


def sizes(report: Report) -> Iterator[Lines]:
    """Yield charts of the last held-out losses over training FLOPs, and over parameters, with a point for each row. A
    chart is empty if all rows have the same FLOPs, or the same parameters.
    """
    for name, title, over, of in (
        (
            "compute",
            "Held-out loss against compute",
            "training FLOPs",
            lambda cell: (cell.flops or 0) * (cell.tokens or 0),
        ),
        ("parameters", "Held-out loss against parameters", "parameters", lambda cell: cell.parameters or 0),
    ):
        points = [
            Curve(number, _label(report, row), [size], [row.cell.held_out])
            for number, row in enumerate(report.rows)
            if (size := of(row.cell)) and row.cell.held_out is not None and isfinite(row.cell.held_out)
        ]
        several = len({point.x[0] for point in points}) > 1
        yield Lines(name, title, f"nats per token{_other_samples(report)}", points if several else [], over)


def _other_samples(report: Report) -> str:
    return "; not all over the same samples" if any(difference.key in HELD_OUT for difference in report.found) else ""


def looks(report: Report) -> list[Look]:
    """Return how the lines of each row are drawn. In a sweep over several keys, the key with the most values determines
    the colour, and the other keys the dashes. This requires enough colours and dashes, and rows for at least half of
    the combinations. Otherwise neighbouring rows differ in colour and dashes, and the baseline is broad and grey.
    """
    with_overrides = len(report.own) == len(report.rows)  # rows of other programs have none
    by_key = _looks_by_key([row.cell.overrides for row in report.rows]) if with_overrides else None
    return by_key or [Look(*line_style(number), row is report.reference) for number, row in enumerate(report.rows)]


def _looks_by_key(overrides: list[list[str]]) -> list[Look] | None:
    """Return how the lines of cells with these overrides are drawn if their keys determine it, else None."""
    # an override stands for its value; a cell without an override of a key has the value None
    cells = [{key_of(override): override for override in of_cell} for of_cell in differing(overrides)]
    values = {key: list(dict.fromkeys(cell.get(key) for cell in cells)) for cell in cells for key in cell}
    # a key with another value in each cell groups no cells
    keys = [key for key in values if len(values[key]) < len(cells)]
    if len(keys) < 2:
        return None
    coloured, *dashed = sorted(keys, key=lambda key: -len(values[key]))
    colours = values[coloured]
    rests = [tuple(cell.get(key) for key in dashed) for cell in cells]
    dashes = list(dict.fromkeys(rests))
    if len(colours) > len(LINES) or len(dashes) > len(DASHES) or len(colours) * len(dashes) > 2 * len(cells):
        return None
    return [
        Look(LINES[colours.index(cell.get(coloured))], DASHES[dashes.index(rest)])
        for cell, rest in zip(cells, rests, strict=True)
    ]


def distances(report: Report) -> Lines:
    """Chart how far the loss of each row is from the baseline's loss. The charted values are the mean relative
    differences that decide whether the row is in the band. Also chart the bands, one for each number format.
    """
    reference, lines, bands = report.baseline.cell.losses, [], {}
    for number, row in enumerate(report.rows):
        if row.band is None or row.band.compared < 2:
            continue
        steps = sorted(reference.keys() & row.cell.losses.keys())
        base = [reference[step] for step in steps]
        off = [abs(share) for share in off_by(base, [row.cell.losses[step] for step in steps])]
        most = max((share for share in off if isfinite(share)), default=0.0)
        distance = f"left at {row.band.departure}"
        if row.band.inside:
            distance = f"at most {most:.1e}" if most else "the same bits"
        lines.append(
            Curve(
                number,
                f"{row.label}: {distance}",
                thin(steps, report),
                [share if share and isfinite(share) else None for share in thin(off, report)],
            )
        )
        precision = coarser(report.baseline.cell, row.cell)
        limits = thin(tolerances(base, precision), report)
        bands.setdefault(precision, (f"the baseline's band ({precision})", thin(steps, report), limits))
    return Lines(
        "difference",
        "Loss against the baseline's",
        f"difference relative to the loss, means over {WINDOW} rows",
        lines,
        log=True,
        bands=list(bands.values()),
    )


def thin(values: list[Any], report: Report) -> list[Any]:
    """Keep at most POINTS values of a line, and at most TOGETHER values of all lines of a chart. The values are evenly
    spaced, and always include the first and the last.
    """
    every = -(-len(values) // max(min(POINTS, TOGETHER // len(report.rows)), 2))
    return values if every < 2 else values[:-1][::every] + values[-1:]


def scaling(report: Report) -> Lines:
    """Chart the tokens per second of all devices over the number of devices. A label ends with the scaling efficiency:
    the rate on the largest number of devices as a fraction of ideal scaling.
    """
    rows_by_experiment: dict[str, list[int]] = {}
    for number, row in enumerate(report.rows):
        if row.cell.rate and row.cell.gpus:
            rows_by_experiment.setdefault(row.cell.experiment(*GROWS), []).append(number)
    lines = []
    for curve in rows_by_experiment.values():
        rows = sorted((report.rows[number] for number in curve), key=lambda row: row.cell.gpus)
        devices, totals = [row.cell.gpus for row in rows], [row.cell.rate * row.cell.gpus for row in rows]
        if len(set(devices)) < 2:
            continue
        ideal = [totals[0] * count / devices[0] for count in devices]
        name = short(" ".join(common([row.label for row in rows])) or rows[0].label, 26)
        lines += [
            Curve(curve[0], f"{name}, {_kind(rows)}: {totals[-1] / ideal[-1]:.0%}", devices, totals),
            Curve(-1, "ideal", devices, ideal),
        ]
    return Lines("scaling", "Scaling", "tokens/s of all devices", lines, over="devices", log=True)


def _kind(curve: list[ReportRow]) -> str:
    """Return the kind of scaling: strong (the same global batch), weak (the same batch per device), or mixed."""
    if len({row.cell.config.get("data.global_batch") for row in curve}) == 1:
        return "strong"
    shares = {(row.cell.config.get("data.global_batch") or 0) / row.cell.gpus for row in curve}
    return "weak" if len(shares) == 1 else "mixed"
