"""A checkpoint saved on one layout continues on any other, with weights, optimizer and data, in training and
validation.

The vocabulary has 4,099 entries, so that ranks share its rows unevenly.
"""

import json

import pytest
import torch

from titan_hydra.core.data.loader import merge
from titan_hydra.core.job.run.checkpoints import complete, newest
from titan_hydra.experiments.compose.compose import compose_job, later_wins

from .steps import cut_back, tensors

FOUR = (
    "debug=tiny",
    "precision=fp32",
    "model.n_layers=4",
    "steps=4",
    "checkpoint.interval=2",
    "checkpoint.keep_latest_k=0",
    "model.vocab_size=4099",
    "data.global_batch=8",
    "validation=on",
    "validation.interval=2",
    "validation.steps=1",
)
LAYOUTS = {  # the default suite loads each on the next, in this order
    "single": ("parallelism=single", "data.local_batch=8"),
    "fsdp 4": ("parallelism=fsdp", "gpus=4", "data.local_batch=2"),
    "tp 2, fsdp 2": ("parallelism=fsdp_tp", "parallelism.tp=2", "gpus=4", "data.local_batch=4", "ac=full"),
    "pp 2, fsdp 2": ("parallelism=fsdp_pp", "gpus=4", "data.local_batch=4"),
    "cp 2": ("parallelism=cp", "parallelism.cp_rotate=alltoall", "data.local_batch=8"),
    "fsdp 2": ("parallelism=fsdp", "gpus=2", "data.local_batch=4"),
    "pp 2, tp 2, zbv": ("parallelism=pp", "parallelism.tp=2", "pp_schedule=zbv", "data.local_batch=4"),
    "8 ranks": ("parallelism=fsdp_tp", "parallelism.tp=2", "parallelism.pp=2", "gpus=8", "data.local_batch=4"),
}
NAMES = list(LAYOUTS)
FEW = {("fsdp 4", "tp 2, fsdp 2"), ("pp 2, fsdp 2", "cp 2"), ("cp 2", "fsdp 2"), ("fsdp 2", "pp 2, tp 2, zbv")}
PAIRS = [
    pytest.param(first, then, marks=[] if (first, then) in FEW else pytest.mark.slow)
    for first in NAMES
    for then in NAMES
    if first != then
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


def place_in_data(run):
    """Return the position in the data of every slot of the global batch at the end of a run, whichever rank has the
    slot.
    """
    ranks = [json.loads(file.read_text())["data"] for file in sorted(newest(run / "checkpoints").glob("rank_*.json"))]
    return merge(ranks)


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_a_checkpoint_goes_on_on_any_layout(run_job, tmp_path, folder, first, then):
    """If AdamW's moments were lost, or a sample were seen twice, the next losses would be far off."""
    whole = folder / first
    if not whole.exists():
        run_job(compose_job(*FOUR, *LAYOUTS[first]), whole)
    resumed = run_job(compose_job(*FOUR, *LAYOUTS[then]), cut_back(whole, 2, tmp_path / "cut"))
    for key, steps in (("loss", [1, 2, 3, 4]), ("validation_loss", [2, 4])):
        assert list(run_job.losses(resumed, key)) == steps
        assert run_job.losses(resumed, key) == pytest.approx(run_job.losses(whole, key), rel=1e-5)
    assert place_in_data(resumed) == place_in_data(whole)


SPLIT = ("precision=bf16", "optimizer.masters=split")
WAYS = {  # between split and whole masters, and from one layout to another
    "split to whole": (("fsdp 2", SPLIT), ("pp 2, fsdp 2", SPLIT[:1])),
    "whole to split": (("fsdp 2", SPLIT[:1]), ("tp 2, fsdp 2", SPLIT)),
    "split to split": (("fsdp 2", SPLIT), ("single", SPLIT)),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_hold_whole_masters(run_job, tmp_path, way):
    """With a learning rate of 0 the weights do not change. After two more steps each weight has the same bits in
    float32, in whichever form it is held.
    """
    (first, before), (then, after) = WAYS[way]
    run = run_job(compose_job(*later_wins(*FOUR, *LAYOUTS[first], *before, "steps=2")), tmp_path / "run")
    (run / "result.json").unlink()
    resumed = run_job(compose_job(*later_wins(*FOUR, *LAYOUTS[then], *after, "optimizer.lr=0")), run)
    saved = [tensors(step, "model.") for step in complete(resumed / "checkpoints")]
    assert len(saved) == 2
    assert {weight.dtype for weight in saved[0].values()} == {torch.float32}
    assert any((weight != weight.bfloat16()).any() for weight in saved[0].values())
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_split_and_whole_masters_go_on_from_each_other(run_job, tmp_path, way):
    """The optimizer's moments are loaded too; without these the next losses would be off by some percent."""
    (first, before), (then, after) = WAYS[way]
    whole = run_job(compose_job(*later_wins(*FOUR, *LAYOUTS[first], *before)), tmp_path / "whole")
    resumed = run_job(compose_job(*later_wins(*FOUR, *LAYOUTS[then], *after)), cut_back(whole, 2, tmp_path / "cut"))
    assert run_job.losses(resumed) == pytest.approx(run_job.losses(whole), rel=1e-4)
