"""Test the goodput of a run: each step counts once, however much time went into lost steps, compiling, saving or
waiting.
"""

import json
from pathlib import Path

import pytest

from titan_hydra.core.job.run.stretches import goodput_of, useful_seconds


def rows(*entries: tuple) -> list[dict]:
    return [
        {"step": step, "loss": 1.0, "step_seconds": seconds} | ({"first_step": True} if first else {})
        for step, seconds, *first in entries
    ]


def attempt(directory: Path, number: int, started: float, ended: float | None, last: float) -> None:
    folder = directory / f"attempts/{number}"
    folder.mkdir(parents=True)
    record = {"pid": 1, "host": "here", "born": None, "started": started} | ({} if ended is None else {"ended": ended})
    (folder / "rank_0.json").write_text(json.dumps(record))
    (folder / "status.json").write_text(json.dumps({"step": 1, "time": last}))


def test_each_step_counts_once_and_compilation_does_not():
    assert useful_seconds(rows((1, 60.0, True), (10, 2.0), (20, 2.0))) == pytest.approx(20 * 2.0)
    slow = rows((1, 60.0, True), (10, 2.0), (20, 4.0), (30, 2.0))
    assert useful_seconds(slow) == pytest.approx(20 * 2.0 + 10 * 4.0), "a slow step is a step"
    resumed = rows((1, 60.0, True), (10, 2.0), (20, 2.0), (26, 90.0, True), (30, 2.0))
    assert useful_seconds(resumed) == pytest.approx(30 * 2.0), (
        "rows of 21 to 25 were lost with the process, the steps were not"
    )
    assert useful_seconds(rows((601, 60.0, True), (610, 2.0))) == pytest.approx(10 * 2.0), "begun at another run's step"


def test_a_step_time_that_nothing_tells_is_unknown():
    assert useful_seconds([]) is None and useful_seconds(rows((1, 60.0, True))) is None


def test_all_time_from_the_first_start_is_divided_by(tmp_path):
    steps = rows((1, 60.0, True), (10, 2.0), (20, 2.0))
    assert goodput_of(tmp_path, steps) is None, "no attempt has left a record"
    attempt(tmp_path, 1, started=100.0, ended=None, last=150.0)
    assert goodput_of(tmp_path, steps) == pytest.approx(40 / 50), "killed: until its last step"
    attempt(tmp_path, 2, started=400.0, ended=500.0, last=490.0)
    assert goodput_of(tmp_path, steps) == pytest.approx(40 / 400)
    assert goodput_of(tmp_path, steps, now=900.0) == pytest.approx(40 / 800)
    (tmp_path / "replicas/1").mkdir(parents=True)
    assert goodput_of(tmp_path, steps) is None, "its rows are those of one of several replica groups"
