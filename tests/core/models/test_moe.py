"""Test experts in one process: the layer, kernels for experts without tokens, the router, and errors that users of
other frameworks reported (issue numbers are TorchTitan's).
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kits.sizes import BASE, LATENT, MOE
from titan_hydra.core import models
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.models.moe import MoE, Router
from titan_hydra.core.parallel import experts
from titan_hydra.experiments.compose.compose import compose_job, later_wins

TOKENS = 24


def job_of(*overrides, base=MOE):
    return compose_job(*later_wins(*BASE, *base, *overrides))


def layer(*overrides, base=MOE):
    """Return a feed-forward of experts with weights, and an input for it."""
    job = job_of(*overrides, base=base)
    torch.manual_seed(0)
    found = MoE(job.model)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.1)
    return found, torch.randn(2, TOKENS // 2, job.model.dim, requires_grad=True)


def one_by_one(moe, x):
    """Compute the layer token by token, expert by expert."""
    scores, plan = moe.router(x)
    scores, chosen = moe.router.gates(scores, plan.chosen), plan.chosen
    rows = []
    for token, own, weights in zip(x.flatten(0, 1), chosen, scores, strict=True):
        parts = [(nn.functional.silu(moe.experts.w1[e] @ token) * (moe.experts.w3[e] @ token)) for e in own]
        rows.append(
            sum(weight * (moe.experts.w2[e] @ part) for weight, e, part in zip(weights, own, parts, strict=True))
        )
    y = torch.stack(rows).view_as(x)
    return y if moe.shared_experts is None else y + moe.shared_experts(x)


@pytest.mark.parametrize("base", [MOE, LATENT])
def test_a_layer_is_the_weighted_sum_of_its_experts(base):
    moe, x = layer(base=base)
    expected = torch.autograd.grad(one_by_one(moe, x).square().sum(), [x, *moe.parameters()])
    found = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    torch.testing.assert_close(moe(x), one_by_one(moe, x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_experts_without_tokens_have_gradients_of_zero():
    """Rows after the last token would be undefined (pt#193633, #1237), so there are none. The gradient of an expert
    without tokens is defined everywhere.
    """
    moe, x = layer()
    moe.router.choose = lambda scores: torch.tensor([2, 5]).expand(len(scores), 2)
    moe(x).square().sum().backward()
    for weight in moe.experts.parameters():
        assert torch.isfinite(weight.grad).all()
        assert [bool(part.any()) for part in weight.grad] == [expert in (2, 5) for expert in range(8)]


def test_gradients_that_a_kernel_does_not_write_are_zero(monkeypatch):
    """The kernel for Blackwell leaves the gradients of experts without tokens as they were in memory (pt#172439)."""
    exact, calls = torch.nn.functional.grouped_mm, []

    def unwritten(a, b, *, offs):
        result = exact(a, b, offs=offs)
        if result.dim() == 3:
            calls.append(result.index_fill_(0, torch.tensor([1, 3]), torch.nan))
        return result

    moe, _ = layer()
    weights, counts = (
        [nn.Parameter(weight[:4].detach()) for weight in moe.experts.parameters()],
        torch.tensor([3, 0, 5, 0]),
    )
    rows, order = torch.randn(8, weights[0].shape[2]), torch.arange(8, dtype=torch.int32)
    moe.experts.w1, moe.experts.w2, moe.experts.w3 = weights
    expected = torch.autograd.grad(moe.experts(rows, order, order, counts).square().sum(), weights)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    found = torch.autograd.grad(moe.experts(rows, order, order, counts).square().sum(), weights)
    assert len(calls) == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and not one[[1, 3]].any() and one[[0, 2]].any()


def test_no_tokens_at_all_are_no_error(monkeypatch):
    """A product without rows is undefined in these kernels, so they are not called; the gradients are zeros."""
    moe, x = layer()
    nothing, order = x.new_zeros(0, x.shape[-1], requires_grad=True), torch.zeros(0, dtype=torch.int32)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    moe.experts(nothing, order, order, torch.zeros(8, dtype=torch.int32)).square().sum().backward()
    assert nothing.grad.shape == nothing.shape
    assert not any(weight.grad.any() for weight in moe.experts.parameters())


def test_a_plan_puts_rows_next_to_each_other_and_back():
    moe, _ = layer()
    moe.router.choose = lambda scores: torch.tensor([[3, 1], [0, 3], [1, 2]])
    plan = moe.router.plan(torch.zeros(3, 8))
    x = torch.arange(3.0).unsqueeze(1).requires_grad_()
    rows = plan.spread(x)
    assert rows.flatten().tolist() == [1, 0, 2, 2, 0, 1]  # rows for experts 0, 1, 1, 2, 3, 3
    assert plan.restore(rows).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert plan.counts.tolist() == [1, 2, 1, 2, 0, 0, 0, 0]
    rows.mul(torch.tensor([[1.0], [2], [4], [8], [16], [32]])).sum().backward()
    assert x.grad.flatten().tolist() == [18, 33, 12]


# --- the router -------------------------------------------------------------------------------------------------------


def test_groups_are_the_best_two_experts_and_limit_the_choice():
    router = Router(job_of("model.n_group=4", "model.topk_group=1", base=LATENT).model)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.1, 0.2, 0.2]])
    # group 0.5 + 0.5 wins, although it does not have the largest single score
    assert sorted(router.choose(scores)[0].tolist()) == [
        2,
        3,
    ]


def test_the_bias_changes_the_choice_and_not_the_scores():
    router = Router(job_of(base=MOE).model)
    nn.init.normal_(router.weight, std=0.1)
    router.bias.fill_(0)
    x = torch.randn(1, 5, router.weight.shape[1])
    router.bias[6] = 10.0
    scores, (chosen, *_) = router(x)
    assert (chosen == 6).any(1).all()
    torch.testing.assert_close(scores, torch.nn.functional.linear(x, router.weight).flatten(0, 1).softmax(-1))
    own = scores.gather(1, chosen)
    torch.testing.assert_close(router.gates(scores, chosen), own / own.sum(-1, keepdim=True))


@pytest.mark.parametrize(("base", "exact"), [(LATENT, True), (MOE, False)])
def test_a_router_multiplies_in_the_precision_of_the_published_model(base, exact):
    """DeepSeek-V3's router multiplies in float32, whatever the dtype of the weights; Qwen3's multiplies in the weights'
    dtype. transformers does the same.
    """
    router = Router(job_of(base=base).model).bfloat16()
    nn.init.normal_(router.weight)
    x = torch.randn(1, 50, router.weight.shape[1], dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(x[0].double(), router.weight.double())
    scores = logits.softmax(-1) if router.config.router == "softmax" else logits.sigmoid()
    assert ((router(x)[0] - scores).abs().max() < 1e-5) == exact


@pytest.mark.parametrize("kept", [False, True])
def test_tokens_are_counted_once_however_often_a_forward_runs(kept):
    """Recomputation does not count them again (#1304, #1324), and a validation does not count them (#4148)."""
    moe, x = layer()
    experts.forget(moe)
    y = checkpoint(moe, x, use_reentrant=False) if kept else moe(x)
    assert not moe.router.load.any()
    y.sum().backward()
    assert moe.router.load.sum() == TOKENS * 2
    with torch.no_grad():
        moe(x)
    assert moe.router.load.sum() == TOKENS * 2
    assert 0 < moe.router.entropy.item() / TOKENS <= math.log(8) + 1e-6


def test_the_loss_of_balance_has_the_papers_gradient():
    """The paper is arXiv 2412.19437, section 2.1.2. Its loss is alpha times the sum over experts of f_i P_i for each
    sequence, with f_i held constant, averaged over the sequences of the global batch.
    """
    moe, x = layer("model.sequence_balance=0.5", "model.n_shared_experts=0", base=LATENT)
    router, sequences = moe.router, 10
    router.scale = 1 / (sequences * (TOKENS // 2))
    scores, (chosen, *_) = router(x)
    (found,) = torch.autograd.grad(scores.sum() * 0, router.weight)
    shares = torch.nn.functional.linear(x, router.weight).sigmoid()
    shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros(())
    for sequence, own in zip(shares, chosen.view(2, TOKENS // 2, -1), strict=True):
        counts = torch.bincount(own.flatten(), minlength=8)
        f = counts * 8 / (2 * len(sequence))
        total = total + 0.5 * (f * sequence.mean(0)).sum()
    (expected,) = torch.autograd.grad(total / sequences, router.weight)
    torch.testing.assert_close(found, expected)


def test_balance_by_force_gives_every_expert_its_share():
    moe, x = layer()
    moe.router.balanced = True
    _, (chosen, *_) = moe.router(x)
    assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [TOKENS * 2 // 8] * 8
    assert all(len(set(own)) == 2 for own in chosen.tolist())


def test_initial_weights_shrink_with_depth_as_in_a_dense_block():
    job = job_of("model.n_shared_experts=1")
    with torch.device("meta"):
        model = models.build(job.model, 32)
    model.to_empty(device="cpu")
    init_weights(model, job.model, 0)
    for number in ("0", "3"):
        found = model.layers[number].feed_forward
        for one, other in (
            (found.experts.w1, found.shared_experts.w1.weight),
            (found.experts.w2, found.shared_experts.w2.weight),
        ):
            assert one.std().item() == pytest.approx(other.std().item(), rel=0.05)
        assert not found.router.bias.any()
