"""`titan verify --module` accepts a module that is parallelized rightly, and names what is wrong with a module that is
not.
"""

import json

import pytest

from titan_hydra.cli import main
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.instruments.verify.module import verify_module
from titan_hydra.instruments.verify.subject import load_subject

SUBJECTS = '''
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_hydra.instruments.verify.subject import Subject


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x):
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turn).flatten(-2)
        return x + self.down(F.gelu(self.up(self.norm(turned))))


class Forgets(Network):
    """Has a state that it does not save."""

    seen = 0

    def forward(self, x):
        self.seen += self.training
        return super().forward(x) * (1 + 0.1 * (self.seen > 2))


def shard(model, mesh, **options):
    return fully_shard(model, mesh=mesh["data"], **options)


def summed(model, mesh):
    model = shard(model, mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return model


def apart(model, mesh):
    return model


def split(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(step):
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}


def loss(model, samples, mesh):
    return model(samples["x"]).square().mean()


def subject(parallelize, model=Network, mesh={"data": 2}, **options):
    return Subject(mesh=mesh, model=model, parallelize=parallelize, batch=batch, loss=loss, split=("data",), **options)


fsdp = subject(shard, accumulation=2)
sums = subject(summed)
copies = subject(apart)
coarse = subject(lambda model, mesh: shard(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
forgets = subject(shard, Forgets)
tp = Subject(mesh={"tp": 2}, model=Network, parallelize=split, batch=batch, loss=loss)
elsewhere = subject(shard, mesh={"dp": 2})
uneven = subject(shard, mesh={"data": 3})
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "subjects.py"
    path.write_text(SUBJECTS)
    return path


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fsdp", set()),
        ("tp", set()),
        ("sums", {"norm", "gradients", "weights"}),
        ("copies", {"norm", "gradients", "weights", "copies"}),
        ("coarse", {"gradients", "norm", "sums"}),
        ("forgets", {"resume"}),
    ],
)
def test_each_fault_is_found_by_its_checks(file, name, wrong):
    verdict = verify_module(f"{file}:{name}", 3)
    checks = {check.name: check for check in verdict.checks}
    assert verdict.reference == "float64"
    assert {check.name for check in verdict.checks if check.passed is False} >= wrong and verdict.passed == (
        not wrong
    ), verdict
    # gradients of the reference are right: rounding alone does not reach the bounds
    assert all(allowed < 1e-4 for _, allowed in verdict.gradients.values())
    assert (checks["norm"].passed is None) == (name == "tp")  # torch has no norm of DTensors and tensors together


def test_the_command_prints_a_table_or_json(file, capsys):
    assert main(["verify", "--module", f"{file}:sums"]) == 1
    printed = capsys.readouterr().out
    assert "sums on data 2 against one process in float64" in printed and "5 of 5 gradients are wrong" in printed
    assert main(["verify", "--module", f"{file}:fsdp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["mesh"] == {"data": 2} and len(found["gradients"]) == 5
    assert all(set(check) == {"name", "value", "allowed", "where", "passed"} for check in found["checks"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{}", "is not FILE.py:NAME or MODULE:NAME"),
        ("{}:fsd", "subjects has no Subject fsd; nearest legal: fsdp"),
        ("nowhere.py:fsdp", "there is no file"),
        ("nowhere.at.all:fsdp", "there is no module nowhere.at.all"),
        ("{}:elsewhere", "elsewhere.split=data: is no dimension of the mesh; nearest legal: dp"),
        ("{}:uneven", "accumulation=1: 8 samples cannot be split evenly over 3 ranks"),
    ],
)
def test_a_wrong_place_or_subject_is_one_line(file, place, message):
    with pytest.raises(ConfigError, match=message) as caught:
        verify_module(place.format(file), 3)
    assert len(str(caught.value).splitlines()) == 1


def test_a_subject_is_found_in_a_module_too(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert load_subject("subjects:fsdp").ranks == 2
