"""Test the fit of a law: a known law is recovered, outliers do little, and a ladder that cannot determine a law is
refused.
"""

from dataclasses import astuple

import numpy as np
import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.instruments.scaling.law import FIRST_DELTA, Ladder, Law, Problem, fit_law

SEEDS = 12
WIDE = {"sizes": 8, "multiples": (5, 10, 20, 40, 80), "high": 3e9}


def test_a_law_is_evaluated_as_written():
    """Exponents and terms belong to parameters and tokens, not the other way round."""
    law = Law(1.0, 8.0, 0.5, 27.0, 1 / 3)
    assert law.loss(64.0, 27.0) == pytest.approx(1 + 8 / 8 + 27 / 3)


def test_a_law_without_noise_is_recovered(synthetic, chinchilla):
    assert astuple(fit_law(synthetic(0, noise=0.0)).law) == pytest.approx(astuple(chinchilla), rel=1e-3)


@pytest.mark.parametrize("noise", [0.005, 0.01])
def test_chinchillas_law_is_recovered_from_noisy_losses(synthetic, chinchilla, noise):
    """The exponents and E are within 3 % over the seeds, and every prediction ten times beyond the ladder is."""
    laws = [fit_law(synthetic(seed, noise, **WIDE)).law for seed in range(SEEDS)]
    for name in ("E", "alpha", "beta"):
        assert np.median([getattr(law, name) for law in laws]) == pytest.approx(getattr(chinchilla, name), rel=0.03)
    true = chinchilla.loss(1e10, 8e11)
    assert [float(law.loss(1e10, 8e11)) for law in laws] == pytest.approx([true] * SEEDS, rel=0.03)


def test_outliers_do_little(synthetic, chinchilla):
    """Two runs that failed to learn well would move a fit of least squares by many per cent."""
    ladder = synthetic(3, noise=0.002)
    losses = ladder.losses.copy()
    losses[[4, 17]] *= 1.3
    law = fit_law(Ladder(ladder.parameters, ladder.tokens, losses, ladder.runs)).law
    assert law.loss(1e9, 2e10) == pytest.approx(chinchilla.loss(1e9, 2e10), rel=0.02)


def test_no_lbfgs_from_the_grid_finds_a_lower_minimum(synthetic):
    """The minimum is the one that Chinchilla's own method finds: L-BFGS from a grid of starts."""
    from scipy.optimize import minimize

    problem, logs = Problem(synthetic(5)), np.log(synthetic(5).losses)

    def huber(unknowns):
        size = np.abs(problem.residuals(unknowns, logs)) / FIRST_DELTA
        return float(np.sum(np.where(size <= 1, size**2 / 2, size - 0.5)))

    starts = problem.starts(6)
    ours = min(huber(problem.minimum(start, logs, FIRST_DELTA)[0]) for start in starts[:3])
    bounds = list(zip(problem.low, problem.high, strict=True))
    theirs = min(minimize(huber, start, method="L-BFGS-B", bounds=bounds).fun for start in starts)
    assert ours <= theirs * 1.001


def test_a_mean_over_seeds_weighs_more(synthetic, chinchilla):
    ladder = synthetic(7, noise=0.02)
    exact = chinchilla.loss(ladder.parameters, ladder.tokens)
    sure = np.arange(len(exact)) % 2 == 0  # every other cell is exact, as the mean over very many seeds would be
    losses = np.where(sure, exact, ladder.losses)
    fitted = [
        fit_law(Ladder(ladder.parameters, ladder.tokens, losses, np.where(sure, runs, 1))).law for runs in (1, 400)
    ]
    off = [abs(float(law.loss(1e9, 2e10)) / chinchilla.loss(1e9, 2e10) - 1) for law in fitted]
    assert off[1] < 0.003 and off[1] < off[0]


def test_the_best_size_is_the_lowest_of_its_budget(chinchilla):
    sizes = np.geomspace(1e8, 1e12, 4001)
    lowest = sizes[np.argmin(chinchilla.loss(sizes, 1e22 / 6 / sizes))]
    assert chinchilla.best_size(1e22) == pytest.approx(lowest, rel=0.01)
    assert chinchilla.frontier(1e22) <= chinchilla.loss(sizes, 1e22 / 6 / sizes).min()


def grid(sizes, budgets):
    parameters, tokens = (one.ravel() for one in np.meshgrid(sizes, budgets, indexing="ij"))
    return Ladder(parameters, tokens, 3 + 1e3 / parameters**0.5, np.ones(len(tokens)))


@pytest.mark.parametrize(
    ("ladder", "reason"),
    [
        (grid([1e6, 2e6, 4e6, 8e6, 16e6], [1e8]), "5 cells"),
        (grid([1e6], [1e8, 2e8, 3e8, 4e8, 5e8, 6e8]), "1 different sizes"),
        (grid([1e6, 2e6, 4e6], [1e8, 2e8]), "2 different numbers of tokens"),
    ],
)
def test_a_ladder_that_determines_no_law_is_refused(ladder, reason):
    with pytest.raises(ConfigError, match=reason):
        fit_law(ladder)


def test_tokens_that_follow_the_size_are_refused():
    sizes = np.geomspace(1e6, 1e8, 7)
    with pytest.raises(ConfigError, match="cannot be told apart"):
        fit_law(Ladder(sizes, 20 * sizes, 3 + 1e3 / sizes**0.5, np.ones(7)))
