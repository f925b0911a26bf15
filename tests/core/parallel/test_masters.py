"""Test mixed precision without FSDP: one cast per step, gradients added up in float32, and a parameter that a model
uses in several places stays one parameter.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kits.sizes import BASE
from titan_hydra.core import data
from titan_hydra.core.job.config.schema import Parallelism, Precision
from titan_hydra.core.parallel.masters import separate
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins

ALONE = Mesh(Parallelism(name="single"), None, None, None, None)
BF16 = Precision(name="bf16")


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8)))


def test_masters_have_the_names_and_the_modules_compute_with_copies():
    model = a_model()
    names = {name: parameter.clone() for name, parameter in model.named_parameters()}
    masters = separate(model, ALONE, BF16)
    assert list(dict(masters.weights.named_parameters())) == list(names)
    assert all(torch.equal(parameter, names[name]) for name, parameter in masters.weights.named_parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        masters.weights.get_parameter("1.0.bias").fill_(3)
    masters.cast()
    assert (model.get_parameter("1.0.bias") == 3).all()


def test_gradients_are_added_up_in_the_masters_dtype():
    """1 + 2^-9 needs ten bits, and bfloat16 has eight."""
    model = nn.Linear(1, 1, bias=False)
    masters = separate(model, ALONE, BF16)
    for x in (1.0, 2.0**-9):
        model(torch.full((1, 1), x, dtype=torch.bfloat16)).sum().backward()
    masters.take_gradients()
    assert masters.weights.weight.grad.item() == 1 + 2.0**-9
    assert model.weight.grad is None


def test_a_weight_of_two_modules_stays_one_and_a_frozen_one_frozen():
    model = a_model()
    model[0].weight = model[1][0].weight
    model[1][0].bias.requires_grad_(False)
    masters = separate(model, ALONE, BF16)
    assert model[0].weight is model[1][0].weight
    assert len(masters.pairs) == 2
    assert not model[1][0].bias.requires_grad


@pytest.mark.parametrize("name", ["fp32", "bf16_full"])
def test_without_a_cast_there_are_no_copies(name):
    model = a_model()
    precision = compose_job(f"precision={name}").precision
    masters = separate(model, ALONE, precision)
    assert masters.weights is model
    assert masters.pairs == []


class Casts(TorchDispatchMode):
    """Count copies of tensors into another dtype, by the number of elements."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.found = sizes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._foreach_copy_.default:
            self.found.append("all")
        if (
            function is torch.ops.aten._to_copy.default
            and args[0].dtype == torch.float32
            and tuple(args[0].shape) in self.sizes
        ):
            self.found.append(tuple(args[0].shape))
        return result


def test_weights_are_cast_once_a_step(tmp_path):
    """This holds with four local batches and recomputed blocks, where autocast would cast each weight eight times."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        job = compose_job(*later_wins(*BASE, "precision=bf16", "ac=full", "parallelism=single", "data.local_batch=4"))
        trainer = build(job, torch.device("cpu"))
        sizes = {tuple(parameter.shape) for parameter in trainer.model.parameters() if parameter.ndim == 2}
        with Casts(sizes) as casts:
            trainer.forward_backward(data.build(job, 0, 1).next())
        assert casts.found == ["all"]
    finally:
        dist.destroy_process_group()
