"""Does a cell learn what the baseline learns? Its losses are held against the baseline's at equal steps.

Same weights, same data in the same order: what is left between two right layouts is the rounding of sums made in another order, which
training then amplifies. docs/report.md says how wide that is, and what was measured.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from .cells import Cell, mean

WINDOW = 10  # rows whose mean difference is looked at: one odd step is not a trend
NEIGHBOURS = 25  # rows on either side from which the noise of the baseline's loss is taken
SHARE = 0.1  # of that noise that a mean difference may reach, once rounding has been amplified by training
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-3, "float8": 4e-3}  # share of the loss that a mean may be off by rounding alone


@dataclass(frozen=True)
class Band:
    """Where a cell's loss left the baseline's band; `step` None: it never did. Fractions of the baseline's loss."""

    step: int | None = None
    difference: float = 0.0
    tolerance: float = 0.0
    compared: int = 0  # rows that both have

    @property
    def inside(self) -> bool:
        return self.step is None

    @property
    def told(self) -> str:
        """Step and size of the departure."""
        size = "not a number" if math.isnan(self.difference) else f"{self.difference:+.2%} (more than {self.tolerance:.2%})"
        return f"step {self.step}, {size.replace('-', chr(0x2212)).replace('%', ' %')}"

    def __str__(self) -> str:
        return "yes" if self.inside else f"NO: from step {self.step}"


def band(baseline: Cell, cell: Cell) -> Band | None:
    """Compare a cell's losses with the baseline's at the steps that both have logged; None where there are none."""
    steps = sorted(baseline.losses.keys() & cell.losses.keys())
    if not steps:
        return None
    reference, own = [baseline.losses[step] for step in steps], [cell.losses[step] for step in steps]
    for step, off, allowed in zip(steps, off_by(reference, own), tolerances(reference, coarser(baseline, cell)), strict=True):
        if not abs(off) <= allowed:  # also NaN
            return Band(step, off, allowed, len(steps))
    return Band(compared=len(steps))


def off_by(reference: list[float], own: list[float]) -> list[float]:
    """For each row the difference of the losses, as a fraction, a mean over it and the rows before; of the first row by itself."""
    relative = [(b - a) / (a or 1.0) for a, b in zip(reference, own, strict=True)]
    return [mean(relative[max(0, row - WINDOW + 1):row + 1]) for row in range(len(relative))]


def tolerances(reference: list[float], precision: str) -> list[float]:
    """For each row how far a mean may be off, as a fraction of the loss.

    What rounding does to a forward pass, and from the second row on a share of the noise that the baseline's own loss has from batch to
    batch: where differences end up after they have been amplified. The first row comes before any update and gets no such share.
    """
    noise = [0.0, *(local_noise(reference, row) for row in range(1, len(reference)))]
    return [ROUNDING[precision] + SHARE * sigma / (abs(loss) or 1.0) for sigma, loss in zip(noise, reference, strict=True)]


def local_noise(losses: list[float], row: int) -> float:
    """Standard deviation of the loss from row to row, less its trend: that of neighbours' differences, by the root of two."""
    near = losses[max(0, row - NEIGHBOURS):row + NEIGHBOURS + 1]
    steps = [after - before for before, after in pairwise(near) if math.isfinite(after - before)]
    trend = mean(steps)
    return math.sqrt(sum((step - trend) * (step - trend) for step in steps) / len(steps) / 2) if steps else 0.0


def coarser(*cells: Cell) -> str:
    """The number format with the largest rounding that the cells compute in."""
    names = ("float8" if cell.config.get("precision.converter") else cell.config.get("precision.compute_dtype") for cell in cells)
    return max((name if name in ROUNDING else "bfloat16" for name in names), key=ROUNDING.get)
