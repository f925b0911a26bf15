"""Adapters of experts: what they start from, what checkpoints and exports hold, and layouts that continue them. Cases of
the matrix (`lora of experts`) compare layouts with float64.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.core.checkpoint.steps import cut_back, tensors
from titan_hydra import cli
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import find_checkpoint, reader_of
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models import moe
from titan_hydra.core.parallel import lora
from titan_hydra.core.parallel.mesh import Mesh, local_part
from titan_hydra.core.train.fake import fake_world
from titan_hydra.core.train.trainer import assemble
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.plan import memory

SMALL = (
    "model=qwen3_moe_debug",
    "model.n_experts=4",
    "model.expert_dim=32",
    "data.global_batch=4",
    "optimizer.lr=0.05",
)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.experts=true")
EP = ("parallelism=fsdp", "gpus=2", "parallelism.ep=2")


@pytest.fixture
def adapted(tiny, run_job):
    """Return a base run, and the adapters of four steps on two ep ranks, saved at the second step too."""
    base = run_job(tiny(*SMALL, "steps=2", "model.vocab_size=4096", "data.local_batch=4"))
    saved = ("steps=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0", f"checkpoint.initial_load_path={base}")
    words = (*SMALL, *LORA, *saved, "model.vocab_size=4096")
    return base, run_job(tiny(*words, *EP)), words


def test_adapters_are_saved_merged_exported_and_continued(adapted, tiny, run_job, tmp_path):
    base, run, words = adapted
    stored = tensors(newest(run / "checkpoints"), "model.")
    assert all(".lora_" in name for name in stored)
    a = next(value for name, value in stored.items() if name.endswith("experts.lora_a_w1"))
    assert a.shape == (4, 4, 64)
    for name, kind, source in (("base", "hf", base), ("merged", "hf", run), ("peft", "peft", run)):
        args = ["checkpoint", "export", str(source), str(tmp_path / name), "--format", kind, "--dtype", "float32"]
        assert cli.main(args) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    peft, about = load_file(tmp_path / "peft/adapter_model.safetensors"), tmp_path / "peft/adapter_config.json"
    assert json.loads(about.read_text())["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    named = {name.removeprefix("base_model.model.").replace(".lora_A", "") for name in peft if ".lora_A" in name}
    assert moved == named and sum(".experts.3." in name for name in named) == 6
    for weight in sorted(named):
        stem = f"base_model.model.{weight.removesuffix('.weight')}"
        product = 8.0 * peft[f"{stem}.lora_B.weight"] @ peft[f"{stem}.lora_A.weight"]  # 8 = alpha 32 / rank 4
        torch.testing.assert_close(after[weight] - before[weight], product, rtol=1e-4, atol=1e-6)
    for number, layout in enumerate((("parallelism=tp", "gpus=2"), ("parallelism=single",))):
        same = run_job(tiny(*words, *layout, "data.local_batch=4"), cut_back(run, 2, tmp_path / str(number)))
        assert run_job.losses(same) == pytest.approx(run_job.losses(run), rel=1e-5)


def test_a_router_bias_that_training_moved_is_merged_and_not_lost_in_pefts_files(tiny, run_job, tmp_path, capsys):
    biased = (*SMALL, "model.router_bias_update_rate=0.01", "data.local_batch=4")
    base = run_job(tiny(*biased, "steps=2"))
    run = run_job(tiny(*biased, *LORA, "steps=1", f"checkpoint.initial_load_path={base}"))
    name = "model.layers.0.feed_forward.router.bias"
    first, last = (tensors(newest(one / "checkpoints"), "model.")[name] for one in (base, run))
    assert not torch.equal(first, last) and first.abs().max() > 0.015
    assert ((last - first).abs() < 0.0101).all()  # one step from the base's bias, not from zero
    merged = reader_of(find_checkpoint(run)).tensor(name.removeprefix("model."), last.shape, torch.float32)
    assert torch.equal(merged, last)
    assert cli.main(["checkpoint", "export", str(run), str(tmp_path / "peft"), "--format", "peft"]) == 2
    assert "layers.0.feed_forward.router.bias" in (error := capsys.readouterr().err) and "--format hf" in error


@pytest.mark.parametrize("words", [("gpus=4", "parallelism=fsdp", "parallelism.ep=2"), ("gpus=2", "parallelism=tp")])
def test_the_plan_counts_adapters_of_experts(words):
    job = freeze(compose_job("model=qwen3_moe_debug", "data=synthetic", "comm=fake", *LORA, "adapter.rank=8", *words))
    with fake_world(job):
        stages = assemble(job, torch.device("cpu")).stages
        held = [local_part(parameter).nbytes for stage in stages for parameter in stage.parameters()]
    planned = next(term.bytes for term in memory.peak(job).terms if term.name == "weights")
    assert sum(held) == pytest.approx(planned, rel=0.01)


def test_experts_with_a_product_of_their_own_are_refused():
    class Own(moe.Experts):
        pass

    job = compose_job("debug=tiny", "precision=fp32", *SMALL, *LORA)
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    model.layers["1"].feed_forward.experts.__class__ = Own
    with pytest.raises(ConfigError, match=r"adapter.experts=true: Own of qwen3_moe has .* nearest legal: false"):
        lora.apply(model, Mesh(job.parallelism, None, None, None, None), job)
