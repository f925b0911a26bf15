"""A checkpoint has the state of optimizers. Their options (decay, betas, momenta, rates) are those of the job that loads
it.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from titan_hydra.core.checkpoint import safe, state
from titan_hydra.core.checkpoint.planner import SavePlanner
from titan_hydra.core.train import optimizer as program
from titan_hydra.core.train.optimizer import build_optimizers
from titan_hydra.experiments.compose.compose import compose_job

KEYS = {
    "adamw": ("optimizer.beta1=0.5", "optimizer.beta2=0.6", "optimizer.eps=1e-3", "optimizer.decay_matrices_only=true"),
    "sgd": ("optimizer.sgd_momentum=0.5",),
    "muon": ("optimizer.muon_momentum=0.5", "optimizer.muon_lr=0.5", "optimizer.beta1=0.5"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm = nn.ModuleList([nn.Linear(4, 4, bias=False)]), nn.LayerNorm(4)


def built(*overrides):
    """Return a model and the optimizers of a job on it."""
    model, job = Model(), compose_job("debug=tiny", "precision=fp32", *overrides)
    return model, build_optimizers(model, job.optimizer, SimpleNamespace(stage=None))


def train(model, optimizers, steps=3):
    for _ in range(steps):
        model.norm(model.layers[0](torch.randn(5, 4))).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def saved(model, optimizers, folder):
    content = {"model": model.state_dict(), "optimizer": state.of_optimizers(model, optimizers)}
    dcp.save(content, checkpoint_id=folder, planner=SavePlanner(), no_dist=True)
    return content["optimizer"]


def load(model, optimizers, folder):
    content = state.of_optimizers(model, optimizers) | state.changeable(model, optimizers)
    safe.load_checkpoint(found := {"optimizer": content}, folder)
    state.into_optimizers(model, optimizers, found["optimizer"])


def options(optimizers):
    return [{k: v for k, v in group.items() if k != "params"} for one in optimizers for group in one.param_groups]


@pytest.mark.parametrize("name", KEYS)
def test_a_fork_has_its_own_options_of_the_optimizer(name, tmp_path):
    keys = (f"optimizer={name}", *(["optimizer.sgd_momentum=0.9"] if name == "sgd" else []))
    model, optimizers = built(*keys)
    train(model, optimizers)
    names = saved(model, optimizers, tmp_path)
    assert all(one.startswith("state.") for one in names), "options are not saved"
    other, own = built(*dict.fromkeys((*keys[:1], "optimizer.weight_decay=0.7", "optimizer.lr=0.1", *KEYS[name])))
    before = options(own)
    load(other, own, tmp_path)
    assert options(own) == before
    moments = state.of_optimizers(other, own)
    assert moments.keys() == names.keys() and all(torch.equal(moments[one], names[one]) for one in names)


class Counting(torch.optim.SGD):
    """Counts steps and keeps an estimate in its parameter groups, as some optimizers do that adapt their rate."""

    def __init__(self, parameters, lr):
        super().__init__(
            [{"params": list(parameters), "k": 0, "estimate": torch.zeros(()), "decay": 0.1}], lr=lr, momentum=0.9
        )

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["estimate"] += 0.25


def test_state_in_parameter_groups_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        program, "resolve", lambda _: lambda model, config, mesh: [Counting(model.parameters(), config.lr)]
    )
    model, optimizers = built()
    train(model, optimizers)
    saved(model, optimizers, tmp_path)
    other, own = built("optimizer.lr=0.5")
    own[0].param_groups[0]["decay"] = own[0].param_groups[0]["built"]["decay"] = 0.9
    load(other, own, tmp_path)
    (group,) = own[0].param_groups
    assert (group["k"], group["estimate"].item(), group["decay"], group["peak_lr"]) == (3, 0.75, 0.9, 0.5)
