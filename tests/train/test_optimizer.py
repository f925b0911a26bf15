"""Learning rates step by step, and which parameters which optimizer takes."""
import math

import pytest
import torch

from titan_hydra import models
from titan_hydra.config import compose_job
from titan_hydra.config.schema import LrSchedule
from titan_hydra.train.optimizer import build_optimizers, lr_factor, set_lr


def factors(steps, **options):
    return [lr_factor(step, steps, LrSchedule(**options)) for step in range(1, steps + 1)]


TABLES = [
    ({"name": "constant", "warmup_steps": 0}, [1, 1, 1, 1, 1]),
    ({"name": "constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
    ({"name": "wsd", "warmup_steps": 1, "decay_ratio": 0.0}, [0.5, 1, 1, 1, 1]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.4}, [1, 1, 1, 1, 0.5]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8}, [1, 1, 0.75, 0.5, 0.25]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8, "min_factor": 0.5}, [1, 1, 0.875, 0.75, 0.625]),
    ({"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.8, "decay_type": "sqrt"}, [1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ({"name": "wsd", "warmup_steps": 2, "decay_ratio": 1.0}, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]),
    ({"name": "cosine", "warmup_steps": 1}, [0.5, 1, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 - math.cos(math.pi / 4))]),
    ({"name": "cosine", "warmup_steps": 1, "min_factor": 0.1}, [0.5, 1, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55,
                                                              0.1 + 0.45 * (1 - math.cos(math.pi / 4))]),
    ({"name": "cosine", "warmup_steps": 5}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]),
]


@pytest.mark.parametrize(("options", "expected"), TABLES)
def test_rate_over_five_steps(options, expected):
    assert factors(5, **options) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["wsd", "cosine", "constant"])
def test_no_step_has_a_rate_of_zero(name):
    assert min(factors(100, name=name, warmup_steps=10)) > 0


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    job = compose_job("debug=tiny", "optimizer=muon")
    with torch.device("meta"):
        model = models.build(job.model, 8)
    adamw, muon = build_optimizers(model, job.optimizer)
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
    matrices, others = build_optimizers(model, job.optimizer)[0].param_groups
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all(parameter.ndim == 1 for parameter in others["params"])
