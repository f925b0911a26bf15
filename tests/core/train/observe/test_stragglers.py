"""A rank that is slow in most rows is named, with its host, and no rank that is not."""

import json
import math
import socket

import pytest

from titan_hydra import cli
from titan_hydra.core.job.run.stragglers import slow_rank
from titan_hydra.core.train.observe.stragglers import OnHost, peers, seconds_of_collectives, slowest, without_waits
from titan_hydra.experiments.compose.compose import compose_job

# Rank 1 repeats a multiplication until it has computed for 1.3 times as long as its forward and backward took.
SLOW = """
import time, torch
forward_backward = trainer.Trainer.forward_backward
def slowed(self, batch):
    began = time.thread_time()
    share = forward_backward(self, batch)
    if rank == 1:
        until = began + 1.3 * (time.thread_time() - began)
        while time.thread_time() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    return share
trainer.Trainer.forward_backward = slowed
"""


def test_status_and_report_name_a_rank_that_is_slowed_by_a_third(launcher, capsys):
    launcher.sabotage(SLOW)
    done = launcher.run(
        *launcher.TINY, "gpus=2", "parallelism=fsdp", "steps=24", "metrics.log_every=2", "model.dim=128"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = str(launcher.folder / "runs")
    for words in (("status", "--runs", runs), ("report", runs)):
        assert cli.main([*words]) == 0
        out = capsys.readouterr().out
        assert "rank 1 needs 1." in out and f"host {socket.gethostname()}" in out, out
    cli.main(["status", "--runs", runs, "--json"])
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["slow_rank"].startswith("rank 1 needs")


def row(rank, ratio, others=1.0, **more):
    return {"slowest_rank": rank, "slowest_over_median": ratio, "others_over_median": others} | more


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row(1, 1.3)] * 8, 1),
        ([row(1, 1.3)] * 6 + [row(0, 1.3)] * 2, 1),
        ([row(1, 1.3)] * 5 + [row(0, 1.3)] * 3, None),  # slow in too few rows
        ([row(1, 1.3)] * 5, None),  # too few rows
        ([row(1, 1.05)] * 20, None),  # always the slowest, by little
        ([row(1, 1.3, others=1.2)] * 20, None),  # the others differ as much
        ([row(1, 1.3, others=1.1)] * 20, 1),
        ([row(None, None, None)] * 20, None),  # one rank
        ([row(1, 1.3)] * 20 + [row(0, 1.0, first_step=True)] + [row(0, 1.01)] * 6, None),  # of an earlier process
    ],
)
def test_a_rank_is_slow_in_most_rows_and_beyond_the_spread_of_the_others(rows, named):
    found = slow_rank(rows)
    assert (found and found.rank) == named
    if found:
        assert found.ratio == 1.3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("parallelism=single",), [[0]]),
        (("gpus=4", "parallelism=fsdp"), [[0, 1, 2, 3]]),
        (("gpus=4", "parallelism=fsdp_pp", "parallelism.pp=2"), [[0, 1], [2, 3]]),
        (("gpus=4", "parallelism=fsdp_cp", "parallelism.cp=2"), [[0, 1, 2, 3]]),
        (("gpus=4", "parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.cp_load_balance=false"), [[0, 2], [1, 3]]),
    ],
)
def test_ranks_are_compared_with_those_that_compute_the_same(words, expected):
    assert peers(compose_job("debug=tiny", "data.global_batch=8", *words)) == expected


def test_a_row_has_the_slowest_rank_of_the_stage_in_which_it_differs_most():
    sets = [[0, 1, 2], [3, 4, 5]]
    fields = slowest([1.0, 1.2, 1.0, 4.0, 4.4, 6.0], sets)
    assert fields == {
        "slowest_rank": 5,
        "slowest_over_median": pytest.approx(6 / 4.2),
        "others_over_median": pytest.approx(4.4 / 4.2),
    }
    assert set(slowest([1.0, 2.0], [[0], [1]]).values()) == {None}, "each rank has a stage of its own"
    assert set(slowest([1.0, math.nan], [[0, 1]]).values()) == {None}
    assert without_waits([0.9, 0.6, 0.8], [[0, 1, 2]], 2.0) == pytest.approx([1.7, 2.0, 1.8])


def test_a_step_counts_its_wait_for_data_and_its_cpu_time_alone(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.thread_time", lambda: now)
    own = OnHost()
    for step in range(4):
        own.begin()
        now += 100  # between the steps
        own.compute(waited=0.5)
        now += 2
        mean = own.per_step()
        now += 1  # the update
        own.end()
        own.next_step(recorded=step % 2 == 1)
        assert mean == [2.5, 3.0, 3.5, 3.5][step]


def test_collectives_of_a_step_are_added_and_unknown_if_one_is_missing():
    def entry(created, ms=None, name="nccl:all_gather", p2p=False):
        found = {"time_created_ns": created, "profiling_name": name, "is_p2p": p2p}
        return found if ms is None else found | {"duration_ms": ms}

    entries = [entry(5, 99.0), entry(10, 2.0), entry(15, 3.0), entry(16, name="gloo:all_reduce"), entry(30, 99.0)]
    assert seconds_of_collectives(entries, 10, 20) == pytest.approx(5e-3)
    assert seconds_of_collectives([*entries, entry(12, p2p=True)], 10, 20) == pytest.approx(5e-3)
    assert math.isnan(seconds_of_collectives([*entries, entry(12)], 10, 20)), "one is not complete"
    assert math.isnan(seconds_of_collectives(entries[1:], 9, 20)), "the recorder has forgotten the first"
