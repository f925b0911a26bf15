"""Draw the result of `titan verify widths` (or depths): how much activations change at each size, or the loss at each learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .plots import below, figure
from .style import LIGHT, drawing, line_style

STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw_coordinates(result: dict[str, Any], file: Path) -> Path:
    """Draw a result of `titan verify widths` into a file, and return the file."""
    with drawing("coordinates"):
        drawn, axes = figure(3.6)
        if "kinds" in result:
            for number, (kind, one) in enumerate(result["kinds"].items()):
                _line(axes, result["sizes"], one["change"], number, f"{kind}, slope {one['slope']:+.3f}")
            axes.set(xscale="log", yscale="log", xlabel=result["what"], ylabel="change (root mean square)")
            axes.set_xticks(result["sizes"], [str(size) for size in result["sizes"]])
        else:
            for number, one in enumerate(result["sizes_at_rates"]):
                losses = [loss if math.isfinite(loss) else math.nan for loss in one["losses"]]
                _line(axes, result["rates"], losses, number, f"{result['what']} {one['size']}, best {one['best']:.3g}")
                axes.axvline(one["best"], color=LIGHT[line_style(number)[0]], linewidth=0.8, alpha=0.6)
            axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
            axes.set_xticks(result["rates"], [f"{rate:g}" for rate in result["rates"]])
            axes.minorticks_off()
        axes.set_title(f"{result['model']}, {result['parametrization']}", loc="left")
        axes.grid(axis="y")
        below(
            drawn,
            f"titan verify {result['what']}s, {result['optimizer']}, {result['steps']} steps, seeds {result['seeds']}",
        )
        drawn.savefig(file, facecolor="white")
    return file


def _line(axes: Any, x: list[float], y: list[float], number: int, label: str) -> None:
    colour, dash = line_style(number)
    axes.plot(x, y, color=LIGHT[colour], linestyle=STYLES[dash], marker="o", markersize=3.5, label=label)
