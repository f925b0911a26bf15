"""Test runs of models with experts: checkpoints on other layouts with the biases of routers, validation, metrics."""

import json
import shutil

import pytest
import torch

from tests.core.checkpoint.steps import cut_back, tensors
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.experiments.compose.compose import compose_job

SMALL = (
    "debug=tiny",
    "precision=fp32",
    "model=deepseek_v3_debug",
    "model.dim=64",
    "model.n_layers=3",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.q_lora_rank=24",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
    "model.ffn_dim=96",
    "model.n_experts=8",
    "model.experts_per_token=2",
    "model.expert_dim=32",
    "model.router_bias_update_rate=0.01",
    "steps=4",
    "checkpoint.interval=2",
    "checkpoint.keep_latest_k=0",
    "data.global_batch=8",
    "metrics.log_every=1",
)
EP4 = ("parallelism=fsdp_ep", "parallelism.ep=4", "gpus=4", "data.local_batch=2")
OTHERS = {
    "one process": ("parallelism=single", "data.local_batch=8"),
    "ep 2, tp 2": ("parallelism=tp", "parallelism.tp=2", "parallelism.ep=2", "gpus=2", "data.local_batch=8"),
    "pp 2, ep 2": ("parallelism=fsdp_pp_ep", "gpus=4", "data.local_batch=4"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved") / "ep4"


@pytest.mark.parametrize("layout", OTHERS)
def test_a_checkpoint_of_experts_goes_on_on_any_layout(run_job, tmp_path, saved, layout):
    """The checkpoint includes the biases (#1226). The loaded weights are bitwise the saved ones, and losses continue as
    without the change of layout.
    """
    if not saved.exists():
        run_job(compose_job(*SMALL, *EP4), saved)
    cut = cut_back(saved, 2, tmp_path / "cut")
    loaded = tmp_path / "loaded"
    shutil.copytree(cut, loaded)
    run_job(compose_job(*SMALL, *OTHERS[layout], "steps=2", "checkpoint.export_dtype=float32"), loaded)
    before, after = tensors(newest(cut / "checkpoints"), "model."), tensors(loaded / "export", "model.")
    biases = [name for name in before if name.endswith("router.bias")]
    assert len(biases) == 2
    assert any(before[name].any() for name in biases)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    resumed = run_job(compose_job(*SMALL, *OTHERS[layout]), cut)
    assert run_job.losses(resumed) == pytest.approx(run_job.losses(saved), rel=1e-5)


def test_a_validation_leaves_the_biases_alone(run_job, tmp_path):
    """A validation is not training (#4148)."""
    often = run_job(compose_job(*SMALL, *EP4, "validation=on", "validation.interval=1", "validation.steps=2"))
    never = run_job(compose_job(*SMALL, *EP4, "validation=off"))
    one, other = (tensors(newest(run / "checkpoints"), "model.") for run in (often, never))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_tell_how_even_the_experts_were(run_job):
    plain = run_job.rows(run_job(compose_job(*SMALL, *EP4)))
    assert all(1 < row["moe_imbalance"] <= 4 and 1 <= row["moe_imbalance_ranks"] <= 4 for row in plain)
    assert all(0 < row["moe_entropy"] <= 2.08 for row in plain)
    assert not any("balanced_experts" in row for row in plain)
    run = run_job(compose_job(*SMALL, *OTHERS["pp 2, ep 2"], "debug.balance_experts=true"))
    forced = run_job.rows(run)
    assert all(row["moe_imbalance"] == row["moe_imbalance_ranks"] == 1 and row["balanced_experts"] for row in forced)
    assert json.loads((run / "result.json").read_text())["balanced_experts"]
