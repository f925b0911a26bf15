"""A loss curve that differs from the baseline's only by rounding is in the baseline's band. The curve of a run that
learns something else is marked where it leaves the band.
"""

import math
import random

import pytest

RESULT = {"tokens_per_second": 100.0}


def curve(steps=200, noise=0.1):
    """Return a typical loss curve with the noise of batches, which is the same for all runs, as all see the same data."""
    batches = random.Random(0)
    return [3 + 6 * math.exp(-step / 40) + batches.gauss(0, noise) for step in range(steps)]


def report(sweep, capsys, own, precision=None, reference=None):
    sweep.cell("base", {"precision.compute_dtype": "bfloat16"}, losses=reference or curve(), result=RESULT)
    sweep.cell(
        "own",
        {"precision.compute_dtype": "bfloat16"} | (precision or {}),
        losses=own,
        result=RESULT | {"tokens_per_second": 150.0},
    )
    status, out, _ = sweep.report(capsys, "--md")
    assert status == 0
    return out


def test_rounding_stays_in_the_band(sweep, capsys):
    rounding = random.Random(1)
    out = report(sweep, capsys, [loss * (1 + rounding.gauss(0, 3e-4)) for loss in curve()])
    assert "| base | 100 | \N{EN DASH} |" in out
    assert "| own | 150 | +50.00 % |" in out
    assert "| baseline |" in out
    assert "| yes |" in out
    assert "left the baseline's band" not in out


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        # the loss is divided by the wrong number of tokens, which shows before any update
        (
            lambda step, loss: loss * 1.01,
            1,
        ),
        (lambda step, loss: loss * 0.98, 1),  # the loss is lower than it can be, which is wrong too
        (lambda step, loss: loss + 1e-3 * step, 26),  # the run learns more slowly
        (lambda step, loss: math.nan if step == 30 else loss, 31),
    ],
)
def test_another_curve_is_flagged_where_it_leaves(sweep, capsys, wrong, first):
    out = report(sweep, capsys, [wrong(step, loss) for step, loss in enumerate(curve())])
    assert f"NO: from step {first} |" in out
    assert f"own: the loss left the baseline's band at step {first}, " in out
    assert "whatever its speed" in out


def test_one_odd_step_is_no_departure(sweep, capsys):
    losses = curve()
    losses[100] *= 1.01
    assert "| yes |" in report(sweep, capsys, losses)


def test_other_noise_than_the_baselines_is_another_run(sweep, capsys):
    """The same weights on different data give losses that are as good on average, but not the same."""
    batches = random.Random(2)
    other = [3 + 6 * math.exp(-step / 40) + batches.gauss(0, 0.1) for step in range(1, 200)]
    assert "NO: from" in report(sweep, capsys, curve()[:1] + other)


def test_float8_is_given_more_room(sweep, capsys):
    losses = [loss * 1.003 for loss in curve()]
    assert "NO: from" in report(sweep, capsys, losses)
    sweep.cell(
        "float8", {"precision.converter": "float8", "precision.compute_dtype": "bfloat16"}, losses=losses, result=RESULT
    )
    assert sweep.report(capsys, "--md")[1].count("| yes |") == 1


def test_only_steps_that_both_have_are_compared(sweep, capsys):
    assert "| yes |" in report(sweep, capsys, curve()[:50])
