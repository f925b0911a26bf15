"""How plots look: a few colours that the colour-blind can tell apart, names at the lines instead of legends, no frames.

Every colour is a key of LIGHT, so that the page can exchange them when its reader prefers the dark.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = {  # Okabe and Ito's colours, a little darker where they carry text
    "ink": "#1f2328", "soft": "#6b7178", "rule": "#d5d9dd", "wash": "#eceff1", "base": "#8b939b",
    "blue": "#0b6fb0", "orange": "#d9820a", "green": "#0a8a68", "red": "#c8400a", "purple": "#a9568c", "sky": "#4aa3d8", "brown": "#8a6d3b",
    "paleblue": "#9cc7e4", "paleorange": "#f2c98d", "palegreen": "#98d1be", "onfull": "#fefefe", "onpale": "#1f2327", "edge": "#fdfdfd",
}
DARK = {
    "ink": "#e6e8ea", "soft": "#9aa2aa", "rule": "#3a4047", "wash": "#262b31", "base": "#8b939b",
    "blue": "#4aa8e8", "orange": "#f0a43c", "green": "#35c09a", "red": "#ff7a45", "purple": "#d98abf", "sky": "#8cc9f0", "brown": "#c6a467",
    "paleblue": "#245a80", "paleorange": "#7d5312", "palegreen": "#1d614c", "onfull": "#101316", "onpale": "#e9eaeb", "edge": "#15181c",
}
LINES = ("blue", "orange", "green", "purple", "sky", "brown")  # red is for what is wrong
DASHES = ("-", "--", ":", "-.")


def line(number: int) -> dict:
    """Colour and dashes of the n-th line; no two of the first 24 are the same."""
    return {"color": LIGHT[LINES[number % len(LINES)]], "linestyle": DASHES[number // len(LINES) % len(DASHES)]}


def settings(name: str) -> dict:
    """matplotlib's settings. Text stays text in an SVG, and the same figure gives the same bytes."""
    ink, soft, rule = LIGHT["ink"], LIGHT["soft"], LIGHT["rule"]
    return {
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"], "font.size": 9.5, "svg.fonttype": "none",
        "svg.hashsalt": name, "text.color": ink, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft, "axes.edgecolor": rule,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11, "axes.titleweight": "bold",
        "axes.titlecolor": ink, "axes.titlepad": 12, "xtick.major.size": 0, "ytick.major.size": 0, "axes.grid": False, "grid.color": rule,
        "grid.linewidth": 0.7, "figure.dpi": 100, "savefig.dpi": 200, "hatch.linewidth": 0.8, "axes.axisbelow": True,
    }


def figure(width: float = 7.2, height: float = 3.0, **layout) -> tuple[Figure, Axes]:
    """A figure and its axes, without pyplot, which would keep it and look for a screen."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(**layout)


def name_ends(axes: Axes, ends: list[tuple[float, float]], names: list[tuple[str, str]], right: float) -> None:
    """Write names, each in its colour, at `right` of the ends of lines, moved apart where lines meet, with a thin line to each end."""
    axes.figure.draw_without_rendering()  # settles the limits, which distances are measured by
    transform = axes.transData
    ends_in_pixels = [transform.transform(end)[1] for end in ends]
    (_, low), (_, high) = axes.get_window_extent().get_points()
    placed = spread(ends_in_pixels, 13.5 * axes.figure.dpi / 72, low, high)
    for (name, colour), end, at in zip(names, ends, placed, strict=True):
        axes.annotate(name, end, (right, transform.inverted().transform((0, at))[1]), textcoords="data", va="center", color=colour,
                      fontsize=8.5, annotation_clip=False, arrowprops={"arrowstyle": "-", "color": LIGHT["rule"], "linewidth": 0.7,
                                                                       "shrinkA": 2, "shrinkB": 1, "relpos": (0, 0.5)})


def spread(positions: Iterable[float], distance: float, low: float, high: float) -> list[float]:
    """Positions moved apart by at least `distance` and kept between `low` and `high` if they fit, each as near to where it was as can be.

    Runs of labels that would touch are pushed together into blocks that sit around their mean.
    """
    positions = list(positions)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    blocks: list[list[float]] = []  # [mean wanted for the block's middle, members]
    for index in order:
        blocks.append([positions[index], 1])
        while len(blocks) > 1 and _bottom(blocks[-1], distance) < _top(blocks[-2], distance) + distance:
            (above, some), (below, more) = blocks.pop(), blocks.pop()
            blocks.append([(above * some + below * more) / (some + more), some + more])
    placed = [middle + distance * (rank - (size - 1) / 2) for middle, size in blocks for rank in range(int(size))]
    shift = max(low - placed[0], 0) if placed else 0
    shift = shift or min(high - placed[-1], 0) if placed else 0
    result = [0.0] * len(positions)
    for index, position in zip(order, placed, strict=True):
        result[index] = position + shift
    return result


def _bottom(block: list[float], distance: float) -> float:
    return block[0] - distance * (block[1] - 1) / 2


def _top(block: list[float], distance: float) -> float:
    return block[0] + distance * (block[1] - 1) / 2


def short(text: str, limit: int = 44) -> str:
    """A name that leaves room for what it names."""
    return text if len(text) <= limit else f"{text[:limit - 1]}\N{HORIZONTAL ELLIPSIS}"
