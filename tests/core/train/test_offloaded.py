"""optimizer.offload: weights and states are bitwise those of a run without it, in one checkpoint format."""

import copy

import pytest
import torch

from tests.kits.sizes import BASE
from titan_hydra.core import data
from titan_hydra.core.checkpoint.state import into_optimizers, of_optimizers
from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.core.parallel.split_masters import master_of
from titan_hydra.core.train import offloaded
from titan_hydra.core.train.optimizer import set_lr
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins

SIMPLE = "parallelism.backend=simple_fsdp"
EMA, MUON = "optimizer.ema_decay=0.5", "optimizer=muon"
LAYOUTS = [
    (2, "parallelism=fsdp", EMA, "optimizer.decay_matrices_only=true"),
    (2, "parallelism=fsdp", MUON, "optimizer.qk_clip=0.01"),
    (2, "parallelism=fsdp", "optimizer=sgd", "optimizer.sgd_momentum=0.9"),
    (2, "parallelism=fsdp", "precision=bf16", "optimizer.masters=split", EMA),
    (2, "parallelism=fsdp", SIMPLE, EMA),
    (2, "parallelism=fsdp", SIMPLE, "precision=bf16", "compile=model", "compile.backend=aot_eager"),
    (2, "parallelism=tp", "precision=bf16", EMA),
    (2, "parallelism=pp", MUON, "pp_schedule.microbatches=2"),
    (2, "parallelism=fsdp_ep", "parallelism.ep=2", "model=qwen3_moe_debug", MUON),
    (1, "parallelism=single", "precision=bf16", "optimizer.masters=split"),
]


def states_of(trainer):
    """Return the weights and states of this rank, by name."""
    weights = dict(trainer.masters.weights.named_parameters())
    state = of_optimizers(trainer.masters.weights, trainer.optimizers)
    return {name: master_of(parameter) for name, parameter in weights.items()} | state


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(local_part(value), local_part(other[name])), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ", ".join(layout[1:]))
def test_weights_and_states_are_bitwise_those_of_a_run_without(layout, on_ranks, monkeypatch):
    monkeypatch.setattr(offloaded, "BUCKET", 4096)  # most matrices have a group of their own
    ranks, *words = layout
    words = later_wins(*BASE, "data.local_batch=4", "data.global_batch=8", f"gpus={ranks}", *words)
    jobs = [compose_job(*words, f"optimizer.offload={mode}") for mode in ("false", "true")]

    def task(rank):
        trainers, mesh = [], None
        for job in (jobs[0], jobs[1], jobs[1]):
            trainers.append(build(job, torch.device("cpu"), mesh))
            mesh = trainers[0].mesh
        plain, on_host, loaded = trainers
        assert max(len(one.param_groups) for one in on_host.optimizers) > 4 > len(plain.optimizers[0].param_groups)
        loader = data.build(jobs[0], mesh.data_rank, mesh.data_ranks)
        for number in range(1, 4):
            batch = loader.next()
            for trainer in trainers[: 3 if number == 3 else 2]:
                set_lr(trainer.optimizers, number / 4)
                agreement = trainer.agree(trainer.forward_backward(batch), trainer.measure())
                trainer.update(agreement)
                agreement.read()
            if number == 2:  # a checkpoint of either is read by the other
                held = states_of(plain)
                same(held, states_of(on_host))
                for target, source in zip(*(one.masters.weights.parameters() for one in (loaded, plain)), strict=True):
                    local_part(target.detach()).copy_(local_part(source.detach()))
                    if hasattr(source, "lower_half"):
                        target.lower_half.copy_(source.lower_half)
                saved = copy.deepcopy(of_optimizers(plain.masters.weights, plain.optimizers))
                into_optimizers(loaded.masters.weights, loaded.optimizers, saved)
        loader.close()
        same(states_of(plain), states_of(on_host))
        same(states_of(plain), states_of(loaded))

    on_ranks(ranks, task)
