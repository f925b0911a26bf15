"""The plots of a report: bars of throughput and memory, loss curves, scaling, and what a pipeline does when. matplotlib is imported here
only when something is drawn."""
from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import timeline
from .curves import losses
from .scaling import scaling
from .style import LIGHT, figure, settings, short
from .table import Report, Row, percent, rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(report: Report, folder: Path) -> Iterator[Path]:
    """Draw every plot that the report has something for, as PNG and as SVG. Yields the files."""
    for name, drawn in draw(report):
        for ending in ("png", "svg"):
            drawn.savefig(folder / f"{name}.{ending}", metadata={"Date": None} if ending == "svg" else None, facecolor="white")
            yield folder / f"{name}.{ending}"


def svgs(report: Report) -> list[tuple[str, str]]:
    """The same as names and SVG text without a background."""
    found = []
    for name, drawn in draw(report):
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        found.append((name, text.getvalue()))
    return found


def draw(report: Report) -> Iterator[tuple[str, Figure]]:
    """Every plot, by name; each is to be saved before the next is asked for, as settings are in force until then."""
    import matplotlib

    plots = [("throughput", throughput), ("memory", memory), ("loss", losses), ("scaling", scaling)]
    plots += [(f"pipeline-{number}", lambda _, one=one: timeline.draw(one)) for number, one in
              enumerate(timeline.pipelines(report), start=1)]
    for name, make in plots:
        with matplotlib.rc_context(settings(name)):
            drawn = make(report)
            if drawn is not None:
                yield name, drawn


def throughput(report: Report) -> Figure | None:
    """Tokens per second and device of each cell, quartiles as a thin line, the baseline's as a dashed one through all."""
    if all(row.cell.rate is None for row in report.rows):
        return None
    values = [(row.cell.rate, f"{rate(row.cell.rate)}{'*' if row.cell.partial else ''}" if row.cell.rate is not None else row.cell.word,
               percent(row.difference)) for row in report.rows]
    return bars(report, "Throughput", "tokens/s per device", values, [row.cell.iqr for row in report.rows])


def memory(report: Report) -> Figure | None:
    """Peak memory of each cell, and what the device has where the configuration says so."""
    if all(row.cell.memory is None for row in report.rows):
        return None
    reference = report.baseline.cell.memory
    values = []
    for row in report.rows:
        own = row.cell.memory
        change = percent(own / reference - 1) if own and reference and not row.baseline else None
        values.append((own, f"{own:.1f}" if own is not None else row.cell.word, change))
    drawn = bars(report, "Peak memory", "GiB reserved, the largest over all ranks", values)
    capacity = {row.cell.config.get("cluster.device_memory_gib") for row in report.rows} - {None}
    if len(capacity) == 1:
        (axes,), limit = drawn.axes, capacity.pop()
        axes.axvline(limit, color=LIGHT["red"], linewidth=1)
        axes.text(limit, -0.62, f"a device has {limit:g} ", ha="right", va="bottom", color=LIGHT["red"], fontsize=8.5)
        axes.set_xlim(0, max(axes.get_xlim()[1], limit * 1.01))
    return drawn


def bars(report: Report, title: str, unit: str, values: list[tuple], spreads: list | None = None) -> Figure:
    """A horizontal bar a cell; beside it, in columns, its value and the difference to the baseline."""
    drawn, axes = figure(height=1.5 + 0.36 * len(values))
    longest = max(value for value, *_ in values if value is not None)
    spreads = spreads or [None] * len(values)
    width = 8 + 6.5 * max(len(text) for _, text, _ in values)  # points of the column of values
    for place, (row, (value, text, change), spread) in enumerate(zip(report.rows, values, spreads, strict=True)):
        colour, flagged = _colour(row), row.band is not None and not row.band.inside
        if value is not None:
            axes.barh(place, value, height=0.64, color=colour, alpha=0.55 if row.cell.partial else 1,
                      **({"hatch": "////", "edgecolor": LIGHT["wash"]} if flagged else {}))
        if spread and value:
            axes.plot([value - spread / 2, value + spread / 2], [place, place], color=LIGHT["ink"], linewidth=1.1, solid_capstyle="butt")
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(text, (1, place), (width, 0), ha="right", fontweight="bold" if value is not None else "normal",
                      color=LIGHT["ink" if value is not None else "soft" if row.cell.state.failure is None else "red"], **beside)
        said = [change, "baseline" if row.baseline else None, "loss left the band" if flagged else None]
        axes.annotate(", ".join(part for part in said if part), (1, place), (width + 10, 0), fontsize=8.5,
                      color=LIGHT["red" if flagged else "soft"], **beside)
    reference = values[report.rows.index(report.baseline)][0]
    if reference:
        axes.axvline(reference, color=LIGHT["base"], linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(values)), [short(row.label) for row in report.rows], color=LIGHT["ink"])
    axes.set_ylim(len(values) - 0.4, -0.6)
    furthest = max((value or 0) + (spread or 0) / 2 for (value, *_), spread in zip(values, spreads, strict=True))
    axes.set_xlim(0, max(longest, furthest) * 1.01)
    axes.set_xticks(_ticks(longest), [f"{tick:,.10g}" for tick in _ticks(longest)])
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit, loc="left")
    return drawn


def _colour(row: Row) -> str:
    if row.baseline:
        return LIGHT["base"]
    return LIGHT["red"] if row.band and not row.band.inside else LIGHT["blue"]


def _ticks(longest: float) -> list[float]:
    """0 and a few round numbers up to the longest bar."""
    step = 10 ** math.floor(math.log10(longest))
    step = next(size * step for size in (0.2, 0.25, 0.5, 1, 2) if longest / (size * step) <= 5)
    return [step * number for number in range(int(longest / step + 1e-9) + 1)]
