"""Compare the losses of a cell and of the baseline at equal steps, to find whether the cell learns the same.

With the same weights and the same data in the same order, two correct layouts differ only in the order in which they
add numbers. So they round differently, and training amplifies these differences. docs/report.md gives the width of the
band and the measurements behind it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from titan_hydra.core.job.config.registry import FORMATS, Format

from .cells import ReportCell, mean

WINDOW = 10  # number of rows over which differences are averaged, so that one outlier is not taken for a trend
NEIGHBOURS = 25  # the noise of the baseline's loss at a row is computed from this many rows on either side
SHARE = 0.1  # fraction of the noise by which a mean may differ, as training amplifies rounding
# The fraction of the loss by which rounding may change a mean loss, by compute dtype. FORMATS has that of number
# formats.
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-3}


@dataclass(frozen=True)
class Band:
    """The result of comparing the losses of a cell and of the baseline. Differences are relative to the baseline's
    loss.
    """

    step: int | None = None  # the first step outside the band
    difference: float = 0.0  # mean difference at that step
    tolerance: float = 0.0  # half the width of the band at that step
    compared: int = 0  # number of steps that both runs have logged

    @property
    def inside(self) -> bool:
        return self.step is None

    @property
    def departure(self) -> str:
        """The first step outside the band, and the difference there."""
        size = (
            "not a number"
            if math.isnan(self.difference)
            else f"{self.difference:+.2%} (more than {self.tolerance:.2%})"
        )
        return f"step {self.step}, {size.replace('-', chr(0x2212)).replace('%', ' %')}"

    def __str__(self) -> str:
        return "yes" if self.inside else f"NO: from step {self.step}"


def band(baseline: ReportCell, cell: ReportCell) -> Band | None:
    """Compare the losses of a cell and of the baseline at the steps that both have logged. None if there are none."""
    steps = sorted(baseline.losses.keys() & cell.losses.keys())
    if not steps:
        return None
    reference, losses = [baseline.losses[step] for step in steps], [cell.losses[step] for step in steps]
    for step, off, allowed in zip(
        steps, off_by(reference, losses), tolerances(reference, coarser(baseline, cell)), strict=True
    ):
        if not abs(off) <= allowed:  # `not <=` instead of `>`, so that NaN counts as outside
            return Band(step, off, allowed, len(steps))
    return Band(compared=len(steps))


def off_by(reference: list[float], losses: list[float]) -> list[float]:
    """Return for each row the relative difference of the losses, as a mean over WINDOW rows that end with this row."""
    relative = [(b - a) / (a or 1.0) for a, b in zip(reference, losses, strict=True)]
    return [mean(relative[max(0, row - WINDOW + 1) : row + 1]) for row in range(len(relative))]


def tolerances(reference: list[float], precision: str) -> list[float]:
    """Return for each row half the width of the band, as a fraction of the loss. It is the effect of rounding on a
    forward pass. From the second row on, a fraction (SHARE) of the baseline's noise from batch to batch is added,
    because training amplifies rounding. The first row is logged before any update.
    """
    noise = noise_of(tuple(reference))
    return [
        rounding(precision) + SHARE * sigma / (abs(loss) or 1.0) for sigma, loss in zip(noise, reference, strict=True)
    ]


@lru_cache(maxsize=4)  # cached, as all cells of a report are compared with one baseline
def noise_of(reference: tuple[float, ...]) -> list[float]:
    """Return for each row the noise of the losses near it; 0 for the first row."""
    return [0.0, *(local_noise(reference, row) for row in range(1, len(reference)))]


def local_noise(losses: Sequence[float], row: int) -> float:
    """Return the standard deviation of the loss around its trend near `row`. It is computed as the standard deviation
    of the differences between neighbouring rows, divided by the square root of two.
    """
    near = losses[max(0, row - NEIGHBOURS) : row + NEIGHBOURS + 1]
    steps = [after - before for before, after in pairwise(near) if math.isfinite(after - before)]
    trend = mean(steps)
    return math.sqrt(sum((step - trend) * (step - trend) for step in steps) / len(steps) / 2) if steps else 0.0


def coarser(*cells: ReportCell) -> str:
    """Return the number format with the largest rounding errors among the formats in which the cells compute."""
    formats = [cell.config.get("precision.converter") or cell.config.get("precision.compute_dtype") for cell in cells]
    return max((name or "bfloat16" for name in formats), key=rounding)


def rounding(precision: str) -> float:
    """Return the fraction of the loss by which a number format's rounding may change a mean loss. Unknown formats get
    the default, which is large.
    """
    return ROUNDING[precision] if precision in ROUNDING else FORMATS.get(precision, Format).rounding
