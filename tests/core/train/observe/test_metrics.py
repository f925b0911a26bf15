"""Test the fields that a run records, what they mean, and that wandb's copy continues at the same step after a resume."""

import json
import re

import pytest

from tests.core.checkpoint.steps import cut_back
from tests.kits import wandb_file
from titan_hydra.core.models import decoder_flops, decoder_parameters
from titan_hydra.core.train.observe.metrics import Clock, console_line, event_line, truncate
from titan_hydra.core.train.observe.stragglers import OnHost
from titan_hydra.experiments.compose.compose import compose_job

ROW = {
    "step",
    "loss",
    "loss_mean",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_gib",
    "memory_reserved_gib",
    "step_seconds",
    "data_seconds",
    "tokens_seen",
    "time",
}
RESULT = {
    "status",
    "hash",
    "name",
    "overrides",
    "steps",
    "final_loss",
    "tokens_per_second",
    "tokens_per_second_iqr",
    "measured_steps",
    "memory_gib",
    "mfu",
    "seconds",
    "gpu_hours",
    "goodput",
    "world_size",
    "versions",
    "git_sha",
    "parameters",
    "flops_per_token",
    "tokens",
    "lowest_validation_loss",
    "lowest_validation_step",
}


def events(directory):
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def shown(line):
    """Return a line without the time of day at its beginning."""
    assert re.match(r"\d\d:\d\d:\d\d  ", line)
    return line[10:]


def test_lines_of_events_have_the_style_of_steps():
    saved = {"event": "checkpoint", "step": 8, "seconds": 0.934, "seconds_held": 0.934}
    assert shown(event_line(saved, 72)) == "step  8/72  checkpoint saved  0.93 s"
    assert event_line(saved | {"seconds_held": 0.1}, 72).endswith("0.93 s, training waited 0.10 s")
    checked = {"event": "validation", "step": 8, "validation_loss": 7.87891, "seconds": 2.07}
    assert shown(event_line(checked, 72)) == "step  8/72  validation loss 7.8789  2.07 s"
    assert event_line(checked | {"validation_loss": None}, 72).endswith("validation loss -  2.07 s")
    assert shown(event_line({"event": "bad_row", "step": 8, "row": "a:3"}, 8)) == "step 8/8  bad_row  row a:3"


def test_a_step_on_a_cpu_shows_no_tflops():
    row = dict.fromkeys(ROW, 1.0) | {"step": 1, "mfu": None, "memory_gib": None, "memory_reserved_gib": None}
    assert "tflops" not in console_line(row, 8)
    assert "1.00 tflops" in console_line(row | {"memory_reserved_gib": 2.0}, 8)


def test_rows_and_result_have_their_fields_and_agree(tiny, run_job, tmp_path):
    job = tiny(
        "steps=6",
        "metrics.log_every=2",
        "validation=on",
        "validation.interval=3",
        "validation.steps=2",
        "gpus=2",
        "data.global_batch=8",
    )
    directory = run_job(job)
    rows, result = run_job.rows(directory), json.loads((directory / "result.json").read_text())
    assert [row["step"] for row in rows] == [1, 2, 4, 6]
    assert [row.get("first_step") for row in rows] == [True, None, None, None]
    for row in rows:
        assert row.keys() >= ROW
        rate = 8 * 64 / row["step_seconds"] / 2
        assert row["tokens_per_second"] == pytest.approx(rate)
        assert row["tflops"] == pytest.approx(decoder_flops(job.model, 64, decoder_parameters(job.model)) * rate / 1e12)
        assert row["tokens_seen"] == row["step"] * 8 * 64
        assert 0 <= row["data_seconds"] <= row["step_seconds"]
        assert row["mfu"] is row["memory_gib"] is row["memory_reserved_gib"] is None, "unknown on a CPU"
    assert result.keys() >= RESULT
    assert (result["status"], result["steps"], result["measured_steps"], result["world_size"]) == ("done", 6, 5, 2)
    assert result["final_loss"] == rows[-1]["loss_mean"]
    every = run_job(
        tiny("steps=11", "metrics.log_every=1", "gpus=2", "data.global_batch=8", "validation=on", "validation.steps=1"),
        tmp_path / "every",
    )
    held_out = [event["step"] for event in events(every) if event["event"] == "validation"]
    assert held_out == [2, 4, 6, 8, 10, 11], "every tenth of the steps, rounded up, and the last"
    every = run_job.rows(every)
    losses = {row["step"]: row["loss"] for row in every}
    assert [row["loss_mean"] for row in rows] == pytest.approx(
        [losses[1], losses[2], (losses[3] + losses[4]) / 2, (losses[5] + losses[6]) / 2]
    )
    assert [(event["event"], event["step"]) for event in events(directory)] == [
        ("validation", 3),
        ("validation", 6),
        ("checkpoint", 6),
    ]
    assert result["validation_loss"] == events(directory)[1]["validation_loss"]
    lowest = min(events(directory)[:2], key=lambda event: event["validation_loss"])
    assert (result["lowest_validation_loss"], result["lowest_validation_step"]) == (
        lowest["validation_loss"],
        lowest["step"],
    )
    parameters = decoder_parameters(job.model)
    assert (result["parameters"], result["tokens"]) == (parameters, 6 * 8 * 64)
    assert result["flops_per_token"] == decoder_flops(job.model, 64, parameters)
    lines = (directory / "attempts/1/rank_0.log").read_text()
    assert "step 6/6  loss" in lines
    assert (directory / "attempts/1/rank_1.log").read_text() == "", "only rank 0 speaks"


def test_a_step_time_has_no_validation_or_checkpoint_in_it(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = Clock(OnHost())
    for _ in range(3):
        clock.start()
        now += 1
        clock.has_data()
        now += 2
        clock.stop()
        with clock.leave_out():
            now += 100  # a validation
        now += 1  # a garbage collection
    assert clock.window == [(3.0, 1.0), (4.0, 1.0), (4.0, 1.0)]
    assert clock.steps == [4.0, 4.0], "the first step is not a steady one"


def test_rows_after_the_resumed_step_are_made_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    truncate(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_not_finite_stops_every_rank_before_the_update(tiny, run_job):
    job = tiny(
        "gpus=2",
        "optimizer.lr=1e30",
        "optimizer.max_norm=0",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_steps=0",
        "steps=20",
    )
    directory = run_job(job, expect=78)
    assert "the update was not made" in (directory / "attempts/1/error_0").read_text()
    assert not (directory / "result.json").exists()


def test_wandb_offline_goes_on_in_the_same_run(tiny, run_job):
    job = tiny(
        "metrics=wandb", "checkpoint.interval=1", "checkpoint.keep_latest_k=0", "validation=on", "validation.interval=2"
    )
    directory = run_job(job)
    cut_back(directory, 3)
    run_job(job, directory)
    (folder,) = (directory / "wandb").glob("offline-run-*")
    logged = [row for file in folder.glob("*.wandb") for row in wandb_file.rows(file)]
    assert [row["_step"] for row in logged if "loss" in row] == [1, 2, 3, 4, 5]
    assert {row["_step"] for row in logged if "validation/validation_loss" in row} == {2, 4, 5}
    assert folder.name.rpartition("-")[2] == directory.name.rpartition("-")[2]
    assert len(run_job.rows(directory)) == 5


def test_tensorboard_has_every_row_once(tiny, run_job):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = tiny("metrics=tensorboard", "checkpoint.interval=1", "checkpoint.keep_latest_k=0")
    directory = run_job(job)
    cut_back(directory, 3)
    run_job(job, directory)
    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    scalars = accumulator.Scalars("loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5]
    assert [scalar.value for scalar in scalars] == pytest.approx([row["loss"] for row in run_job.rows(directory)])


def test_a_tracker_that_fails_never_stops_a_run(tiny, run_job, tmp_path):
    job = compose_job("debug=tiny", "metrics=tensorboard")
    directory = tmp_path / "run-x"
    directory.mkdir()
    (directory / "tensorboard").write_text("not a folder")
    run_job(job, directory)
    assert "tensorboard could not start and is left out" in (directory / "attempts/1/rank_0.log").read_text()
