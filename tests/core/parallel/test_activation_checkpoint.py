"""Activation checkpointing gives bitwise the same gradients, and recomputes exactly what each mode promises."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.schema import ActivationCheckpoint
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import activation_checkpoint
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.experiments.compose.compose import compose_job

JOB = compose_job(
    "precision=fp32",
    "model.dim=64",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.vocab_size=64",
    "data=synthetic",
    "data.seq_len=16",
)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MATMUL = torch.ops.aten.mm.default


class Counting(TorchDispatchMode):
    """Count the operators that are executed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


def checkpoint(model, **config):
    activation_checkpoint.apply(
        model, Mesh(JOB.parallelism, None, None, None, None), replace(JOB, ac=from_dict(ActivationCheckpoint, config))
    )


def build(**config):
    """Return a model of four blocks with seven matmuls each, and one for the head."""
    with torch.device("meta"):
        model = models.build(JOB.model, 16)
    checkpoint(model, **config)
    model.to_empty(device="cpu")
    init_weights(model, JOB.model, seed=0)
    return model


def backward(model, forwards=1, **packed):
    """Return the operators that a backward executes after this number of forwards."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens, **packed).float().logsumexp(-1).sum() for _ in range(forwards)]
    with Counting() as counting:
        for loss in losses:
            loss.backward()
    return counting.counts


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# The backward needs no output of w2, the last of a block's matmuls (wq, wk, wv, wo, w1, w3, w2), so w2 is never
# recomputed.
MODES = [  # configuration; matmuls and attentions of its backward that are not in that of ac=none
    ({"name": "full"}, 4 * 6, 4),
    ({"name": "layer"}, 2 * 6, 2),
    ({"name": "layer", "every": 3}, 2 * 6, 2),
    ({"name": "op"}, 4 * 3, 0),  # wk, wo and w3 are recomputed
    ({"name": "lean"}, 0, 0),
    ({"name": "lean", "save_ops": ["aten.mm"]}, 0, 4),
    ({"name": "op", "save_ops": ["aten._scaled_dot_product_flash_attention_for_cpu.default"]}, 4 * 6, 0),
]


@pytest.mark.parametrize(("mode", "attentions"), [("none", 0), ("full", 4), ("op", 0), ("lean", 0)])
def test_attention_within_documents_is_saved_as_any_other(mode, attentions):
    counts = backward(build(name=mode), ends=torch.tensor([[5, 16], [16, 16]], dtype=torch.int32))
    assert counts[torch.ops.titan_hydra.attend_documents.default] == attentions
    assert counts[torch.ops.titan_hydra.attend_documents_backward.default] == 4


@pytest.mark.parametrize(("config", "matmuls", "attentions"), MODES, ids=lambda value: str(value))
@pytest.mark.parametrize("forwards", [1, 3], ids=["one microbatch", "three in flight"])
def test_a_mode_computes_again_what_it_says_and_learns_the_same(config, matmuls, attentions, forwards):
    plain, checkpointed = build(name="none"), build(**config)
    without, counts = backward(plain, forwards), backward(checkpointed, forwards)
    assert counts[MATMUL] - without[MATMUL] == forwards * matmuls
    assert counts[ATTENTION] == forwards * attentions
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(checkpointed)[name]), name


@pytest.mark.parametrize("name", ["full", "layer", "op", "lean"])
def test_names_stay_so_checkpoints_and_optimizers_see_no_difference(name):
    plain, checkpointed = build(name="none"), build(name=name)
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in plain.named_modules()]
    checkpointed.load_state_dict(plain.state_dict())
    assert list(get_model_state_dict(checkpointed)) == list(get_model_state_dict(plain))


def test_which_layers_are_checkpointed_does_not_depend_on_the_stage():
    with torch.device("meta"):
        model = models.build(JOB.model, 16)
    del model.layers["0"]
    kind = type(model.layers["1"])
    checkpoint(model, name="layer", every=2)
    assert [name for name, block in model.layers.items() if type(block) is not kind] == ["2"]


@pytest.mark.parametrize(
    ("name", "nearest"), [("aten.mmm", "aten.mm"), ("aten.mm.outt", "aten.mm.out"), ("atem.mm", "aten.mm")]
)
def test_an_unknown_operator_is_named_with_what_is_near(name, nearest):
    with pytest.raises(
        ConfigError, match=rf"ac.save_ops={name}: this torch has no such operator; nearest legal: .*{nearest}"
    ):
        build(name="op", save_ops=[name])


def test_a_budget_of_one_job_is_not_the_nexts():
    build(name="memory_budget", budget=0.25)
    assert torch._functorch.config.activation_memory_budget == 0.25
    build(name="none")
    assert torch._functorch.config.activation_memory_budget == 1.0
