"""Test intervals: they contain the truth as often as they claim, and nothing is predicted far beyond a ladder."""

import numpy as np
import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.instruments.scaling.bootstrap import (
    backtest,
    draw_laws,
    factor_beyond,
    judge_recipes,
    reach_of,
    require_reach,
)
from titan_hydra.instruments.scaling.law import Law, fit_law

TARGET = 6e8, 1.2e10
WITHIN, FAR = (5e7, 6e8), (6e9, 1.2e11)  # parameters and tokens, within the ladder and far beyond it
LADDERS, DRAWS = 36, 30


def test_intervals_contain_the_truth_as_often_as_they_claim(synthetic, chinchilla):
    """Of 36 intervals of 90 %, each of a ladder with its own noise, at least 28 contain a run (32 are expected). Without
    the run's noise, 25 contain a run within the ladder; without the law's uncertainty, 15 contain one far beyond it.
    """
    inside = dict.fromkeys((WITHIN, FAR), 0)
    for seed in range(LADDERS):
        drawn = draw_laws(fit_law(synthetic(seed, sizes=4, multiples=(5, 12, 30))), DRAWS, seed)
        noise = np.exp(0.01 * np.random.default_rng(9000 + seed).standard_normal())
        for target in inside:
            inside[target] += chinchilla.loss(*target) * noise in drawn.predicted(*target)
    assert min(inside.values()) >= 28, inside


@pytest.fixture(scope="module")
def drawn(synthetic):
    return draw_laws(fit_law(synthetic(1)), 40, 5)


def test_the_same_seed_draws_the_same(synthetic, drawn):
    fit = fit_law(synthetic(1))
    assert draw_laws(fit, 40, 5).predicted(*TARGET) == drawn.predicted(*TARGET)
    assert draw_laws(fit, 40, 6).predicted(*TARGET) != drawn.predicted(*TARGET)


def test_farther_predictions_are_less_sure(drawn):
    widths = [
        (one.high - one.low) / one.value for size in (3e8, 3e9, 3e10) for one in [drawn.predicted(size, 20 * size)]
    ]
    assert widths == sorted(widths) and widths[0] > 2 * 0.005


def test_reach_is_what_the_ladder_spans_and_no_more_than_a_hundred(synthetic):
    ladder = synthetic(0, sizes=3, low=1e7, high=2e7)  # 4 x in parameters times tokens, and 8 x in tokens of a size
    assert reach_of(ladder) == pytest.approx(32) and reach_of(synthetic(0)) == 100
    assert factor_beyond(ladder, 1e7, 5e7) == 1 and factor_beyond(ladder, 1e6, 4e8) == pytest.approx(10)
    assert factor_beyond(ladder, 4e7, 1.6e9) == pytest.approx(4)
    assert require_reach(ladder, 4e7, 1.6e9, None) == pytest.approx(4)
    with pytest.raises(ConfigError, match=r"100 x beyond the ladder.*support 32 x.*--reach 100"):
        require_reach(ladder, 2e8, 8e9, None)
    assert require_reach(ladder, 2e8, 8e9, 100.0) == pytest.approx(100)


def test_two_recipes_are_compared_by_their_curves(synthetic):
    """The second recipe is worse for small sizes and better for large ones; the known crossing is in its interval."""
    first, second = Law(1.7, 400.0, 0.34, 400.0, 0.28), Law(1.6, 420.0, 0.34, 420.0, 0.28)
    drawn = [draw_laws(fit_law(synthetic(4, 0.001, law=law)), 40, seed) for seed, law in enumerate((first, second))]
    budgets = np.geomspace(1e15, 1e22, 20_000)
    true = budgets[np.argmax(second.frontier(budgets) < first.frontier(budgets))]
    low, high = (judge_recipes(*drawn, flops, None) for flops in (1e16, 1e20))
    assert low.first_wins > 0.95 and high.first_wins < 0.05 and high.difference.high < 0 < low.difference.low
    (crossing,) = low.crossings
    assert crossing.low < true < crossing.high and crossing.high < 10 * crossing.low
    swapped = judge_recipes(drawn[1], drawn[0], 1e20, None)
    assert swapped.first_wins == 1 - high.first_wins


def test_a_recipe_is_not_better_than_itself(synthetic):
    drawn = [draw_laws(fit_law(synthetic(seed)), 40, seed) for seed in (11, 12)]
    verdict = judge_recipes(*drawn, 1e19, None)
    assert verdict.difference.low < 0 < verdict.difference.high and 0.01 < verdict.first_wins < 0.99


def test_a_backtest_predicts_from_smaller_runs_alone(synthetic):
    ladder = synthetic(2, 0.003)
    largest, others = backtest(ladder, 5, 30)
    assert (largest.parameters, largest.tokens) == (ladder.parameters.max(), ladder.tokens.max())
    assert largest.cells == 16 and largest.factor > 1 and largest.inside
    for one in others:
        assert one.cells == np.sum(ladder.flops < 6 * one.parameters * one.tokens * 0.999) and one.factor > 1
    with pytest.raises(ConfigError, match=r"only .* cells have enough smaller ones"):
        backtest(ladder, 30, 30)
