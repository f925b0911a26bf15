"""The appearance of plots in files and on the page. It has few colours, which colour-blind people can distinguish, for
light and for dark backgrounds.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

LIGHT = {  # the palette of Okabe and Ito; the colours for text are a little darker
    "ink": "#1f2328",
    "soft": "#6b7178",
    "rule": "#d5d9dd",
    "wash": "#eceff1",
    "base": "#7d858d",
    "paper": "#ffffff",
    "flag": "#fdeee8",
    "red": "#c8400a",
    "blue": "#0b6fb0",
    "orange": "#d9820a",
    "green": "#0a8a68",
    "purple": "#a9568c",
    "sky": "#3d9bd3",
    "brown": "#8a6d3b",
    "violet": "#5b50b8",
    "paleblue": "#9cc7e4",
    "paleorange": "#f2c98d",
    "palegreen": "#98d1be",
}
DARK = {
    "ink": "#e6e8ea",
    "soft": "#9aa2aa",
    "rule": "#3a4047",
    "wash": "#262b31",
    "base": "#949ca4",
    "paper": "#15181c",
    "flag": "#3a2118",
    "red": "#ff7a45",
    "blue": "#4aa8e8",
    "orange": "#f0a43c",
    "green": "#35c09a",
    "purple": "#d98abf",
    "sky": "#8cc9f0",
    "brown": "#c6a467",
    "violet": "#a89df5",
    "paleblue": "#245a80",
    "paleorange": "#7d5312",
    "palegreen": "#1d614c",
}
LINES = ("blue", "orange", "green", "purple", "brown", "sky", "violet")  # red is left out, as it marks errors
DASHES = ("solid", "dash", "dot", "dashdot")


def line_style(number: int) -> tuple[str, str]:
    """Return the colour and dashes of the n-th line. Neighbouring lines differ in both; the first 28 all look
    different.
    """
    return LINES[number % len(LINES)], DASHES[number % len(DASHES)]


@contextlib.contextmanager
def drawing(name: str) -> Iterator[None]:
    """Draw the figure `name` with our settings alone while the block runs, whatever a user's matplotlibrc says.

    Kernels of Jupyter export a backend of theirs, which may not be installed here; importing matplotlib would fail.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings(name))
        yield


def settings(name: str) -> dict[Any, Any]:
    """Return matplotlib's settings for the figure `name`: an SVG keeps text as text, and its file is reproducible."""
    ink, soft, rule = LIGHT["ink"], LIGHT["soft"], LIGHT["rule"]
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"],
        "font.size": 9.5,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.color": ink,
        "axes.labelcolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "axes.edgecolor": rule,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlecolor": ink,
        "axes.titlepad": 12,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "axes.grid": False,
        "axes.prop_cycle": f"cycler(color={[LIGHT[name] for name in LINES]})",
        "grid.color": rule,
        "grid.linewidth": 0.7,
        "figure.dpi": 100,
        "savefig.dpi": 200,
        "hatch.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.formatter.use_mathtext": True,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.handlelength": 3.2,
        "legend.labelcolor": ink,
    }


def short(text: str, limit: int = 44) -> str:
    """Shorten a text to `limit` characters, with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"
