"""Test experts over ranks: the exchange of tokens, waits of the host, balance, and refusals (issue numbers are
TorchTitan's).
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

from tests.core.models.test_moe import job_of, layer
from tests.kits.sizes import BASE, LATENT, MOE
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.moe import Router
from titan_hydra.core.parallel import experts
from titan_hydra.core.parallel.experts import AllToAll
from titan_hydra.core.train.muon import Muon
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins


@pytest.mark.parametrize("counts", [[[2, 0, 1], [1, 3, 0]], [[0, 0, 0], [0, 2, 0]], [[0, 0], [0, 0]]])
def test_rows_that_arrive_are_sorted_by_expert(counts):
    """For each expert, the ranks are in order, and the rows of each rank keep their order."""
    owners = [expert for source in counts for expert, number in enumerate(source) for _ in range(number)]
    order, back = experts.by_expert(torch.tensor(counts), len(owners))
    assert order.tolist() == sorted(range(len(owners)), key=lambda place: owners[place])
    assert order[back.long()].tolist() == list(range(len(owners)))


def lopsided(rank):
    """Two ranks have four experts each. Rank 1 gets no token, and then expert 0 gets none either. With forced balance
    no counts are exchanged.
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
    """Under activation checkpointing, exchanged tokens were never freed (#1467, #1534)."""
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
    """A kernel whose sums vary could choose other experts in each computation, so the choice is made only once, in the
    forward.
    """
    found = {}
    for words in ("ac=none", "ac=full", "ac=layer", "ac=op", "ac=lean"):
        asked: dict[Router, int] = {}

        def choose(router, scores, asked=asked):
            asked[router] = asked.get(router, -1) + 1
            pairs = torch.arange(len(scores) * router.config.experts_per_token)
            return (pairs.view(len(scores), -1) + asked[router]) % router.config.n_experts

        trainer = build(
            job_of("gpus=1", "parallelism=single", "data.local_batch=2", "data.global_batch=2", words),
            torch.device("cpu"),
        )
        tokens = torch.arange(2 * trainer.job.data.seq_len).view(2, -1) % 11
        example = trainer.objective.example(2).each(
            lambda tensor, dims, tokens=tokens: tokens.to(tensor.dtype).view_as(tensor)
        )
        with mock.patch.object(Router, "choose", choose):
            trainer.forward_backward(example)
        assert set(asked.values()) == {0} and len(asked) == len(experts.sparse_layers(trainer.model)), words
        found[words] = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
        assert any(gradient.any() for gradient in found[words].values())
        for name, gradient in found["ac=none"].items():
            assert found[words][name].equal(gradient), (words, name)


def test_a_recomputation_keeps_its_choice_of_experts(on_ranks):
    on_ranks(1, choices_are_kept)


class Products(TorchDispatchMode):
    """Count the products that are sent to other ranks, where they are computed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.titan_hydra.sent_grouped_matmul.default
        return function(*args, **(kwargs or {}))


def sends_once(rank):
    """A recomputation that keeps the received rows does not compute the sent rows again; others compute or keep them."""
    found = {}
    for words, times in (
        (("ac=none",), 1),
        (("ac=full",), 2),
        (("ac=op",), 1),
        (("ac=lean",), 1),
        (("ac=lean", "ac.save_ops=[_c10d_functional.all_to_all_single]"), 1),
        (("ac=lean", "ac.save_ops=[titan_hydra.grouped_matmul]"), 1),
        (("ac=lean", "ac.save_ops=[aten.mm]"), 2),
    ):
        layout = ("gpus=2", "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=2", "data.global_batch=4")
        trainer = build(job_of(*layout, *words), torch.device("cpu"))
        tokens = torch.arange(2 * trainer.job.data.seq_len).view(2, -1) % 11 + rank
        example = trainer.objective.example(2).each(
            lambda tensor, dims, tokens=tokens: tokens.to(tensor.dtype).view_as(tensor)
        )
        with Products() as seen:
            trainer.forward_backward(example)
        assert seen.count == times * len(experts.sparse_layers(trainer.model)), words
        found[words] = {name: parameter.grad.to_local() for name, parameter in trainer.model.named_parameters()}
        for name, gradient in found[("ac=none",)].items():
            assert found[words][name].equal(gradient), (words, name)


def test_rows_that_are_sent_back_are_not_computed_again(on_ranks):
    on_ranks(2, sends_once)


class Seen(TorchDispatchMode):
    """Record where the host waits for a device ("wait") and where FSDP starts to gather ("gather")."""

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
    """The host waits once in the forward of each sparse block, and nowhere else. Before it waits, each block except the
    last starts the gathers of the next block. With forced balance the host never waits.
    """
    for words in (("ac=none",), ("ac=full",), ("ac=layer",), ("ac=op",), ("ac=lean",), ("debug.balance_experts=true",)):
        job = job_of(
            "gpus=2",
            "parallelism=fsdp",
            "parallelism.ep=2",
            "data.local_batch=4",
            "data.global_batch=8",
            *words,
            base=LATENT,
        )
        trainer = build(job, torch.device("cpu"))
        trainer.forward_backward(
            example := trainer.objective.example(4).each(lambda tensor, dims: torch.zeros_like(tensor))
        )
        seen = Seen()
        with contextlib.ExitStack() as patched, seen:
            for name in ("tolist", "cpu"):  # on a CPU device, no operator shows these
                patched.enter_context(
                    mock.patch.object(torch.Tensor, name, seen.noting(getattr(torch.Tensor, name), "wait"))
                )
            for name in (
                "all_gather_into_tensor",
                "all_gather_single",
            ):  # the names in torch 2.11, and in a later release
                if hasattr(dist, name):
                    patched.enter_context(mock.patch.object(dist, name, seen.noting(getattr(dist, name), "gather")))
            trainer.forward_backward(example)
        sparse = len(experts.sparse_layers(trainer.model))
        assert seen.events.count("wait") == (0 if job.debug.balance_experts else sparse), (words, seen.events)
        if not job.debug.balance_experts:
            # numbers of gathers before, between and after the waits
            spaces = "".join(event[0] for event in seen.events).split("w")
            each = len(spaces[1])
            assert (
                each and len(spaces[0]) > 2 * each and [len(space) for space in spaces[1:-2]] == [each] * (sparse - 2)
            ), spaces
            assert not spaces[-2], "the last block was gathered after the wait of the one before it"


def test_the_host_waits_once_for_each_layer_and_gathers_start_before(on_ranks):
    on_ranks(2, waits_seldom)


def test_muon_takes_each_expert_as_a_matrix_of_its_own():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 6, 4))
    single = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    other = nn.Parameter(torch.randn(4, 4))  # torch's constructor requires a matrix
    other.grad = torch.zeros_like(other)
    stack.grad = torch.randn(3, 6, 4)
    for matrix, gradient in zip(single, stack.grad, strict=True):
        matrix.grad = gradient.clone()
    Muon([other, stack], None, lr=0.1, weight_decay=0.1).step()
    torch.optim.Muon(single, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(stack, torch.stack(list(single)), rtol=1e-5, atol=1e-6)


def balances_tokens(rank):
    """The balance loss has the same gradient however few labels count, and a step that is not finite does not change
    the biases.
    """

    def gradients(labels, weight):
        trainer = build(
            job_of(
                "parallelism=single", "data.local_batch=4", "data.global_batch=8", f"model.sequence_balance={weight}"
            ),
            torch.device("cpu"),
        )
        batch = trainer.objective.example(8)
        batch["tokens"].random_(512, generator=torch.Generator().manual_seed(0))
        batch["labels"].random_(512, generator=torch.Generator().manual_seed(1))
        batch["labels"].flatten()[labels:] = -100
        trainer.forward_backward(batch)
        return trainer, {
            name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if "router" in name
        }

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


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("gpus=4", "parallelism=fsdp", "parallelism.ep=3"),
            "parallelism.ep=3: dp_shard x cp x tp = 4 cannot be divided by it; nearest legal: 2",
        ),
        (
            ("gpus=2", "parallelism=fsdp", "parallelism.ep=4"),
            "parallelism.ep=4: dp_shard x cp x tp = 2 cannot be divided by it",
        ),
        (
            ("gpus=6", "parallelism=fsdp", "parallelism.ep=3", "data.global_batch=12"),
            "parallelism.ep=3: 8 experts cannot be split over it; nearest legal: 2",
        ),
        (
            ("model.n_experts=9", "parallelism=single", "model.n_group=2"),
            "model.n_group=2: 9 experts cannot be divided by it",
        ),
        (
            ("parallelism=single", "model.experts_per_token=9"),
            "model.experts_per_token=9: a token may use 8 experts; nearest legal: 8",
        ),
        (
            ("parallelism=single", "model.expert_dim=30", "precision=bf16"),
            "model.expert_dim=30: experts need multiples of 8, which are 16 bytes; nearest legal: 24 or 32",
        ),
        (
            ("gpus=2", "parallelism=tp", "parallelism.sequence_parallel=off"),
            "parallelism.sequence_parallel=false: experts need tokens that are split over tp ranks; nearest legal: true",
        ),
        (
            ("gpus=2", "parallelism=fsdp", "parallelism.ep=2", "parallelism.backend=simple_fsdp"),
            "parallelism.backend=simple_fsdp: gathers",
        ),
        (
            ("parallelism=single", "model.first_k_dense_replace=4"),
            "model.first_k_dense_replace=4: leaves none of 4 blocks to the experts; nearest legal: 3",
        ),
        (
            ("parallelism=single", "model=qwen3_debug", "debug.balance_experts=true"),
            "debug.balance_experts=true: qwen3 has no router",
        ),
        (
            ("parallelism=fsdp", "gpus=2", "model=qwen3_debug", "parallelism.ep=2"),
            "parallelism.ep=2: qwen3 has no experts to split",
        ),
        (
            (
                "gpus=16",
                "parallelism=fsdp",
                "model.expert_dim=40",
                "parallelism.ep=2",
                "data.global_batch=32",
                "data.local_batch=1",
            ),
            None,
        ),
        (
            (
                "gpus=16",
                "parallelism=fsdp",
                "model.expert_dim=36",
                "parallelism.ep=2",
                "data.global_batch=32",
                "data.local_batch=1",
            ),
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
