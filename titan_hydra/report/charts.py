"""The data of a report's diagrams: bars, lines, and the timelines of pipelines. matplotlib draws them into files, plotly on the page."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import methodcaller
from typing import Any

from .band import WINDOW, coarser, off_by, tolerances
from .cells import Mean, ReportCell, common, error_of
from .digits import percent
from .style import short
from .table import Report, ReportRow

# Keys that grow with the number of devices; cells equal in all other keys form one scaling curve.
GROWS = ("gpus", "data.global_batch", "parallelism.dp_shard", "parallelism.dp_replicate")
AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}
ROWS = (  # curves that are a column of metrics.jsonl: name, title, unit, key
    ("grad_norm", "Gradient norm", "before clipping", "grad_norm"), ("lr", "Learning rate", "", "lr"),
    ("rate", "Throughput over time", "tokens/s per device", "tokens_per_second"),
    ("memory_over_time", "Memory over time", "GiB reserved, the largest over all ranks", "memory_reserved_gib"),
    ("step_seconds", "Step times", "seconds", "step_seconds"),
)
POINTS, TOGETHER = 2000, 15_000  # of a line, and of all lines of a diagram; longer lines are thinned


@dataclass(frozen=True)
class Curve:
    """Values over steps (or devices) for one row of the table; `low` and `high` bound an area around it."""

    row: int
    label: str
    x: Sequence[float]
    y: list[float | None]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Lines:
    """A diagram of lines. `bands` are areas (label, steps, limit) in which the lines should stay."""

    name: str
    title: str
    unit: str
    lines: list[Curve]
    over: str = "step"  # or devices
    log: bool = False
    bands: list[tuple[str, list[float], list[float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """One row's bar: its value, half its spread (of the quartiles, or the standard error), its label `text`, and a remark `said`."""

    row: int
    value: float | None
    text: str
    said: str
    spread: float | None = None


@dataclass(frozen=True)
class Bars:
    """A diagram with a bar for each row of the table."""

    name: str
    title: str
    unit: str
    bars: list[Bar]
    limit: float | None = None


def bar_charts(report: Report) -> Iterator[Bars]:
    """Yield the bar charts of throughput and of peak memory, if any row has a value."""
    reference = report.baseline.cell.memory
    speeds, memory = [], []
    for number, row in enumerate(report.rows):
        cell = row.cell
        what = [row.told, "baseline" if row.baseline else None, "loss left the band" if row.flagged else None]
        spread = error_of(cell.of("rate")) if isinstance(cell, Mean) else cell.iqr and cell.iqr / 2
        speeds.append(Bar(number, cell.rate, row.rate, ", ".join(filter(None, what)), spread))
        change = percent(cell.memory / reference - 1) if cell.memory and reference and not row.baseline else ""
        memory.append(Bar(number, cell.memory, cell.word if cell.memory is None else f"{cell.memory:.1f}", change))
    if any(bar.value is not None and isfinite(bar.value) for bar in speeds):
        spreads = "thin lines: " + ("standard errors" if report.over else "half the IQR to each side")
        unit = "tokens/s per device" + (f" ({spreads})" if any(bar.spread for bar in speeds) else "")
        yield Bars("throughput", "Throughput", unit, speeds)
    if any(bar.value is not None and isfinite(bar.value) for bar in memory):
        limits = {row.cell.config.get("cluster.device_memory_gib") for row in report.rows} - {None}
        yield Bars("memory", "Peak memory", "GiB reserved, the largest over all ranks", memory, limits.pop() if len(limits) == 1 else None)


def curves(report: Report) -> Iterator[Lines]:
    """Yield every line chart over steps: losses and their distance from the baseline's first. Charts without lines are included.

    Only rows with at least two values and no failure get a line.
    """
    learned = [difference.key for difference in report.found if difference.learning]
    unit = "nats per token" + (f"; not all comparable: {', '.join(learned[:3])}" if learned else "")
    yield lines_of(report, "loss", "Loss", unit, lambda cell: cell.means)
    yield distances(report)
    yield lines_of(report, "validation", "Held-out loss", "nats per token", lambda cell: cell.validation)
    for name, title, unit, key in ROWS:
        first = 0 if key in ("lr", "grad_norm") else 1  # the first row of a process includes its start-up
        yield lines_of(report, name, title, unit, methodcaller("column", key, first))
    yield scaling(report)


def drawn(report: Report) -> list[Lines]:
    """Return the line charts that have at least one line."""
    return [chart for chart in curves(report) if chart.lines]


def lines_of(report: Report, name: str, title: str, unit: str, values: Callable[[ReportCell], Mapping[int, float]]) -> Lines:
    """Build a line chart with one line for each row that has at least two finite values and has not failed."""
    lines = []
    for number, row in enumerate(report.rows):
        if row.cell.state.failure:
            continue
        found = dict(thin([(step, value) for step, value in values(row.cell).items() if isfinite(value)], report))
        if len(found) < 2:
            continue
        errors = row.cell.errors if name == "loss" and isinstance(row.cell, Mean) else {}
        low, high = ([loss + sign * errors.get(step, 0) for step, loss in found.items()] if errors else [] for sign in (-1, 1))
        lines.append(Curve(number, row.label + (" (baseline)" if row.baseline else ""), list(found), list(found.values()), low, high))
    return Lines(name, title, unit, lines)


def distances(report: Report) -> Lines:
    """Chart the distance of each loss from the baseline's, with the tolerance bands: the same mean relative difference that decides whether
    the loss is in the band.

    One band for each number format; Float8 has the widest.
    """
    reference, lines, bands = report.baseline.cell.losses, [], {}
    for number, row in enumerate(report.rows):
        if row.band is None or row.band.compared < 2:
            continue
        steps = sorted(reference.keys() & row.cell.losses.keys())
        base = [reference[step] for step in steps]
        off = [abs(share) for share in off_by(base, [row.cell.losses[step] for step in steps])]
        most = max((share for share in off if isfinite(share)), default=0.0)
        said = f"at most {most:.1e}" if most else "the same bits"
        lines.append(Curve(number, f"{row.label}: {said if row.band.inside else f'left at {row.band.told}'}", thin(steps, report),
                          [share if share and isfinite(share) else None for share in thin(off, report)]))
        precision = coarser(report.baseline.cell, row.cell)
        limits = thin(tolerances(base, precision), report)
        bands.setdefault(precision, (f"the baseline's band ({precision})", thin(steps, report), limits))
    return Lines("difference", "Loss against the baseline's", f"difference by the loss, means over {WINDOW} rows", lines, log=True,
                 bands=list(bands.values()))


def thin(values: list[Any], report: Report) -> list[Any]:
    """Keep so many values of a long line, evenly spaced, that all lines of a diagram have TOGETHER; always the first and the last."""
    every = -(-len(values) // max(min(POINTS, TOGETHER // len(report.rows)), 2))
    return values if every < 2 else values[:-1][::every] + values[-1:]


def scaling(report: Report) -> Lines:
    """Chart the tokens per second of all devices over their number; each label gives the share of ideal scaling at the end."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(report.rows):
        if row.cell.rate and row.cell.gpus:
            found.setdefault(row.cell.experiment(*GROWS), []).append(number)
    lines = []
    for curve in found.values():
        rows = sorted((report.rows[number] for number in curve), key=lambda row: row.cell.gpus)
        devices, totals = [row.cell.gpus for row in rows], [row.cell.rate * row.cell.gpus for row in rows]
        if len(set(devices)) < 2:
            continue
        ideal = [totals[0] * count / devices[0] for count in devices]
        name = short(" ".join(common([row.label for row in rows])) or rows[0].label, 26)
        lines += [Curve(curve[0], f"{name}, {_kind(rows)}: {totals[-1] / ideal[-1]:.0%}", devices, totals),
                  Curve(-1, "ideal", devices, ideal)]
    return Lines("scaling", "Scaling", "tokens/s of all devices", lines, over="devices", log=True)


def _kind(curve: list[ReportRow]) -> str:
    """Name the kind of scaling: strong keeps the global batch, weak keeps the batch of each device."""
    batches = {row.cell.config.get("data.global_batch") for row in curve}
    shares = {(row.cell.config.get("data.global_batch") or 0) / row.cell.gpus for row in curve}
    return "strong" if len(batches) == 1 else "weak" if len(shares) == 1 else "mixed"
