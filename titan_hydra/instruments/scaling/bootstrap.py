"""Intervals: laws drawn by a bootstrap of the residuals, what they predict, and how often such predictions are right.

A draw adds resampled residuals to the fitted losses and fits again. The residuals are scaled twice. First, they are
enlarged to the noise of a single run, because a fit of five numbers makes residuals smaller than the noise. Then a
random factor (chi-squared) expresses the uncertainty of the noise. It makes the intervals of a small ladder as wide as
with Student's t distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError

from .law import FEWEST, Ladder, Law, LawFit, Problem, fit_law, why_not

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.9  # of all intervals
DRAWS = 200  # number of laws that are drawn for a fit
NOISES = 20  # number of draws of a run's noise for each drawn law
FARTHEST = 100.0  # arXiv 2412.04403 predicts models from ladders with a hundredth of the models' compute


@dataclass(frozen=True)
class Interval90:
    """A number with an interval that contains the true number with the probability LEVEL."""

    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval_of(value: float, drawn: np.ndarray) -> Interval90:
    """Return the interval that contains the fraction LEVEL of the drawn numbers, with as many below as above it."""
    import numpy as np

    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval90(float(value), float(low), float(high))


@dataclass(frozen=True)
class Drawn:
    """A fit with the laws of its bootstrap (one `Law` of arrays), and for each law NOISES random factors by which noise
    changes the loss of a single run.
    """

    fit: LawFit
    laws: Law
    noise: np.ndarray

    def predicted(self, parameters: float, tokens: float) -> Interval90:
        """Predict the held-out loss of one run. The interval covers the uncertainty of the law and the run's noise."""
        losses = self.laws.loss(parameters, tokens)[:, None] * self.noise
        return interval_of(self.fit.law.loss(parameters, tokens), losses)

    def constants(self) -> dict[str, Interval90]:
        names = ("E", "A", "alpha", "B", "beta")
        return {name: interval_of(getattr(self.fit.law, name), getattr(self.laws, name)) for name in names}


def draw_laws(fit: LawFit, draws: int = DRAWS, seed: int = 0) -> Drawn:
    """Draw laws by a bootstrap of the residuals. The same seed gives the same laws."""
    import numpy as np

    random, problem = np.random.default_rng(seed), Problem(fit.ladder)
    pool = (fit.residuals - fit.residuals.mean()) * np.sqrt(len(fit.residuals) / fit.freedom)
    fitted = np.log(fit.law.loss(fit.ladder.parameters, fit.ladder.tokens))
    scales = np.sqrt(fit.freedom / random.chisquare(fit.freedom, draws))
    unknowns = [
        problem.minimum(fit.unknowns, fitted + scale * random.choice(pool, len(pool)) / problem.root, fit.delta)[0]
        for scale in scales
    ]
    noise = np.exp(scales[:, None] * random.choice(pool, (draws, NOISES)))
    return Drawn(fit, problem.law(np.array(unknowns)), noise)


def reach_of(ladder: Ladder) -> float:
    """Return the factor by which predictions may exceed a ladder's largest run: the ratio of its largest to its
    smallest compute, at most FARTHEST.
    """
    return min(float(ladder.flops.max() / ladder.flops.min()), FARTHEST)


def factor_beyond(ladder: Ladder, parameters: float, tokens: float) -> float:
    """Return the factor by which a run is beyond a ladder: the largest of the factors for compute, parameters and
    tokens. It is at most 1 if the run is within the ladder.
    """
    above = ((6 * parameters * tokens, ladder.flops), (parameters, ladder.parameters), (tokens, ladder.tokens))
    below = above[1:]
    return float(max(*(value / all.max() for value, all in above), *(all.min() / value for value, all in below)))


def require_reach(ladder: Ladder, parameters: float, tokens: float, reach: float | None) -> float:
    """Return the factor by which a run is beyond a ladder. Raises ConfigError if it is more than `reach` (None: what the
    ladder supports).
    """
    factor, allowed = factor_beyond(ladder, parameters, tokens), reach_of(ladder) if reach is None else reach
    if factor > allowed * (1 + 1e-9):
        raise ConfigError(
            f"{parameters:.3g} parameters on {tokens:.3g} tokens are {factor:.3g} x beyond the ladder, and its runs, which span "
            f"{float(ladder.flops.max() / ladder.flops.min()):.3g} x in compute, support {allowed:.3g} x; add larger runs, or "
            f"--reach {ceil(factor)}"
        )
    return factor


@dataclass(frozen=True)
class LeftOut:
    """A run that was left out of a fit: its measured loss beside the prediction from the other runs."""

    parameters: float
    tokens: float
    measured: float
    predicted: Interval90
    cells: int  # number of cells in the fit
    factor: float  # how far the run is beyond the cells of the fit (`factor_beyond`)

    @property
    def inside(self) -> bool:
        return self.measured in self.predicted


def leave_out(ladder: Ladder, left: int, mask: Any, draws: int, seed: int) -> LeftOut:
    """Predict the cell `left` from the cells in the mask `mask`. The cell's noise is that of a mean over seeds."""
    import numpy as np

    drawn = draw_laws(fit_law(ladder.only(mask)), draws, seed)
    for_cell = Drawn(drawn.fit, drawn.laws, drawn.noise ** (1 / np.sqrt(ladder.runs[left])))
    n, d = float(ladder.parameters[left]), float(ladder.tokens[left])
    return LeftOut(
        parameters=n,
        tokens=d,
        measured=float(ladder.losses[left]),
        predicted=for_cell.predicted(n, d),
        cells=int(mask.sum()),
        factor=factor_beyond(ladder.only(mask), n, d),
    )


def backtest(ladder: Ladder, number: int, draws: int = DRAWS, seed: int = 0) -> tuple[LeftOut, list[LeftOut]]:
    """Return predictions of runs that were left out of the fit. The first one is of the largest size's run with most
    compute, predicted from all smaller sizes. The others are of `number` cells, drawn from the half with more compute.
    Each of them is predicted from all cells with less compute. Raises ConfigError if too few cells are left.
    """
    import numpy as np

    largest = int(np.argmax(ladder.flops * (ladder.parameters == ladder.parameters.max())))
    smaller = ladder.parameters < ladder.parameters.max()
    if reason := why_not(ladder.only(smaller)):
        raise ConfigError(f"without its largest size, the ladder has {reason}")
    possible = [*_predictable(ladder)]
    if len(possible) < number:
        raise ConfigError(
            f"--backtest {number}: only {len(possible)} cells have enough smaller ones; nearest legal: {len(possible)}"
        )
    chosen = np.random.default_rng(seed).choice(possible, number, replace=False)
    draws_of = [
        leave_out(ladder, cell, _with_less_compute(ladder, cell), draws, seed) for cell in sorted(map(int, chosen))
    ]
    return leave_out(ladder, largest, smaller, draws, seed), draws_of


def _predictable(ladder: Ladder) -> Iterator[int]:
    """Yield the cells of the half with more compute that the cells with less compute can predict."""
    import numpy as np

    for cell in map(int, np.flatnonzero(ladder.flops >= np.median(ladder.flops))):
        less = _with_less_compute(ladder, cell)
        if less.sum() >= FEWEST and not why_not(ladder.only(less)):
            yield cell


def _with_less_compute(ladder: Ladder, cell: int) -> np.ndarray:
    """Return for each cell whether it has less compute than this one. Cells with the same compute, but for rounding, have
    not less.
    """
    return ladder.flops < ladder.flops[cell] * 0.999


@dataclass(frozen=True)
class RecipeVerdict:
    """Two recipes at one budget: the loss of each at its best size, the difference (second minus first), the probability
    that the first has the lower loss, and the budgets at which the curves cross, each with its interval.
    """

    flops: float
    losses: tuple[Interval90, Interval90]
    difference: Interval90
    first_wins: float
    crossings: list[Interval90]


def judge_recipes(first: Drawn, second: Drawn, flops: float, reach: float | None) -> RecipeVerdict:
    """Compare the curves of two recipes, each at the best size for the budget. The draws of the two recipes are
    independent, so noise that equal seeds share is counted twice.
    """
    import numpy as np

    for one in (first, second):
        size = float(one.fit.law.best_size(flops))
        require_reach(one.fit.ladder, size, flops / 6 / size, reach)
    one, other = first.laws.frontier(flops), second.laws.frontier(flops)
    size = min(len(one), len(other))
    differences = other[:size] - one[:size]
    fitted = first.fit.law.frontier(flops), second.fit.law.frontier(flops)
    budgets = _common_budgets(first, second, reach)
    each = [_crossings(_law(first.laws, draw), _law(second.laws, draw), budgets) for draw in range(size)]
    crossings = []
    for crossing in _crossings(first.fit.law, second.fit.law, budgets):
        near = [min(found, key=lambda one: abs(np.log(one / crossing))) for found in each if found]
        if len(near) > size / 2:
            crossings.append(interval_of(crossing, np.array(near)))
    return RecipeVerdict(
        flops,
        (interval_of(fitted[0], one), interval_of(fitted[1], other)),
        interval_of(fitted[1] - fitted[0], differences),
        float(np.mean(differences > 0)),
        crossings,
    )


def _law(laws: Law, draw: int) -> Law:
    return Law(laws.E[draw], laws.A[draw], laws.alpha[draw], laws.B[draw], laws.beta[draw])


def _common_budgets(first: Drawn, second: Drawn, reach: float | None) -> np.ndarray:
    """Return budgets that both ladders support, evenly spaced on a logarithmic scale."""
    import numpy as np

    ladders = first.fit.ladder, second.fit.ladder
    low = max(ladder.flops.min() for ladder in ladders)
    high = min(ladder.flops.max() * (reach_of(ladder) if reach is None else reach) for ladder in ladders)
    return np.geomspace(low, max(high, low), 200)


def _crossings(first: Law, second: Law, budgets: np.ndarray) -> list[float]:
    """Return the budgets between which the order of two curves changes (geometric means of neighbours)."""
    import numpy as np

    signs = np.sign(first.frontier(budgets) - second.frontier(budgets))
    indices = np.flatnonzero(signs[1:] != signs[:-1])
    return [float(np.sqrt(budgets[index] * budgets[index + 1])) for index in indices]
