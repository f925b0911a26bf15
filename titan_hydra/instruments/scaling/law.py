"""The law L(N, D) = E + A / N^alpha + B / D^beta, and its robust fit to measured losses.

The objective is that of Chinchilla's third approach (arXiv 2203.15556, section 3.3): Huber's loss of the residuals in
log space, where log L is the log-sum-exp of the three terms. Its minimum is found from a grid of starts by scipy's
trust-region method; L-BFGS may stop before the minimum (arXiv 2404.10102). Huber's threshold follows the measured
noise.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

PARAMETERS = 5  # of the law
FEWEST = PARAMETERS + 1  # minimum number of cells for a fit
# minimum number of different sizes, and of different numbers of tokens: A and alpha follow from two differences
KINDS = 3
APART = 1.2  # smallest ratio of two numbers of tokens, for one size, that counts as a difference
FIRST_DELTA = 1e-3  # Chinchilla's threshold; used in the first fit, whose residuals give the noise
HUBER = 1.345  # threshold in standard deviations: 95 % as precise as least squares if the noise is normal
LEAST_NOISE = 1e-6  # smallest threshold, for losses without noise
EXPONENTS = (0.02, 3.0)  # bounds of alpha and beta
GRID = (0.1, 0.25, 0.5, 1.0)  # starts of alpha and of beta
# width of the range in which the logarithm of a term, in the middle of the ladder, is searched
SPREAD = 8.0
MOST_STEPS = 100  # limit of a search: an undetermined number would drift to its bound in ever smaller steps
STARTS = 3  # number of searches for a minimum; they start from the best points of the grid


@dataclass(frozen=True)
class Law:
    """The five numbers of a law, or of many laws as arrays. The methods, too, take numbers or arrays."""

    E: Any
    A: Any
    alpha: Any
    B: Any
    beta: Any

    def loss(self, parameters: Any, tokens: Any) -> Any:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def best_size(self, flops: Any) -> Any:
        """Return the number of parameters with the lowest loss among the runs of 6 N D = `flops`."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        return (ratio * (flops / 6) ** self.beta) ** (1 / (self.alpha + self.beta))

    def frontier(self, flops: Any) -> Any:
        """Return the loss of the best size for `flops`."""
        size = self.best_size(flops)
        return self.loss(size, flops / 6 / size)


@dataclass(frozen=True)
class Ladder:
    """What is fitted: arrays with an entry for each cell. The loss of a cell is a mean over `runs` seeds."""

    parameters: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    runs: np.ndarray

    @property
    def flops(self) -> np.ndarray:
        return 6 * self.parameters * self.tokens

    def only(self, chosen: Any) -> Ladder:
        """Return the ladder of the chosen cells (an index or a mask)."""
        return Ladder(self.parameters[chosen], self.tokens[chosen], self.losses[chosen], self.runs[chosen])


@dataclass(frozen=True)
class LawFit:
    """A law with what its bootstrap needs: the ladder, the residuals in log space, the noise of a single run, and
    Huber's threshold.
    """

    ladder: Ladder
    law: Law
    residuals: np.ndarray  # (log of the loss - log of the law) * sqrt(runs)
    noise: float  # standard deviation of a single run's residual, corrected for the five fitted numbers
    delta: float
    unknowns: np.ndarray  # the unknowns of `Problem` at the minimum
    # the law's numbers that are at a bound: the runs do not determine these numbers
    at_bound: tuple[str, ...] = ()

    @property
    def freedom(self) -> int:
        return len(self.residuals) - PARAMETERS


def require_scipy() -> None:
    """Raise ConfigError if scipy is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "titan scale needs scipy, which is not installed: pip install 'titan_hydra[scaling]'"
        ) from error


def why_not(ladder: Ladder) -> str | None:
    """Return why a ladder cannot determine the five numbers of a law; None if no reason is found."""
    import numpy as np

    cells = len(ladder.losses)
    if cells < FEWEST:
        return (
            f"{cells} cells with a held-out loss, and a law has {PARAMETERS} numbers; it needs at least {FEWEST} cells"
        )
    sizes, budgets = np.unique(ladder.parameters), np.unique(ladder.tokens)
    for quantity, values in (("sizes", sizes), ("numbers of tokens", budgets)):
        if len(values) < KINDS:
            return f"{len(values)} different {quantity}, and a law needs at least {KINDS}"
    several = 0
    for size in sizes:
        tokens_of_size = ladder.tokens[ladder.parameters == size]
        several += tokens_of_size.max() >= APART * tokens_of_size.min()
    if several < 2:
        return (
            f"only {several} of {len(sizes)} sizes have several numbers of tokens, so the effects of size and tokens cannot "
            "be told apart; train at least two sizes on several"
        )
    return None


def fit_law(ladder: Ladder) -> LawFit:
    """Fit a law. Raises ConfigError if the ladder does not determine one."""
    import numpy as np

    if reason := why_not(ladder):
        raise ConfigError(reason)
    require_scipy()
    problem = Problem(ladder)
    logs = np.log(ladder.losses)
    best = min(
        (problem.minimum(start, logs, FIRST_DELTA) for start in problem.starts(STARTS)), key=lambda minimum: minimum[1]
    )
    residuals = problem.residuals(best[0], logs)
    delta = max(HUBER * 1.4826 * float(np.median(np.abs(residuals))), LEAST_NOISE)
    solved = problem.minimum(best[0], logs, delta)[0]
    residuals = -problem.residuals(solved, logs)
    noise = float(np.sqrt(np.sum(residuals**2) / (len(residuals) - PARAMETERS)))
    return LawFit(
        ladder=ladder,
        law=Law(*map(float, astuple(problem.law(solved)))),
        residuals=residuals,
        noise=noise,
        delta=delta,
        unknowns=solved,
        at_bound=problem.at_bound(solved),
    )


class Problem:
    """The minimization for a ladder. Its unknowns are log E and, for each of N and D, the exponent and the logarithm of
    the term in the middle of the ladder.
    """

    def __init__(self, ladder: Ladder) -> None:
        """Centre the logarithms of N and D, and bound the unknowns (log E; term and exponent of N; term and exponent of
        D).
        """
        import numpy as np

        self.ladder = ladder
        self.middle = np.mean(np.log(ladder.parameters)), np.mean(np.log(ladder.tokens))
        self.x = np.log(ladder.parameters) - self.middle[0]
        self.y = np.log(ladder.tokens) - self.middle[1]
        self.root = np.sqrt(ladder.runs)
        top = float(np.log(ladder.losses.max())) + 1
        self.low = np.array([top - SPREAD, top - SPREAD, EXPONENTS[0], top - SPREAD, EXPONENTS[0]])
        self.high = np.array([top, top, EXPONENTS[1], top, EXPONENTS[1]])

    def terms(self, unknowns: np.ndarray) -> np.ndarray:
        """Return the logarithms of the three terms of each cell."""
        import numpy as np

        e, a, alpha, b, beta = unknowns
        return np.stack([np.full_like(self.x, e), a - alpha * self.x, b - beta * self.y])

    def residuals(self, unknowns: np.ndarray, logs: np.ndarray) -> np.ndarray:
        import numpy as np

        return self.root * (np.logaddexp.reduce(self.terms(unknowns)) - logs)

    def slopes(self, unknowns: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Return the derivative of each residual by each unknown."""
        import numpy as np

        terms = self.terms(unknowns)
        e, a, b = np.exp(terms - np.logaddexp.reduce(terms))
        return self.root[:, None] * np.stack([e, a, -a * self.x, b, -b * self.y], axis=1)

    def minimum(self, start: np.ndarray, logs: np.ndarray, delta: float) -> tuple[np.ndarray, float]:
        """Return the unknowns at a minimum of Huber's loss, and that loss."""
        import numpy as np
        from scipy.optimize import least_squares

        inside = np.clip(start, self.low + 1e-6, self.high - 1e-6)
        solution = least_squares(
            self.residuals,
            inside,
            self.slopes,
            (self.low, self.high),
            x_scale="jac",
            loss="huber",
            f_scale=delta,
            args=(logs,),
            ftol=1e-7,
            max_nfev=MOST_STEPS,
        )
        return solution.x, float(solution.cost)

    def starts(self, number: int) -> list[np.ndarray]:
        """Return the best points of a grid of exponents. For each pair of exponents, the three terms are fitted by
        least squares of the relative residuals; no term may be negative.
        """
        import numpy as np
        from scipy.optimize import nnls

        candidates = []
        for alpha in GRID:
            for beta in GRID:
                columns = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
                sizes, error = nnls(columns / self.ladder.losses[:, None], np.ones_like(self.x))
                e, a, b = np.log(np.maximum(sizes, 1e-3))
                candidates.append((error, np.array([e, a, alpha, b, beta])))
        return [start for _, start in sorted(candidates, key=lambda candidate: candidate[0])[:number]]

    def law(self, unknowns: np.ndarray) -> Law:
        """Return the law of these unknowns. For a matrix with a row for each law, the numbers of the law are arrays."""
        import numpy as np

        e, a, alpha, b, beta = np.moveaxis(unknowns, -1, 0)
        return Law(np.exp(e), np.exp(a + alpha * self.middle[0]), alpha, np.exp(b + beta * self.middle[1]), beta)

    def at_bound(self, unknowns: np.ndarray) -> tuple[str, ...]:
        import numpy as np

        near = np.minimum(unknowns - self.low, self.high - unknowns) < 1e-3
        return tuple(name for name, is_near in zip(("E", "A", "alpha", "B", "beta"), near, strict=True) if is_near)
