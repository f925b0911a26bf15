"""Which trial goes on to the next length: decided from the values alone."""

import pytest

from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.search.journal import OPEN, SearchTrial
from titan_hydra.instruments.search.keys import OptunaSearch
from titan_hydra.instruments.search.rungs import Rungs, hyperband, not_the_longer_run, rungs_of


def trial(number: int, **values: float) -> SearchTrial:
    found = {int(steps[1:]): value for steps, value in values.items()}
    return SearchTrial(number, [f"a={number}"], {}, OPEN, found, [], dict.fromkeys(found, "run"), "")


def test_the_best_of_a_length_goes_on_and_a_waiting_one_may_follow():
    rungs = Rungs((1, 3, 9), 3)
    trials = [trial(0, _1=5.0), trial(1, _1=4.0)]
    assert rungs.promoted(trials) is None, "of two, a third is none"
    trials.append(trial(2, _1=6.0))
    assert rungs.promoted(trials) is trials[1] and rungs.after(trials[1]) == 3
    assert rungs.promoted(trials, {1}) is None, "it runs already"
    trials[1] = trial(1, _1=4.0, _3=3.0)
    trials += [trial(3, _1=9.0), trial(4, _1=9.0), trial(5, _1=9.0)]
    assert rungs.promoted(trials) is trials[0], "the second of six, which waited"
    trials[0], trials[2] = trial(0, _1=5.0, _3=2.0), trial(2, _1=6.0, _3=2.5)
    assert rungs.promoted(trials) is trials[0], "the greatest length comes first"


def test_the_best_are_trained_to_the_end_when_no_more_are_drawn():
    rungs = Rungs((1, 3, 9), 3)
    trials = [trial(0, _1=5.0), trial(1, _1=4.0, _3=7.0), trial(2, _1=3.0)]
    assert rungs.finalist(trials, (), 1) is trials[1], "a greater length goes first"
    assert rungs.finalist(trials, {1}, 2) is trials[2]
    assert rungs.finalist([trial(0, _1=5.0, _3=4.0, _9=3.0)], (), 3) is None


def test_brackets_share_the_compute():
    brackets = hyperband(3, 3)
    assert [brackets.count(index) for index in range(3)] == [9, 5, 3] and brackets[0] == 0
    rungs = Rungs((1, 3, 9), 3, brackets)
    late = [number for number in range(17) if rungs.first(trial(number)) == 1]
    trials = [trial(0, _1=1.0, _3=1.0), *(trial(number, _3=9.0) for number in late[:2])]
    assert rungs.promoted(trials) is None, "values of two brackets are not compared"


@pytest.mark.parametrize(
    ("steps", "first", "lengths"), [(90, None, (10, 30, 90)), (100, 20, (20, 60, 100)), (100, None, (12, 36, 100))]
)
def test_lengths_are_powers_of_the_factor(steps, first, lengths):
    job = compose_job(f"steps={steps}", "lr_scheduler.warmup_steps=1")
    assert rungs_of(job, OptunaSearch("optuna", pruner="halving", first_steps=first)).steps == lengths
    assert rungs_of(job, OptunaSearch("optuna")).steps == (steps,)


@pytest.mark.parametrize(("schedule", "carried"), [("constant", True), ("wsd", True), ("cosine", False)])
def test_a_schedule_that_depends_on_the_end_is_refused(schedule, carried):
    job = compose_job("steps=90", f"lr_scheduler={schedule}", "lr_scheduler.warmup_steps=5")
    assert (not_the_longer_run(job, Rungs((10, 30, 90), 3)) is None) is carried
    assert "warm-up" in not_the_longer_run(job, Rungs((5, 30, 90), 3)) or not carried
