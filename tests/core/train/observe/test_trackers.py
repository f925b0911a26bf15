"""A run has its own curve at wandb: resumes and moves continue it, and no other run of the same hash writes into it."""

import json
import sys
from pathlib import Path

import pytest

from tests.kits.wandb_server import Server
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run, hash_of, newest_attempt, tracked_id
from titan_hydra.core.train.observe.trackers import open_trackers
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.runs import rundir

JOB = ("debug=tiny", "metrics=wandb", "metrics.wandb.mode=online")


@pytest.fixture
def server(monkeypatch):
    found = Server()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def claim(runs: Path, fresh: bool = False, directory: Path | None = None) -> Path:
    """Begin a run, or its next attempt, as a launcher does, and return its directory."""
    job = compose_job(*JOB, f"paths.runs={runs}")
    directory = directory or rundir.directory_of(job)
    number = newest_attempt(directory)
    if number:
        rundir.end_attempt(layout.ATTEMPT.of(directory, number))
    assert rundir.claim(directory, number + 1, job, [], fresh)
    return directory


def train(directory: Path, steps: range, loss: float, resumed_at: int = 0) -> None:
    """Log a row for each step, as rank 0 does, and keep it in metrics.jsonl."""
    rows = [{"step": step, "loss": loss} for step in steps]
    (tracker,) = open_trackers(compose_job(*JOB), Run(directory, directory / "attempts/1"), resumed_at)
    with layout.METRICS.of(directory).open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            tracker.log(row)
    tracker.close()


def test_a_resume_and_a_move_continue_the_curve(server, tmp_path):
    directory = claim(tmp_path / "runs")
    train(directory, range(1, 4), 9.0)
    train(claim(tmp_path / "runs"), range(4, 6), 8.0, resumed_at=3)
    moved = tmp_path / "elsewhere" / directory.name
    moved.parent.mkdir()
    directory.rename(moved)
    train(claim(moved.parent), range(6, 8), 7.0, resumed_at=5)
    assert server.losses() == [{1: 9.0, 2: 9.0, 3: 9.0, 4: 8.0, 5: 8.0, 6: 7.0, 7: 7.0}] and not server.warnings
    (run,) = server.runs.values()
    assert hash_of(moved) in run.about["tags"]


def test_a_run_started_anew_another_persons_and_a_repeated_baseline_have_their_own_curves(server, tmp_path):
    mine = claim(tmp_path / "mine")
    train(mine, range(1, 4), 9.0)
    train(claim(tmp_path / "mine", fresh=True), range(1, 4), 5.0)
    train(claim(tmp_path / "theirs"), range(1, 4), 4.0)
    train(claim(tmp_path / "mine", directory=tmp_path / "mine/_sweeps/x/repeat" / mine.name), range(1, 4), 3.0)
    assert server.losses() == [dict.fromkeys((1, 2, 3), loss) for loss in (9.0, 5.0, 4.0, 3.0)] and not server.warnings


def test_the_id_of_a_deleted_run_is_drawn_again(server, tmp_path):
    directory = claim(tmp_path)
    train(directory, range(1, 4), 9.0)
    server.delete(f"titan_hydra/{tracked_id(directory)}")
    train(claim(tmp_path), range(4, 6), 8.0, resumed_at=3)
    assert server.losses() == [{1: 9.0, 2: 9.0, 3: 9.0, 4: 8.0, 5: 8.0}]


def test_a_run_from_before_there_were_ids_keeps_its_hash(server, tmp_path):
    directory = claim(tmp_path)
    layout.RUN_ID.of(directory).unlink()
    assert tracked_id(claim(tmp_path)) == hash_of(directory)
