"""A run whose sequences are split, end to end: each token of the validation counts once, mixed precision, and its checkpoints."""
import json
import shutil

import pytest

from titan_hydra.config import compose_job
from titan_hydra.train.checkpoint import complete

FOUR = ("debug=tiny", "steps=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0", "data.global_batch=8", "data.local_batch=8",
        "validation=on", "validation.interval=2", "validation.steps=1")
ONE = ("precision=fp32", "parallelism=single")
RING = ("precision=fp32", "parallelism=cp", "parallelism.cp_rotate=alltoall")


def losses(directory, key="loss"):
    rows = [json.loads(line) for name in ("metrics", "events") for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(ONE, RING), (RING, ONE)], ids=["one to cp 2", "cp 2 to one"])
def test_losses_and_checkpoints_are_those_of_one_process(run_job, tmp_path, first, then):
    """Training and validation alike; weights and optimizer state alike: with AdamW's moments lost, the next losses would be far off."""
    whole = run_job(compose_job(*FOUR, *first))
    shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(complete(tmp_path / "cut" / "checkpoints")[-1])
    (tmp_path / "cut" / "result.json").unlink()
    resumed = run_job(compose_job(*FOUR, *then), tmp_path / "cut")
    for key, steps in (("loss", [1, 2, 3, 4]), ("validation_loss", [2, 4])):
        assert list(losses(resumed, key)) == steps
        assert losses(resumed, key) == pytest.approx(losses(whole, key), rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["allgather", "ulysses"])
def test_it_learns_in_bfloat16(run_job, rotate):
    directory = run_job(compose_job(*FOUR, "checkpoint=off", "precision=bf16", "parallelism=cp", f"parallelism.cp_rotate={rotate}"))
    assert losses(directory)[4] < losses(directory)[1]
