"""Scaling curves: the tokens per second of all devices over their number, with the line of what would be ideal."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .style import LIGHT, figure, line, name_ends, short
from .table import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What grows with the devices, or says where and under which name a cell ran; cells that agree in all else are one curve.
GROWS = ("gpus", "data.global_batch", "parallelism.dp_shard", "parallelism.dp_replicate")
OUTSIDE = ("name", "notes", "cluster", "launch", "paths", "sweep", "metrics", "profiling")


def series(rows: list[Row]) -> list[list[Row]]:
    """Cells that differ in nothing but the number of data-parallel devices, two numbers at least, ascending."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.cell.rate and row.cell.gpus:
            rest = {key: value for key, value in row.cell.config.items() if key not in GROWS and key.partition(".")[0] not in OUTSIDE}
            found.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    curves = [sorted(curve, key=lambda row: row.cell.gpus) for curve in found.values()]
    return [curve for curve in curves if len({row.cell.gpus for row in curve}) > 1]


def kind(curve: list[Row]) -> str:
    """Strong scaling keeps the global batch, weak scaling what a device has of it."""
    batches = {row.cell.config.get("data.global_batch") for row in curve}
    shares = {row.cell.config.get("data.global_batch", 0) / row.cell.gpus for row in curve}
    return "strong" if len(batches) == 1 else "weak" if len(shares) == 1 else "mixed"


def scaling(report: Report) -> Figure | None:
    """Both axes in powers of two, so that ideal scaling is a straight line; each curve's name says what share of it is left at its end."""
    curves = series(report.rows)
    if not curves:
        return None
    drawn, axes = figure(height=4.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ends, names = [], []
    for number, curve in enumerate(curves):
        devices = [row.cell.gpus for row in curve]
        totals = [row.cell.rate * row.cell.gpus for row in curve]
        ideal = [totals[0] * count / devices[0] for count in devices]
        style = line(number)
        axes.plot(devices, ideal, color=LIGHT["base"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.plot(devices, totals, marker="o", markersize=4.5, linewidth=1.6, zorder=2, **style)
        ends += [(devices[-1], totals[-1])] + ([(devices[-1], ideal[-1])] if number == 0 else [])
        names += [(f"{name_of(curve)}, {kind(curve)}: {totals[-1] / ideal[-1]:.0%}", style["color"])]
        names += [("ideal", LIGHT["soft"])] if number == 0 else []
    counts = sorted({row.cell.gpus for curve in curves for row in curve})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06, y=0.12)
    axes.set_title("Scaling", loc="left")
    axes.set_xlabel("devices", loc="left")
    axes.set_ylabel("tokens/s of all devices")
    name_ends(axes, ends, names, counts[-1] * (counts[-1] / counts[0]) ** 0.04)
    return drawn


def thousands(value: float) -> str:
    """A number of an axis: 820, 66k, 1.05M."""
    return f"{value:.3g}" if value < 1e3 else f"{value / 1e3:.3g}k" if value < 1e6 else f"{value / 1e6:.3g}M"


def name_of(curve: list[Row]) -> str:
    """What the labels of a curve have in common."""
    words = [row.label.split() for row in curve]
    common = [word for word in words[0] if all(word in other for other in words)]
    return short(" ".join(common) or curve[0].label, 26)
