"""QK-clip: what it is on layouts is compared by the cases "qk_clip" of titan verify."""

import math

import pytest
import torch

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.kernels.documents import document_mask, document_offsets
from titan_hydra.core.kernels.logits import largest_logits
from titan_hydra.core.train.step import Agreement
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.plan.memory import peak
from titan_hydra.experiments.plan.time import speed


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@pytest.mark.parametrize("starts", [[0], [4, 8]])
@pytest.mark.parametrize("masked", ["causal", "offsets", "mask"])
def test_the_largest_logits_are_those_of_all_pairs_that_attend(chunk, starts, masked):
    dice = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 12, 8, generator=dice, dtype=torch.bfloat16) for heads in (4, 2))
    ends = torch.tensor([[3, 12], [7, 12]], dtype=torch.int32)
    seen = torch.ones(12, 12, dtype=torch.bool).tril() if masked == "causal" else document_mask(ends, 12)
    documents = {"causal": None, "offsets": document_offsets(ends), "mask": seen}[masked]
    logits = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(8)
    rows = [row for start in starts for row in range(start, start + (12 if len(starts) == 1 else 2))]
    exact = logits.masked_fill(~seen, -torch.inf)[:, :, rows].amax((0, 2, 3))
    found = largest_logits(q[:, :, rows], k, documents, starts, chunk)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_a_row_has_the_largest_logit_and_validations_leave_it_alone(run_job, tiny, tmp_path):
    words = ("steps=3", "checkpoint=off", "parallelism=single")
    plain = run_job(tiny(*words))
    high = run_job(tiny(*words, "optimizer.qk_clip=1e6"))
    often = ("validation=on", "validation.interval=1", "validation.steps=1")
    low = run_job(tiny(*words, "optimizer.qk_clip=0.01"))
    watched = run_job(tiny(*words, "optimizer.qk_clip=0.01", *often), tmp_path / "watched")
    assert run_job.losses(plain) == run_job.losses(high) != run_job.losses(low)
    assert run_job.losses(low) == run_job.losses(watched)
    values = [[row.get("max_logit") for row in run_job.rows(run)] for run in (plain, high, low, watched)]
    assert values[0] == [None] * 3 and values[2] == values[3] and values[1][0] == values[2][0]
    assert values[2][2] < values[1][2]


def test_a_step_that_is_not_finite_scales_nothing(tiny, on_ranks):
    job = tiny("parallelism=single", "optimizer.qk_clip=0.01")

    def stays(rank):
        trainer = build(job, torch.device("cpu"))
        before = [weight.clone() for weight in trainer.model.parameters()]
        for weight in trainer.model.parameters():
            weight.grad = torch.ones_like(weight)
        for part in trainer.clip.measured.values():
            part.largest.fill_(7.0)
        trainer.update(Agreement(torch.tensor(torch.nan), torch.zeros(2, dtype=torch.float64)))
        assert all(map(torch.equal, before, trainer.model.parameters()))
        assert all(part.largest.max() == -torch.inf for part in trainer.clip.measured.values())

    on_ranks(1, stays)


def test_the_average_is_that_of_scaled_weights(tiny, on_ranks):
    job = tiny("parallelism=single", "optimizer.qk_clip=0.01", "optimizer.ema_decay=0.5")

    def follows(rank):
        trainer = build(job, torch.device("cpu"))
        for weight in trainer.model.parameters():
            weight.grad = torch.ones_like(weight)
        for part in trainer.clip.measured.values():
            part.largest.fill_(7.0)
        trainer.update(Agreement(torch.ones(()), torch.zeros(2, dtype=torch.float64)))
        (optimizer,) = trainer.optimizers
        # the average of one step is its weights
        assert all(torch.equal(state["ema"], weight) for weight, state in optimizer.state.items())

    on_ranks(1, follows)


@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3_debug",),
        ("adapter=lora",),
        ("precision=bf16_full",),
        ("model=flux_debug", "model.n_layers=4", "model.n_kv_heads=4", "objective=diffusion", "data=synthetic_images"),
    ],
)
def test_what_cannot_be_clipped_is_refused(tiny, words):
    with pytest.raises(ConfigError, match=r"optimizer\.qk_clip"):
        tiny("optimizer.qk_clip=100", *words)


def test_a_plan_prices_the_pass(tiny):
    words = (
        "parallelism=single",
        "hardware=h100",
        "data.seq_len=1024",
        "loss=linear_cross_entropy",
        "loss.chunk_tokens=64",
    )
    without, clipped = (tiny(*words, f"optimizer.qk_clip={value}") for value in ("null", "100"))
    assert "QK-clip" not in speed(without).parts and speed(clipped).parts["QK-clip"] > 0
    assert peak(clipped).live > peak(without).live
