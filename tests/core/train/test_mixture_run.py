"""A mixture in a real run has the same losses on every layout, also after a resume; a bad shard is reported once,
whichever rank read it.
"""

import json
import shutil

import pytest

from titan_hydra.core.job.run.checkpoints import complete
from titan_hydra.experiments.compose.compose import compose_job

SIX = (
    "debug=tiny",
    "precision=fp32",
    "steps=6",
    "checkpoint.interval=3",
    "checkpoint.keep_latest_k=0",
    "data=mixture",
    "data.global_batch=8",
    "data.max_bad_rows=1",
    "data.shuffle_buffer=3",
)


@pytest.fixture
def mixture(tmp_path):
    """Return overrides that mix the embedded corpus with shards, of which one has a bad row."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(4):
        lines = [json.dumps({"text": f"shard {number} row {row} " * (row + 1)}) for row in range(10)]
        (shards / f"{number}.jsonl").write_text("\n".join([*lines[:3], '{"text'] if number == 2 else lines))
    return f"+data.mixture={{manual: {{weight: 0.5, name: embedded}}, own: {{weight: 1, name: text_files, path: {shards}}}}}"


def test_a_mixture_goes_on_on_other_ranks(run_job, mixture, tmp_path):
    whole = run_job(compose_job(*SIX, mixture, "parallelism=single", "data.local_batch=8"))
    two = run_job(compose_job(*SIX, mixture, "parallelism=fsdp", "gpus=2", "data.local_batch=2"))
    cut = tmp_path / "cut"
    shutil.copytree(two, cut)
    shutil.rmtree(complete(cut / "checkpoints")[-1])
    (cut / "result.json").unlink()
    resumed = run_job(compose_job(*SIX, mixture, "parallelism=tp", "data.local_batch=8"), cut)
    for run in (whole, two, resumed):
        assert run_job.losses(run) == pytest.approx(run_job.losses(whole), rel=1e-5)
        (event,) = [row for row in run_job.rows(run, "events") if row["event"] == "bad_row"]
        assert (
            event["row"].endswith("2.jsonl:4")
            and "2.jsonl:4: not a JSON line" in event["reason"]
            and event["bad_rows"] == 1
        )
    assert "warning: a row is left out: " in (two / "attempts/1/rank_0.log").read_text()


def test_one_bad_row_too_many_stops_every_rank(run_job, mixture):
    job = compose_job(*SIX, mixture, "parallelism=tp", "data.local_batch=8")
    job.data.max_bad_rows = 0  # on the command line, the launcher would refuse it
    run = run_job(job, expect=2)
    assert "2.jsonl:4: not a JSON line" in (run / "attempts/1/error_1").read_text()
