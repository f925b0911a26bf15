"""Loss curves overlaid, as in the paper's figures, and under them how far each is from the baseline's."""
from __future__ import annotations

from typing import TYPE_CHECKING

from .band import ROUNDING, coarser, off_by, tolerances
from .style import LIGHT, figure, line, name_ends, short
from .table import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def losses(report: Report) -> Figure | None:
    """The baseline's loss as a broad pale line and the others' on it; below, what the eye cannot see there."""
    rows = [row for row in report.rows if len(row.cell.losses) > 1 and not row.cell.state.failure]
    compared = [row for row in rows if row.band and row.band.compared > 1]
    if not rows:
        return None
    against = bool(compared) and report.baseline in rows
    drawn, axes = figure(height=4.6 if against else 3.3, nrows=2 if against else 1, sharex=True, squeeze=False,
                         gridspec_kw={"height_ratios": [2.2, 1]} if against else None)
    top = axes[0][0]
    styles = {row.label: line(number) for number, row in enumerate(row for row in rows if not row.baseline)}
    for row in rows:
        if row.band and not row.band.inside:
            styles[row.label]["color"] = LIGHT["red"]
    for row in rows:
        style = {"color": LIGHT["base"], "linewidth": 4, "alpha": 0.45} if row.baseline else {"linewidth": 1.2, **styles[row.label]}
        top.plot(list(row.cell.losses), list(row.cell.losses.values()), solid_capstyle="round", **style)
    top.set_title("Loss", loc="left")
    top.set_ylabel("nats per token")
    if against:
        distances(axes[1][0], report.baseline, compared, styles)
    apart = [difference.key for difference in report.found if difference.learning]
    if apart:
        top.text(1, 1.02, f"not all comparable: {', '.join(apart[:3])}", transform=top.transAxes, ha="right", color=LIGHT["soft"],
                 fontsize=8.5)
    for one in axes[:, 0]:
        one.grid(axis="y")
        one.spines["left"].set_visible(False)
        one.margins(x=0.01)
    axes[-1][0].set_xlabel("step", loc="left")
    axes[-1][0].xaxis.get_major_locator().set_params(integer=True)
    name_lines(top, [(row, row.cell.step, list(row.cell.losses.values())[-1]) for row in rows], styles)
    return drawn


def distances(axes: Axes, baseline: Row, compared: list[Row], styles: dict) -> None:
    """The mean difference to the baseline that is held against the band, and the bands: Float8's is wider and fainter."""
    reference = baseline.cell.losses
    steps = list(reference)
    highest = 0.0
    for precision in sorted({coarser(baseline.cell, row.cell) for row in compared}, key=ROUNDING.get, reverse=True):
        allowed = [100 * share for share in tolerances(list(reference.values()), precision)]
        highest = max(highest, *allowed)
        axes.fill_between(steps, [-share for share in allowed], allowed, color=LIGHT["rule"], alpha=0.4, linewidth=0)
    axes.axhline(0, color=LIGHT["base"], linewidth=2.5, alpha=0.45)
    largest = highest
    for row in compared:
        common = sorted(reference.keys() & row.cell.losses.keys())
        off = [100 * share for share in off_by([reference[step] for step in common], [row.cell.losses[step] for step in common])]
        axes.plot(common, off, linewidth=1.1, **styles[row.label])
        if not row.band.inside:
            largest = max(largest, min(max(abs(share) for share in off), 4 * highest))
    for row in compared:
        if not row.band.inside:
            left = (row.band.step, max(-largest, min(largest, 100 * row.band.difference)))  # it may have left by more than is shown
            axes.plot(*left, "o", color=LIGHT["red"], markersize=4)
            axes.annotate(f"step {row.band.step}", left, (-3, 4), textcoords="offset points", ha="right", fontsize=8, color=LIGHT["red"])
    axes.set_ylim(-1.15 * largest, 1.15 * largest)
    axes.set_ylabel("% off the baseline")
    axes.text(1, 1.03, "shaded: the baseline's band", transform=axes.transAxes, ha="right", va="bottom", color=LIGHT["soft"], fontsize=8)


def name_lines(axes: Axes, ends: list[tuple[Row, float, float]], styles: dict) -> None:
    """The name of each line at its right end, names moved apart where lines meet."""
    right = max(step for _, step, _ in ends)
    names = [(short(row.label, 26) + (" (baseline)" if row.baseline else ""), LIGHT["soft"] if row.baseline else styles[row.label]["color"])
             for row, *_ in ends]
    name_ends(axes, [(step, value) for _, step, value in ends], names, right + (right - 1) * 0.035)
