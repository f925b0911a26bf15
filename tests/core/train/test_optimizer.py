"""Test learning rates step by step, and which parameters each optimizer updates."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core import models
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.schema import LrSchedule
from titan_hydra.core.job.parametrization import rules_of
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.train.muon import Muon
from titan_hydra.core.train.optimizer import build_optimizers, lr_factor, set_lr, step
from titan_hydra.experiments.compose.compose import compose_job


def factors(steps, **options):
    return [lr_factor(step, steps, from_dict(LrSchedule, options)) for step in range(1, steps + 1)]


TABLES = [
    ({"name": "constant", "warmup_steps": 0}, [1, 1, 1, 1, 1]),
    ({"name": "constant", "warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1, 1]),
    ({"name": "wsd", "warmup_steps": 1, "decay_ratio": 0.0}, [1, 1, 1, 1, 1]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.4}, [1, 1, 1, 1, 0.5]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.52}, [1, 1, 1, 2 / 3, 1 / 3]),  # 2.6 steps are three
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8}, [1, 1, 0.75, 0.5, 0.25]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8, "min_factor": 0.5}, [1, 1, 0.875, 0.75, 0.625]),
    (
        {"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8, "decay_type": "sqrt"},
        [1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)],
    ),
    ({"name": "wsd", "warmup_steps": 2, "decay_ratio": 1.0}, [1 / 2, 1, 1, 2 / 3, 1 / 3]),
    (
        {"name": "cosine", "warmup_steps": 1},
        [1, 1, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 - math.cos(math.pi / 4))],
    ),
    (
        {"name": "cosine", "warmup_steps": 1, "min_factor": 0.1},
        [1, 1, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55, 0.1 + 0.45 * (1 - math.cos(math.pi / 4))],
    ),
    ({"name": "cosine", "warmup_steps": 5}, [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1]),
]


@pytest.mark.parametrize(("options", "expected"), TABLES)
def test_rate_over_five_steps(options, expected):
    assert factors(5, **options) == pytest.approx(expected)
    updates = pytest.importorskip("titan_hydra.instruments.verify.updates")
    assert [updates.rate_factor(step, 5, from_dict(LrSchedule, options)) for step in range(1, 6)] == pytest.approx(
        expected
    )


@pytest.mark.parametrize("name", ["wsd", "cosine", "constant"])
def test_no_step_has_a_rate_of_zero(name):
    assert min(factors(100, name=name, warmup_steps=10)) > 0


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    job = compose_job("debug=tiny", "optimizer=muon")
    with torch.device("meta"):
        model = models.build(job.model, 8)
    adamw, muon = build_optimizers(model, job.optimizer, Mesh(job.parallelism, None, None, None, None))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    assert taken == {name for name in names.values() if name.startswith("layers.") and "norm" not in name}
    assert sum(len(group["params"]) for optimizer in (adamw, muon) for group in optimizer.param_groups) == len(names)
    set_lr([adamw, muon], 0.5)
    assert adamw.param_groups[0]["lr"] == job.optimizer.lr / 2
    assert muon.param_groups[0]["lr"] == job.optimizer.muon_lr / 2


def test_norms_are_spared_from_weight_decay_when_asked():
    job = compose_job("debug=tiny", "optimizer.decay_matrices_only=true")
    with torch.device("meta"):
        model = models.build(job.model, 8)
    matrices, others = build_optimizers(model, job.optimizer, Mesh(job.parallelism, None, None, None, None))[
        0
    ].param_groups
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all(parameter.ndim == 1 for parameter in others["params"])


def test_groups_have_the_factors_of_their_parameters():
    job = compose_job("debug=tiny", "optimizer=muon", "parametrization=mup", "parametrization.base_dim=64")
    with torch.device("meta"):
        model = models.build(job.model, 8)
    rules, mesh = rules_of(job.model, job.parametrization), Mesh(job.parallelism, None, None, None, None)
    adamw, muon = build_optimizers(model, job.optimizer, mesh, rules)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert set_lr([adamw, muon], 0.5) == job.optimizer.lr / 2
    for optimizer, peak in ((adamw, job.optimizer.lr), (muon, job.optimizer.muon_lr)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                factors = rules.factors(names[parameter], parameter.shape, optimizer is muon)
                assert group["lr"] == peak * factors.lr / 2
                assert group["weight_decay"] == job.optimizer.weight_decay * factors.weight_decay
                assert optimizer is muon or group["eps"] == job.optimizer.eps * factors.eps
    assert len(names) == sum(len(group["params"]) for one in (adamw, muon) for group in one.param_groups)


def a_layer(name):
    """Return a model of one matrix and one norm with gradients, its optimizers, and torch's own optimizers for a copy
    of the model.
    """
    job = compose_job("debug=tiny", f"optimizer={name}", *["optimizer.sgd_momentum=0.9"] * (name == "sgd"))
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Linear(6, 4, bias=False), "norm": nn.LayerNorm(4)})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, build_optimizers(model, job.optimizer, Mesh(job.parallelism, None, None, None, None))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_gradients_are_divided_by_the_clipping_factor_and_nothing_changes_where_they_are_not_finite(name):
    model, optimizers = a_layer(name)
    clipped, others = a_layer(name)
    for _ in range(3):
        for parameter, other in zip(model.parameters(), clipped.parameters(), strict=True):
            parameter.grad, other.grad = torch.ones_like(parameter) * 3, torch.ones_like(parameter)
        step(optimizers, torch.tensor(3.0), torch.tensor(True))
        for optimizer in others:
            optimizer.grad_scale = optimizer.found_inf = None
            if isinstance(optimizer, Muon):
                optimizer.grad_scale, optimizer.found_inf = 1.0, 0.0
            optimizer.step()
    for parameter, other in zip(model.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
    before = copy.deepcopy([*model.parameters(), *(optimizer.state_dict()["state"] for optimizer in optimizers)])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    step(optimizers, torch.tensor(torch.nan), torch.tensor(False))
    for was, now in zip(
        before, [*model.parameters(), *(optimizer.state_dict()["state"] for optimizer in optimizers)], strict=True
    ):
        torch.testing.assert_close(was, now, rtol=0, atol=0)


class Collectives(TorchDispatchMode):
    """Count what is sent over the process group."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.namespace in ("c10d", "_c10d_functional")
        return function(*args, **(kwargs or {}))


OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
SPLITS = [  # meshes of four ranks, and how they hold a matrix
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


def test_muon_is_torchs_muon_on_any_split_in_two_exchanges_for_four_matrices(on_ranks):
    """Our Muon and torch's agree to the last bit but one, as ours orthogonalizes each matrix whole too. The matrices
    have seven rows, so some shards are smaller than others, or empty.
    """
    shapes = [(7, 8), (8, 6), (3, 5), (12, 4), (7, 7), (2, 9)]

    def task(rank):
        for shape, placements in SPLITS:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            generator = torch.Generator().manual_seed(0)
            whole = [nn.Parameter(torch.randn(size, generator=generator)) for size in shapes]
            split = [nn.Parameter(spread(matrix, mesh, placements)) for matrix in whole]
            ours, theirs = Muon(split, mesh_group(mesh), **OPTIONS), torch.optim.Muon(whole, **OPTIONS)
            for _ in range(3):
                for matrix, parts in zip(whole, split, strict=True):
                    matrix.grad = torch.randn(matrix.shape, generator=generator)
                    parts.grad = spread(matrix.grad, mesh, placements)
                theirs.step()
                with Collectives() as collectives:
                    ours.step()
                assert collectives.number == 4  # two rounds: four matrices, then two
            for matrix, parts in zip(whole, split, strict=True):
                torch.testing.assert_close(
                    parts.full_tensor(), matrix, rtol=0, atol=2e-7, msg=lambda m, p=placements: f"{p} {m}"
                )

    on_ranks(4, task)


def mesh_group(mesh):
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten("all").get_group()


def spread(whole, mesh, placements):
    """Return a whole tensor that every rank has as a DTensor. FSDP makes a strided shard of a tensor-parallel shard."""
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    outer, inner = mesh.get_coordinate()
    rows = [*whole.detach().chunk(mesh.size(1)), *[whole[:0].detach()] * 2][inner]
    rows = [*rows.chunk(mesh.size(0)), *[rows[:0]] * 2][outer]
    return DTensor.from_local(rows.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
