"""Draw the diagrams of a report into PNG and SVG files. matplotlib is imported only if something is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import charts, timeline
from .charts import AXES, Bar, Bars, Lines, Look
from .row import ReportRow
from .style import LIGHT, drawing, short
from .table import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches
FOOTER = 140  # maximum number of characters in a line of the footer
# names of the line charts that are written as files; the page has all line charts
FILES = ("loss", "difference", "validation", "compute", "parameters", "scaling")


def write(report: Report, folder: Path, axis: str, log: bool) -> Iterator[Path]:
    """Draw every chart that has data into files, and yield the files."""
    for name, drawn in figures(report, axis, log):
        with drawing(name):
            yield from save_figure(drawn, folder, name)


def figures(report: Report, axis: str, log: bool) -> Iterator[tuple[str, Figure]]:
    """Draw every chart that has data, and yield its name and its figure. `axis` (one of AXES) is the x axis of line
    charts. With `log`, the axis of losses is logarithmic.
    """
    origin, report = "  \N{MIDDLE DOT}  ".join(filter(None, (report.left_out, report.origin))), report.drawn
    makers = [(chart.name, lambda chart=chart: draw_bars(report, chart)) for chart in charts.bar_charts(report)]
    makers += [
        (chart.name, lambda chart=chart: lines(report, chart, axis, log))
        for chart in charts.drawn(report)
        if chart.name in FILES
    ]
    makers += [
        (f"pipeline-{number}", lambda one=one: timeline.draw_timeline(one, *figure(1.7 + 0.34 * len(one.ranks))))
        for number, one in enumerate(timeline.pipelines(report), start=1)
    ]
    for name, make in makers:
        with drawing(name):
            drawn = make()
            below(drawn, origin)
        yield name, drawn


def save_figure(drawn: Figure, folder: Path, name: str) -> Iterator[Path]:
    """Write a figure as PNG and as SVG, without a date, and yield the files."""
    for ending in ("png", "svg"):
        drawn.savefig(
            folder / f"{name}.{ending}", metadata={"Date": None} if ending == "svg" else None, facecolor="white"
        )
        yield folder / f"{name}.{ending}"


def figure(height: float) -> tuple[Figure, Axes]:
    """Create a figure and its axes without pyplot, as pyplot would keep a reference to the figure and look for a
    display.
    """
    from matplotlib.figure import Figure

    empty = Figure(figsize=(WIDTH, height), layout="constrained")
    return empty, empty.subplots()


def below(drawn: Figure, origin: str) -> None:
    """Add the legend, in the order of the table's rows, and the report's origin below the axes."""
    handles, names = drawn.axes[0].get_legend_handles_labels()
    columns = 2 if max(map(len, names), default=0) < 56 else 1
    rows, inch = -(-len(names) // columns), 1 / drawn.get_figheight()
    footer = textwrap.wrap(origin, FOOTER)
    foot = 0.09 + 0.11 * len(footer)
    room = (foot + 0.04 + 0.185 * rows) * inch
    engine: Any = drawn.get_layout_engine()
    engine.set(rect=(0, room, 1, 1 - room))
    if names:
        drawn.legend(handles, names, loc="lower left", bbox_to_anchor=(0, foot * inch), ncols=columns)
    for line, text in enumerate(reversed(footer)):
        drawn.text(0.01, (0.06 + 0.11 * line) * inch, text, fontsize=6.5, color=LIGHT["soft"])


def draw_bars(report: Report, chart: Bars) -> Figure:
    """Draw a horizontal bar for each row and, to the right, columns of values and remarks. A dashed line is at the
    baseline's value.
    """
    drawn, axes = figure(1.7 + 0.36 * len(chart.bars))
    width = 8 + 6.5 * max(len(bar.text) for bar in chart.bars)  # width in points of the column of values
    for height, (row, bar) in enumerate(zip(report.rows, chart.bars, strict=True)):
        flagged, known = row.flagged, _known(bar)
        if known:
            colour = LIGHT["base" if row is report.reference else "red" if flagged else "blue"]
            hatch: dict[str, Any] = {"hatch": "////", "edgecolor": LIGHT["wash"]} if flagged else {}
            axes.barh(height, bar.value, height=0.64, color=colour, alpha=0.55 if row.cell.partial else 1, **hatch)
        if known and bar.spread and isfinite(bar.spread):
            axes.plot(
                [bar.value - bar.spread, bar.value + bar.spread], [height, height], color=LIGHT["ink"], linewidth=1.1
            )
        _annotate(axes, height, width, bar, row)
        if known and row is report.reference:
            axes.axvline(bar.value, color=LIGHT["base"], linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    if chart.limit:
        axes.axvline(chart.limit, color=LIGHT["red"], linewidth=1)
        axes.text(
            chart.limit,
            -0.62,
            f"a device has {chart.limit:g} ",
            ha="right",
            va="bottom",
            color=LIGHT["red"],
            fontsize=8.5,
        )
    axes.set_yticks(range(len(chart.bars)), [short(row.label) for row in report.rows], color=LIGHT["ink"])
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.unit, loc="left")
    return drawn


def _known(bar: Bar) -> bool:
    return bar.value is not None and isfinite(bar.value)


def _annotate(axes: Axes, height: int, width: float, bar: Bar, row: ReportRow) -> None:
    """Write a bar's value to the right of the axes, in a column of `width` points, and the bar's remark beside this
    column.
    """
    beside: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "va": "center",
        "annotation_clip": False,
    }
    colour = LIGHT["ink" if _known(bar) else "red" if row.cell.lost else "soft"]
    weight = "bold" if _known(bar) else "normal"
    axes.annotate(bar.text, (1, height), (width, 0), ha="right", fontweight=weight, color=colour, **beside)
    remark = LIGHT["red" if row.flagged else "soft"]
    axes.annotate(bar.remark, (1, height), (width + 10, 0), fontsize=8.5, color=remark, **beside)


def lines(report: Report, chart: Lines, axis: str, log: bool) -> Figure:
    """Draw a line chart. The baseline's lines are broad and pale."""
    drawn, axes = figure(3.4 + 0.1 * (len(chart.lines) + len(chart.bands)))
    styles = charts.looks(report)
    for name, steps, limit in chart.bands:
        axes.fill_between(
            report.baseline.cell.on(axis, steps), limit, color=LIGHT["rule"], alpha=0.4, linewidth=0, label=name
        )
    for curve in chart.lines:
        row = report.rows[curve.row] if curve.row >= 0 else None
        style = styles[curve.row] if row else Look("base", "dash")
        look: dict[str, Any] = {"color": LIGHT[style.colour], "linestyle": STYLES[style.dash], "linewidth": 1.3}
        if style.baseline:
            look = {"color": LIGHT["base"], "linewidth": 4, "alpha": 0.45}
        elif row and row.flagged:
            look["color"] = LIGHT["red"]
        if curve.faint:
            look |= {"linewidth": 0.8, "alpha": 0.45}
        if len(curve.x) == 1:
            look |= {"linestyle": "", "alpha": 1}
        x = row.cell.on(axis, curve.x) if row and chart.over == "step" else curve.x
        marker = MARKERS[style.dash] if len(curve.x) < 12 and row else None
        y = [float("nan") if value is None else value for value in curve.y]
        axes.plot(
            x,
            y,
            label="" if curve.faint else short(curve.label, 60),
            marker=None if curve.faint else marker,
            markersize=3.5 if len(curve.x) > 1 else 6,
            **look,
        )
        if curve.low:
            axes.fill_between(x, curve.low, curve.high, color=look["color"], alpha=0.15, linewidth=0)
    scale(axes, chart, log)
    if chart.over == "step" and axis == "step":
        axes.locator_params(axis="x", integer=True)
    axes.set_title(chart.title, loc="left", pad=22)
    axes.annotate(
        chart.unit,
        (0, 1),
        (0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        color=LIGHT["soft"],
        fontsize=8.5,
    )
    axes.set_xlabel(AXES[axis] if chart.over == "step" else chart.over, loc="left")
    axes.grid(axis="y")
    return drawn


MARKERS = {"solid": "o", "dash": "s", "dot": "^", "dashdot": "D"}
STYLES = {"solid": "-", "dash": (0, (5, 2)), "dot": (0, (1, 1.5)), "dashdot": (0, (6, 2, 1, 2))}


def scale(axes: Axes, chart: Lines, log: bool) -> None:
    """Choose the scales of the axes. Both axes over devices have base 2, so that ideal scaling is a straight line.
    Other axes are logarithmic with `log`, or if sizes span a factor of ten.
    """
    if chart.over == "devices":
        counts = sorted({count for curve in chart.lines for count in curve.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}" if value < 1e3 else f"{value / 1e3:,.4g}k")
    else:
        sizes = [x for curve in chart.lines for x in curve.x] if chart.over != "step" else []
        if sizes and max(sizes) > 10 * min(sizes):
            axes.set_xscale("log")
        if not sizes:
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        if chart.log or (log and all(value is None or value > 0 for curve in chart.lines for value in curve.y)):
            axes.set_yscale("log")
        if log and not chart.log:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
