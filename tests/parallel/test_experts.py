"""Experts: the router, the kernels with experts that get no token, counting, and the errors that users of other
frameworks met (issue numbers are TorchTitan's).
"""

import contextlib
import gc
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from titan_hydra import models
from titan_hydra.base.errors import ConfigError
from titan_hydra.config.compose import compose_job
from titan_hydra.models.init import init_weights
from titan_hydra.models.moe import MoE, Router
from titan_hydra.parallel import experts
from titan_hydra.parallel.experts import AllToAll
from titan_hydra.train.muon import Muon
from titan_hydra.train.trainer import build
from titan_hydra.verify.matrix import BASE, LATENT, MOE, later_wins

TOKENS = 24


def job_of(*overrides, base=MOE):
    return compose_job(*later_wins(*BASE, *base, *overrides))


def layer(*overrides, base=MOE):
    """A feed-forward of experts with weights, and an input of it."""
    job = job_of(*overrides, base=base)
    torch.manual_seed(0)
    found = MoE(job.model)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.1)
    return found, torch.randn(2, TOKENS // 2, job.model.dim, requires_grad=True)


def one_by_one(moe, x):
    """The layer computed token by token, expert by expert."""
    scores, plan = moe.router(x)
    scores, chosen = moe.router.gates(scores, plan.chosen), plan.chosen
    rows = []
    for token, own, weights in zip(x.flatten(0, 1), chosen, scores, strict=True):
        parts = [(nn.functional.silu(moe.experts.w1[e] @ token) * (moe.experts.w3[e] @ token)) for e in own]
        rows.append(sum(weight * (moe.experts.w2[e] @ part) for weight, e, part in zip(weights, own, parts, strict=True)))
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
    """Rows behind the last token would be garbage (pt#193633, #1237): none exist, and an expert without tokens has a
    whole gradient.
    """
    moe, x = layer()
    moe.router.choose = lambda scores: torch.tensor([2, 5]).expand(len(scores), 2)
    moe(x).square().sum().backward()
    for weight in moe.experts.parameters():
        assert torch.isfinite(weight.grad).all()
        assert [bool(part.any()) for part in weight.grad] == [expert in (2, 5) for expert in range(8)]


def test_gradients_that_a_kernel_does_not_write_are_zero(monkeypatch):
    """Blackwell's leaves those of experts without tokens as they were in memory (pt#172439)."""
    exact, calls = torch.nn.functional.grouped_mm, []

    def unwritten(a, b, *, offs):
        result = exact(a, b, offs=offs)
        if result.dim() == 3:
            calls.append(result.index_fill_(0, torch.tensor([1, 3]), torch.nan))
        return result

    moe, _ = layer()
    weights, counts = [nn.Parameter(weight[:4].detach()) for weight in moe.experts.parameters()], torch.tensor([3, 0, 5, 0])
    rows, order = torch.randn(8, weights[0].shape[2]), torch.arange(8, dtype=torch.int32)
    moe.experts.w1, moe.experts.w2, moe.experts.w3 = weights
    expected = torch.autograd.grad(moe.experts(rows, order, order, counts).square().sum(), weights)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    found = torch.autograd.grad(moe.experts(rows, order, order, counts).square().sum(), weights)
    assert len(calls) == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and not one[[1, 3]].any() and one[[0, 2]].any()


def test_no_tokens_at_all_are_no_error(monkeypatch):
    """The kernels are not asked for a product without rows, which nothing defines; the gradients are zeros all the
    same.
    """
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
    assert rows.flatten().tolist() == [1, 0, 2, 2, 0, 1]  # of experts 0, 1, 1, 2, 3, 3
    assert plan.restore(rows).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert plan.counts.tolist() == [1, 2, 1, 2, 0, 0, 0, 0]
    rows.mul(torch.tensor([[1.0], [2], [4], [8], [16], [32]])).sum().backward()
    assert x.grad.flatten().tolist() == [18, 33, 12]


@pytest.mark.parametrize("counts", [[[2, 0, 1], [1, 3, 0]], [[0, 0, 0], [0, 2, 0]], [[0, 0], [0, 0]]])
def test_rows_that_arrive_are_sorted_by_expert(counts):
    """Within an expert, the ranks in order, and the rows of a rank as they came."""
    owners = [expert for source in counts for expert, number in enumerate(source) for _ in range(number)]
    order, back = experts.by_expert(torch.tensor(counts), len(owners))
    assert order.tolist() == sorted(range(len(owners)), key=lambda place: owners[place])
    assert order[back.long()].tolist() == list(range(len(owners)))


# --- the router -------------------------------------------------------------------------------------------------------


def test_groups_are_the_best_two_experts_and_limit_the_choice():
    router = Router(job_of("model.n_group=4", "model.topk_group=1", base=LATENT).model)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.1, 0.2, 0.2]])
    assert sorted(router.choose(scores)[0].tolist()) == [2, 3]  # 0.5 + 0.5, not the largest score of all


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
    """DeepSeek-V3's in float32 whatever the weights are in, Qwen3's in their dtype: so are both in transformers."""
    router = Router(job_of(base=base).model).bfloat16()
    nn.init.normal_(router.weight)
    x = torch.randn(1, 50, router.weight.shape[1], dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(x[0].double(), router.weight.double())
    scores = logits.softmax(-1) if router.config.router == "softmax" else logits.sigmoid()
    assert ((router(x)[0] - scores).abs().max() < 1e-5) == exact


@pytest.mark.parametrize("kept", [False, True])
def test_tokens_are_counted_once_however_often_a_forward_runs(kept):
    """Under recomputation (#1304, #1324), and not in a validation (#4148)."""
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
    """arXiv 2412.19437, section 2.1.2: alpha times the sum over experts of f_i P_i for each sequence, with f_i held
    fixed, and its mean over the sequences of the global batch.
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


# --- over ranks -------------------------------------------------------------------------------------------------------


def lopsided(rank):
    """Two ranks with four experts each: rank 1 gets no token, then neither does expert 0; balanced by force without a
    message of counts.
    """
    whole, x = layer("model.n_shared_experts=0")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for wanted in ([0, 3], [3, 5], [6, 7], None):
        moe, _ = layer("model.n_shared_experts=0")
        for one in (whole, moe):
            one.zero_grad()
            one.router.balanced = wanted is None
            if wanted:
                one.router.choose = lambda scores, wanted=wanted: torch.tensor(wanted).expand(len(scores), 2)
            elif "choose" in vars(one.router):
                del one.router.choose
        for name, weight in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
        moe.experts.read, moe.exchange = DTensor.to_local, AllToAll(mesh.get_group(), wanted is None)
        own = x[rank : rank + 1].detach().requires_grad_()
        y = moe(own)
        y.square().sum().backward()
        theirs = x.detach().requires_grad_()
        expected = whole(theirs)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected[rank : rank + 1])
        torch.testing.assert_close(own.grad, theirs.grad[rank : rank + 1])
        for name in ("w1", "w2", "w3"):
            torch.testing.assert_close(getattr(moe.experts, name).grad.full_tensor(), getattr(whole.experts, name).grad)


def test_experts_and_ranks_without_tokens(on_ranks):
    on_ranks(2, lopsided)


def does_not_grow(rank):
    """Exchanged tokens under activation checkpointing were never freed (#1467, #1534)."""
    job = job_of("gpus=2", "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=4", "ac=op", "data.global_batch=8")
    trainer = build(job, torch.device("cpu"))
    sizes = []
    for _ in range(5):
        trainer.forward_backward(trainer.objective.example(4).each(lambda tensor, dims: torch.zeros_like(tensor)))
        trainer.update(trainer.agree(torch.zeros(()), trainer.measure()))
        gc.collect()
        sizes.append(sum(torch.is_tensor(found) for found in gc.get_objects()))
    assert sizes[-1] == sizes[-2] == sizes[-3], sizes


def test_exchanged_tokens_are_freed(on_ranks):
    on_ranks(2, does_not_grow)


def choices_are_kept(rank):
    """A choice that would be another one each time, as that of a kernel without fixed sums, is made once in a forward."""
    found = {}
    for words in ("ac=none", "ac=full", "ac=layer", "ac=op", "ac=lean"):
        asked: dict[Router, int] = {}

        def choose(router, scores, asked=asked):
            asked[router] = asked.get(router, -1) + 1
            pairs = torch.arange(len(scores) * router.config.experts_per_token)
            return (pairs.view(len(scores), -1) + asked[router]) % router.config.n_experts

        trainer = build(job_of("gpus=1", "parallelism=single", "data.local_batch=2", "data.global_batch=2", words), torch.device("cpu"))
        tokens = torch.arange(2 * trainer.job.data.seq_len).view(2, -1) % 11
        example = trainer.objective.example(2).each(lambda tensor, dims, tokens=tokens: tokens.to(tensor.dtype).view_as(tensor))
        with mock.patch.object(Router, "choose", choose):
            trainer.forward_backward(example)
        assert set(asked.values()) == {0} and len(asked) == len(experts.sparse_layers(trainer.model)), words
        found[words] = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
        assert any(gradient.any() for gradient in found[words].values())
        for name, gradient in found["ac=none"].items():
            assert found[words][name].equal(gradient), (words, name)


def test_a_recomputation_keeps_its_choice_of_experts(on_ranks):
    on_ranks(1, choices_are_kept)


class Seen(TorchDispatchMode):
    """Records where the host waits for a device ("wait") and where FSDP starts to gather ("gather")."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.waits):
            self.events.append("wait")
        return function(*args, **(kwargs or {}))

    def noting(self, function, event):
        def noted(*args, **kwargs):
            self.events.append(event)
            return function(*args, **kwargs)

        return noted


def waits_seldom(rank):
    """The host waits once in the forward of each sparse block, and nowhere else; each block but the last starts the
    gathers of the next one before that. If experts are balanced by force, it never waits.
    """
    for words in (("ac=none",), ("ac=full",), ("ac=layer",), ("ac=op",), ("ac=lean",), ("debug.balance_experts=true",)):
        job = job_of("gpus=2", "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=4", "data.global_batch=8", *words, base=LATENT)
        trainer = build(job, torch.device("cpu"))
        trainer.forward_backward(example := trainer.objective.example(4).each(lambda tensor, dims: torch.zeros_like(tensor)))
        seen = Seen()
        with contextlib.ExitStack() as patched, seen:
            for name in ("tolist", "cpu"):  # which no operator shows where the device is the CPU
                patched.enter_context(mock.patch.object(torch.Tensor, name, seen.noting(getattr(torch.Tensor, name), "wait")))
            for name in ("all_gather_into_tensor", "all_gather_single"):  # of torch 2.11, and of a later one
                if hasattr(dist, name):
                    patched.enter_context(mock.patch.object(dist, name, seen.noting(getattr(dist, name), "gather")))
            trainer.forward_backward(example)
        sparse = len(experts.sparse_layers(trainer.model))
        assert seen.events.count("wait") == (0 if job.debug.balance_experts else sparse), (words, seen.events)
        if not job.debug.balance_experts:
            # gathers before, between and after the waits
            spaces = "".join(event[0] for event in seen.events).split("w")
            each = len(spaces[1])
            assert each and len(spaces[0]) > 2 * each and [len(space) for space in spaces[1:-2]] == [each] * (sparse - 2), spaces
            assert not spaces[-2], "the last block was gathered after the wait of the one before it"


def test_the_host_waits_once_for_each_layer_and_gathers_start_before(on_ranks):
    on_ranks(2, waits_seldom)


def test_muon_takes_each_expert_as_a_matrix_of_its_own():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 6, 4))
    single = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    other = nn.Parameter(torch.randn(4, 4))  # torch's constructor wants a matrix
    other.grad = torch.zeros_like(other)
    stack.grad = torch.randn(3, 6, 4)
    for matrix, gradient in zip(single, stack.grad, strict=True):
        matrix.grad = gradient.clone()
    Muon([other, stack], None, lr=0.1, weight_decay=0.1).step()
    torch.optim.Muon(single, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(stack, torch.stack(list(single)), rtol=1e-5, atol=1e-6)


def balances_tokens(rank):
    """The balance loss has the same gradient however few labels count, and a step that is not finite moves no bias."""

    def gradients(labels, weight):
        trainer = build(
            job_of("parallelism=single", "data.local_batch=4", "data.global_batch=8", f"model.sequence_balance={weight}"),
            torch.device("cpu"),
        )
        batch = trainer.objective.example(8)
        batch["tokens"].random_(512, generator=torch.Generator().manual_seed(0))
        batch["labels"].random_(512, generator=torch.Generator().manual_seed(1))
        batch["labels"].flatten()[labels:] = -100
        trainer.forward_backward(batch)
        return trainer, {name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if "router" in name}

    few, all_of_them = (
        [with_it[name] - without[name] for name in without]
        for with_it, without in ((gradients(labels, 10.0)[1], gradients(labels, 0.0)[1]) for labels in (20, 256))
    )
    for one, other in zip(few, all_of_them, strict=True):
        assert one.norm() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    trainer, _ = gradients(256, 0.0)
    router = trainer.model.layers["0"].feed_forward.router
    norm = trainer.measure()
    for share, moves in ((math.nan, False), (1.0, True)):
        trainer.update(trainer.agree(torch.tensor(share), norm))
        assert router.bias.any() == moves
        router.load[0] = 1


def test_balance_counts_tokens_and_finite_steps(on_ranks):
    on_ranks(1, balances_tokens)


def keeps_its_bits(rank):
    trainer = build(job_of("precision=bf16_full", "parallelism=single"), torch.device("cpu"))
    router = trainer.model.layers["0"].feed_forward.router
    assert (router.weight.dtype, router.bias.dtype) == (torch.bfloat16, torch.float32)


def test_a_bias_is_float32_in_every_precision(on_ranks):
    on_ranks(1, keeps_its_bits)


def test_initial_weights_shrink_with_depth_as_in_a_dense_block():
    job = job_of("model.n_shared_experts=1")
    with torch.device("meta"):
        model = models.build(job.model, 32)
    model.to_empty(device="cpu")
    init_weights(model, job.model, 0)
    for number in ("0", "3"):
        found = model.layers[number].feed_forward
        for one, other in ((found.experts.w1, found.shared_experts.w1.weight), (found.experts.w2, found.shared_experts.w2.weight)):
            assert one.std().item() == pytest.approx(other.std().item(), rel=0.05)
        assert not found.router.bias.any()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("gpus=4", "parallelism=fsdp", "parallelism.ep=3"),
            "parallelism.ep=3: dp_shard x cp x tp = 4 cannot be divided by it; nearest legal: 2",
        ),
        (("gpus=2", "parallelism=fsdp", "parallelism.ep=4"), "parallelism.ep=4: dp_shard x cp x tp = 2 cannot be divided by it"),
        (
            ("gpus=6", "parallelism=fsdp", "parallelism.ep=3", "data.global_batch=12"),
            "parallelism.ep=3: 8 experts cannot be split over it; nearest legal: 2",
        ),
        (("model.n_experts=9", "parallelism=single", "model.n_group=2"), "model.n_group=2: 9 experts cannot be divided by it"),
        (("parallelism=single", "model.experts_per_token=9"), "model.experts_per_token=9: a token may use 8 experts; nearest legal: 8"),
        (
            ("parallelism=single", "model.expert_dim=30", "precision=bf16"),
            "model.expert_dim=30: experts need multiples of 8, which are 16 bytes; nearest legal: 24 or 32",
        ),
        (
            ("gpus=2", "parallelism=tp", "parallelism.sequence_parallel=off"),
            "parallelism.sequence_parallel=false: experts need tokens that are split over tp ranks; nearest legal: true",
        ),
        (("gpus=2", "parallelism=fsdp", "parallelism.ep=2", "parallelism.backend=simple_fsdp"), "parallelism.backend=simple_fsdp: gathers"),
        (
            ("parallelism=single", "model.first_k_dense_replace=4"),
            "model.first_k_dense_replace=4: leaves none of 4 blocks to the experts; nearest legal: 3",
        ),
        (("parallelism=single", "model=qwen3_debug", "debug.balance_experts=true"), "debug.balance_experts=true: qwen3 has no experts"),
        (("parallelism=fsdp", "gpus=2", "model=qwen3_debug", "parallelism.ep=2"), "parallelism.ep=2: qwen3 has no experts to split"),
        (("gpus=16", "parallelism=fsdp", "model.expert_dim=40", "parallelism.ep=2", "data.global_batch=32", "data.local_batch=1"), None),
        (
            ("gpus=16", "parallelism=fsdp", "model.expert_dim=36", "parallelism.ep=2", "data.global_batch=32", "data.local_batch=1"),
            "model.expert_dim=36: the experts of an ep rank are sharded over 8 ranks by this width; nearest legal: 32 or 40",
        ),
    ],
)
def test_what_experts_need_is_said_in_one_line(overrides, line):
    dense = "model=qwen3_debug" in overrides
    given = later_wins(*BASE, *(() if dense else MOE), "data.local_batch=2", *overrides)
    if line is None:
        compose_job(*given)
        return
    with pytest.raises(ConfigError) as error:
        compose_job(*given)
    assert line in str(error.value)
