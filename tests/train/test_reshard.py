"""A checkpoint saved on one layout goes on on any other: weights, optimizer and data alike, in training and in validation."""
import shutil

import pytest

from titan_hydra.config import compose_job
from titan_hydra.train.checkpoint import complete

FOUR = ("debug=tiny", "precision=fp32", "model.n_layers=4", "steps=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0",
        "data.global_batch=8", "validation=on", "validation.interval=2", "validation.steps=1")
LAYOUTS = {
    "one": ("parallelism=single", "data.local_batch=8"),
    "dp 2, tp 2": ("parallelism=fsdp_tp", "gpus=4", "data.local_batch=4", "ac=full"),
    "pp 2, tp 2": ("parallelism=pp", "parallelism.tp=2", "data.local_batch=8"),
    "pp 2, zbv": ("parallelism=pp", "pp_schedule=zbv", "data.local_batch=4"),
    "dp 2, pp 2": ("parallelism=fsdp_pp", "gpus=4", "data.local_batch=4"),
    "cp 2": ("parallelism=cp", "parallelism.cp_rotate=alltoall", "data.local_batch=8"),
}
GOES_ON = {
    "one": ("dp 2, tp 2", "pp 2, zbv", "cp 2"),
    "dp 2, tp 2": ("pp 2, tp 2", "cp 2", "one"),
    "dp 2, pp 2": ("one",),
    "pp 2, zbv": ("dp 2, pp 2",),
    "cp 2": ("one",),
}


@pytest.mark.parametrize("first", GOES_ON)
def test_a_checkpoint_goes_on_on_any_layout(run_job, tmp_path, first):
    """With AdamW's moments lost, or a sample seen twice, the next losses would be far off."""
    whole = run_job(compose_job(*FOUR, *LAYOUTS[first]))
    for then in GOES_ON[first]:
        cut = tmp_path / then
        shutil.copytree(whole, cut)
        shutil.rmtree(complete(cut / "checkpoints")[-1])
        (cut / "result.json").unlink()
        resumed = run_job(compose_job(*FOUR, *LAYOUTS[then]), cut)
        for key, steps in (("loss", [1, 2, 3, 4]), ("validation_loss", [2, 4])):
            assert list(run_job.losses(resumed, key)) == steps, (then, key)
            assert run_job.losses(resumed, key) == pytest.approx(run_job.losses(whole, key), rel=1e-5), (then, key)
