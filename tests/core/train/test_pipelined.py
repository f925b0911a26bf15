"""Test a whole pipelined run: its loss on the console, validation through the schedule, and mixed precision."""

import json

import pytest

from titan_hydra.experiments.compose.compose import compose_job

FOUR = (
    "debug=tiny",
    "model.n_layers=4",
    "steps=4",
    "checkpoint.interval=2",
    "checkpoint.keep_latest_k=0",
    "data.global_batch=8",
)
LAYOUTS = {
    "one": ("parallelism=single", "data.local_batch=8"),
    "pp 2": ("parallelism=pp", "data.local_batch=8"),
    "pp 2, zbv": ("parallelism=pp", "pp_schedule=zbv", "data.local_batch=4"),
    "dp 2, pp 2": ("parallelism=fsdp_pp", "gpus=4", "data.local_batch=4"),
}


def job_on(layout, *overrides):
    return compose_job(*FOUR, "precision=fp32", *LAYOUTS[layout], *overrides)


@pytest.fixture(scope="module")
def known():
    return {}  # the results of one process, computed once


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipe_v"])
def test_validation_goes_through_the_schedule_and_leaves_training_alone(run_job, tmp_path, known, schedule):
    often = ("validation=on", "validation.interval=1", "validation.steps=1", "checkpoint=off")
    if not known:
        known["one"] = run_job(job_on("one", *often), tmp_path / "one")
        known |= {key: run_job.losses(known["one"], key) for key in ("loss", "validation_loss")}
    layout = "dp 2, pp 2" if schedule in ("1f1b", "zbv") else "pp 2"
    directory = run_job(job_on(layout, *often, f"pp_schedule={schedule}"))
    for key in ("loss", "validation_loss"):
        assert len(known[key]) == 4
        assert run_job.losses(directory, key) == pytest.approx(known[key], rel=1e-5), key
    # whichever rank has the last stage
    assert "step 4" in (directory / "attempts/1/rank_0.log").read_text().replace(" 4/4", " 4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"), [("pp 2", "bf16"), ("dp 2, pp 2", "bf16"), ("pp 2, zbv", "bf16_full")]
)
def test_what_goes_between_stages_has_the_declared_dtype_and_shape(run_job, monkeypatch, layout, precision):
    # torch then compares every activation and gradient with the declared shape
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    directory = run_job(compose_job(*FOUR, "checkpoint=off", *LAYOUTS[layout], f"precision={precision}"))
    assert run_job.losses(directory)[4] < run_job.losses(directory)[1]


def test_a_run_records_what_each_of_its_ranks_computes(run_job):
    directory = run_job(job_on("pp 2, zbv", "checkpoint=off", "steps=1"))
    ranks = json.loads((directory / "schedule.json").read_text())["ranks"]
    assert [{action["stage"] for action in actions} for actions in ranks] == [{0, 3}, {1, 2}]  # stages in a V
    for actions in ranks:
        forwards = [(action["stage"], action["microbatch"]) for action in actions if action["kind"] == "F"]
        assert len(forwards) == len(set(forwards)) == 2 * 4
        assert len(actions) == 3 * 8
        assert {action["kind"] for action in actions} <= set("FBIW")
