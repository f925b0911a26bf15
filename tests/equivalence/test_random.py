"""Random legal jobs learn the same as separate arithmetic in float64 that starts from the same weights and batches."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from titan_hydra.instruments.verify import reference
from titan_hydra.instruments.verify import verify as program
from titan_hydra.instruments.verify.judge import Outcome
from titan_hydra.instruments.verify.matrix import MATRIX
from titan_hydra.instruments.verify.sampler import draw_jobs
from titan_hydra.instruments.verify.verify import verify, verify_drawn


def check(cases):
    wrong = [outcome for outcome in verify_drawn(cases, steps=4) if not outcome.passed]
    assert not wrong, "\n".join(map(str, wrong))


def test_eight_random_jobs():
    check(draw_jobs(8, seed=0, ranks=(2, 4)))


@pytest.mark.slow
def test_sixty_random_jobs_of_a_new_seed():
    seed = random.randrange(10**6)
    print(f"titan verify --random 60 --seed {seed}")
    check(draw_jobs(60, seed))


def test_a_case_that_raises_has_failed_and_those_after_it_go_on(capfd):
    (case,) = draw_jobs(1, seed=0, ranks=(1,))
    raises = dataclasses.replace(case, name="raises", overrides=(*case.overrides, "ac=op", "ac.save_ops=[aten.nope]"))
    outcomes = verify([raises, case], steps=2)
    assert [outcome.passed for outcome in outcomes] == [False, True]
    assert "ac.save_ops=aten.nope" in outcomes[0].worst and "in the case raises" in capfd.readouterr().err


@pytest.mark.parametrize(("times", "passed"), [(1, True), (2, False)])
def test_a_case_that_crashes_a_rank_is_run_once_more(monkeypatch, times, passed):
    spawn, left = program.spawn_ranks, [times]

    def crash(ranks, function, folder, jobs):
        if function is program._run_cases and jobs[0][1].name == "crashes" and left[0]:
            left[0] -= 1
            raise program.Crashed("rank 0 was killed by signal 6")
        spawn(ranks, function, folder, jobs)

    monkeypatch.setattr(program, "spawn_ranks", crash)
    (case,) = draw_jobs(1, seed=0, ranks=(1,))
    outcomes = verify([dataclasses.replace(case, name="crashes"), case], steps=2)
    assert [outcome.passed for outcome in outcomes] == [passed, True] and left == [0]


def test_what_is_composed_is_counted_before_it_is_composed(monkeypatch, capsys):
    """The number of cases is printed before they are composed, because composing the whole matrix takes a minute."""
    monkeypatch.setattr(program, "job_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify(case for case in MATRIX[:2])
    assert capsys.readouterr().err == "2 cases and 1 reference, about 1 min on two cores\n"


def outcome_of(case, **fields):
    differences = {"loss": {"loss": 0.0}, "norm": {"norm": 0.0}, "gradients": {"a": 0.0}, "weights": {"a": 0.0}}
    return Outcome(
        **{"case": case, "differences": differences, "start": 0, "routing": 0, "drift": 0, "rounded": 0} | fields
    )


@pytest.mark.parametrize(
    ("fields", "again"),
    [
        ({"band": 1.4}, True),
        ({"band": 4.0}, False),
        ({"band": 1.4, "drift": 1}, False),
        ({"band": 1.4, "error": "a rank raised"}, False),
        ({"routing": 2, "doubtful": 1, "band": 900.0}, True),
        ({"routing": 2, "band": 900.0}, False),
    ],
)
def test_what_rounding_may_explain_is_verified_with_another_seed(monkeypatch, fields, again):
    (case,) = draw_jobs(1, seed=0, ranks=(1,))
    runs = []

    def verify_once(cases, steps):
        runs.extend(cases := list(cases))
        return [outcome_of(one, **fields if len(runs) == 1 else {}) for one in cases]

    monkeypatch.setattr(program, "verify", verify_once)
    (found,) = program.verify_drawn([dataclasses.replace(case, routing=True)], 4)
    assert found.passed == again and len(runs) == 1 + again
    if again:
        assert program.job_of(runs[1]).seed == 1000 != program.job_of(runs[0]).seed


def test_a_token_that_stands_between_two_experts_is_in_doubt():
    model = SimpleNamespace(n_experts=4, n_group=1, topk_group=1, experts_per_token=1)
    scores = torch.tensor([[[0.1, 0.5, 0.5 - 1e-7, 0.2], [0.1, 0.5, 0.4, 0.2]]], dtype=torch.float64)
    assert reference._in_doubt(scores, reference._choice(scores, model), model) == 1
