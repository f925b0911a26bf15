"""The moving average of the weights: what it is on layouts is compared by the cases "moving average" of titan verify."""

import pytest
import torch
from torch import nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import export_hf, reader_of
from titan_hydra.core.train import ema
from titan_hydra.core.train.optimizer import step
from titan_hydra.experiments.plan.memory import peak


@pytest.mark.parametrize(
    "layout",
    [
        ("gpus=2", "parallelism=fsdp", "parallelism.reshard_after_forward=never"),  # keeps gathered weights
        ("parallelism=single", "precision=bf16"),  # keeps copies of the weights
        ("parallelism=single", "precision=bf16", "optimizer.masters=split"),
    ],
)
def test_validations_of_the_average_leave_training_alone(run_job, tiny, tmp_path, layout):
    words = ("steps=4", "checkpoint=off", *layout)
    plain = run_job(tiny(*words))
    often = ("optimizer.ema_decay=0.5", "validation=on", "validation.interval=1", "validation.steps=1")
    of_weights = run_job(tiny(*words, *often))
    averaged = run_job(tiny(*words, *often, "validation.ema=true"), tmp_path / "averaged")
    assert run_job.losses(plain) == run_job.losses(averaged) == run_job.losses(of_weights)
    one, other = (run_job.losses(run, "validation_loss") for run in (of_weights, averaged))
    assert one[1] == other[1] and all(one[number] != other[number] for number in (2, 3, 4))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_is_not_made_leaves_the_average_as_it_is(kind):
    model = nn.Linear(2, 2)
    optimizers = [kind(model.parameters(), lr=0.1, **({"fused": True} if kind is torch.optim.AdamW else {}))]
    ema.follow_weights(optimizers, decay=0.75)
    means = [(model.weight.detach().clone(), model.bias.detach().clone())]
    for number in range(1, 5):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number if number != 3 else torch.nan)
        step(optimizers, torch.ones(()), torch.tensor(number != 3))
        means.append(tuple(optimizers[0].state[parameter][ema.STATE].clone() for parameter in model.parameters()))
    assert all(map(torch.equal, means[2], means[3])) and not any(map(torch.equal, means[3], means[4]))


def test_an_export_has_the_averages_if_asked(run_job, tiny, tmp_path):
    run = run_job(tiny("steps=3", "optimizer.ema_decay=0.5"))
    weights, averages = (
        reader_of(run / "checkpoints/step-00000003"),
        reader_of(run / "checkpoints/step-00000003", ema=True),
    )
    shape = torch.Size([64])
    assert not torch.equal(*(one.tensor("norm.weight", shape, torch.float32) for one in (weights, averages)))
    export_hf(run, tmp_path / "hf", ema=True)
    without = run_job(tiny("steps=1"))
    with pytest.raises(ConfigError, match="ema_decay"):
        export_hf(without, tmp_path / "none", ema=True)
    assert not (tmp_path / "none").exists()


def test_a_plan_counts_four_bytes_a_parameter(tiny):
    without, averaged = (peak(tiny("parallelism=single", f"optimizer.ema_decay={decay}")) for decay in (0, 0.9))
    terms = [{term.name: term.bytes for term in one.terms} for one in (without, averaged)]
    assert 2 * terms[1]["optimizer"] == 3 * terms[0]["optimizer"] and terms[1]["weights"] == terms[0]["weights"]
