"""The pictures of a scaling curve, in the look of the report: the ladder with its band, and the loss over sizes for fixed
budgets (IsoFLOP). matplotlib is imported only if something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.base.amounts import brief
from titan_hydra.experiments.report.plots import below, figure, save_figure
from titan_hydra.experiments.report.style import LIGHT, LINES, drawing

from .bootstrap import LEVEL, Drawn, Interval90, reach_of
from .law import Ladder

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

BUDGETS = 5  # number of curves in the IsoFLOP picture
Target = tuple[float, float, Interval90]  # a predicted run: its parameters, tokens and loss


def draw_ladder(curves: dict[str, Drawn], targets: Sequence[Target], folder: Path, origin: str) -> Iterator[Path]:
    """Draw the loss of each cell over its compute, the curve of best sizes of each recipe with its band, and the
    predictions. Yield the files.
    """
    import numpy as np

    with drawing("scale-ladder"):
        drawn, axes = figure(4.4)
        for (name, curve), colour in zip(curves.items(), LINES, strict=False):
            flops = curve.fit.ladder.flops
            last = max([flops.max() * min(reach_of(curve.fit.ladder), 10), *(6 * n * d for n, d, _ in targets)])
            budgets = np.geomspace(flops.min(), last, 80)
            bands = np.quantile(
                np.stack([curve.laws.frontier(budget) for budget in budgets]),
                [(1 - LEVEL) / 2, (1 + LEVEL) / 2],
                axis=1,
            )
            inside = budgets <= flops.max()
            axes.fill_between(budgets, *bands, color=LIGHT[colour], alpha=0.15, linewidth=0)
            label = f"{name}: best size for its compute, with its {LEVEL:.0%} band"
            axes.plot(budgets[inside], curve.fit.law.frontier(budgets[inside]), color=LIGHT[colour], label=label)
            axes.plot(budgets[~inside], curve.fit.law.frontier(budgets[~inside]), "--", color=LIGHT[colour])
            axes.scatter(
                flops, curve.fit.ladder.losses, s=14, color=LIGHT[colour], label=f"{name}: held-out loss of a cell"
            )
        for parameters, tokens, loss in targets:
            axes.errorbar(
                [6 * parameters * tokens],
                [loss.value],
                [[loss.value - loss.low], [loss.high - loss.value]],
                fmt="D",
                markersize=5,
                color=LIGHT["red"],
                label=f"predicted: {brief(parameters)} parameters on {brief(tokens)} tokens",
            )
        finish(axes, "Held-out loss over compute", "compute, 6 x parameters x tokens (FLOPs)")
        below(drawn, origin)
        yield from save_figure(drawn, folder, "scale-ladder")


def draw_isoflop(curve: Drawn, folder: Path, origin: str) -> Iterator[Path]:
    """Draw the fitted loss over the number of parameters for fixed budgets, with the best size of each. A cell is drawn
    at its size, and as far above or below the curve of the nearest budget as its loss is above or below the fitted
    loss. Yield the files.
    """
    import numpy as np

    ladder, law = curve.fit.ladder, curve.fit.law
    budgets = np.geomspace(ladder.flops.min(), ladder.flops.max(), BUDGETS)
    nearest = np.argmin(np.abs(np.log(ladder.flops[:, None] / budgets)), axis=1)
    off = ladder.losses / law.loss(ladder.parameters, ladder.tokens)
    with drawing("scale-isoflop"):
        drawn, axes = figure(4.4)
        for number, (budget, colour) in enumerate(zip(budgets, LINES, strict=False)):
            of_budget = nearest == number
            sizes = sizes_of(ladder, float(law.best_size(budget)))
            axes.plot(sizes, law.loss(sizes, budget / 6 / sizes), color=LIGHT[colour], label=f"{budget:.2g} FLOPs")
            shown = law.loss(ladder.parameters[of_budget], budget / 6 / ladder.parameters[of_budget]) * off[of_budget]
            axes.scatter(ladder.parameters[of_budget], shown, s=14, color=LIGHT[colour])
            best = law.best_size(budget)
            axes.plot(
                [best], [law.frontier(budget)], "x", color=LIGHT["ink"], label="best size" if number == 0 else None
            )
        finish(axes, "Held-out loss over size, at fixed compute", "parameters")
        below(drawn, origin)
        yield from save_figure(drawn, folder, "scale-isoflop")


def sizes_of(ladder: Ladder, best: float) -> np.ndarray:
    """Return sizes, evenly spaced on a logarithmic scale, whose range contains the ladder's sizes, and the best size if
    it is within a factor of ten of them.
    """
    import numpy as np

    low, high = ladder.parameters.min(), ladder.parameters.max()
    return np.geomspace(max(min(low, 0.8 * best), low / 10), min(max(high, 1.25 * best), 10 * high), 80)


def finish(axes: Axes, title: str, over: str) -> None:
    axes.set_xscale("log")
    axes.set_title(title, loc="left")
    axes.set_xlabel(over, loc="left")
    axes.set_ylabel("nats per token")
    axes.grid(axis="y")
