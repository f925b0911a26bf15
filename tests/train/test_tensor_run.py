"""A run under tensor parallelism, end to end: validation, and a checkpoint that another layout and another checkpointing goes on from."""
import json
import shutil

import pytest

from titan_hydra.config import compose_job
from titan_hydra.train.checkpoint import complete

FOUR = ("debug=tiny", "precision=fp32", "steps=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0", "data.global_batch=8",
        "validation=on", "validation.interval=2", "validation.steps=1")
ONE = ("parallelism=single", "data.local_batch=8")
SPLIT = ("parallelism=fsdp_tp", "gpus=4", "data.local_batch=4", "ac=full")


def losses(directory, key="loss"):
    rows = [json.loads(line) for name in ("metrics", "events") for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(ONE, SPLIT), (SPLIT, ONE)], ids=["one to four", "four to one"])
def test_losses_and_checkpoints_are_those_of_one_process(run_job, tmp_path, first, then):
    whole = run_job(compose_job(*FOUR, *first))
    shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(complete(tmp_path / "cut" / "checkpoints")[-1])
    (tmp_path / "cut" / "result.json").unlink()
    resumed = run_job(compose_job(*FOUR, *then), tmp_path / "cut")
    for key, steps in (("loss", [1, 2, 3, 4]), ("validation_loss", [2, 4])):
        assert list(losses(resumed, key)) == steps
        assert losses(resumed, key) == pytest.approx(losses(whole, key), rel=1e-5), key
