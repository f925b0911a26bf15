"""Compare Local SGD and DiLoCo, in real replica groups, with the arithmetic that they must equal;
tests/core/train/fault_tolerance/test_replicas.py kills groups.
"""

import shutil

import pytest
import torch

from tests.core.checkpoint.steps import tensors
from titan_hydra.core.job.config.operation import FaultTolerance
from titan_hydra.core.job.run.checkpoints import step_folder
from titan_hydra.core.train.fault_tolerance.outer import Fragment, due, fragment_of


def weights(directory, step, part="model."):
    """Return the unsharded tensors of a checkpoint, by name."""
    return tensors(step_folder(directory / "checkpoints", step), part)


def of_groups(directory, groups, step):
    """Return the weights of every replica group."""
    return [weights(directory / "replicas" / str(group) if group else directory, step) for group in range(groups)]


def distance(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_outer_step_is_sgd_with_nesterov_momentum():
    torch.manual_seed(0)
    config = FaultTolerance(outer_lr=0.7, outer_momentum=0.9)
    parameter, expected = torch.nn.Parameter(torch.randn(4, 3)), None
    expected = torch.nn.Parameter(parameter.detach().clone())
    outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    fragment = Fragment([parameter], torch.zeros(12), torch.zeros(12))
    fragment.remember()
    for _ in range(3):
        with torch.no_grad():
            moved = torch.randn(4, 3)
            parameter.add_(moved)
            fragment.take(fragment.offer(), config)
        expected.grad = -moved
        outer.step()
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-5)


def test_fragments_take_turns_and_all_meet_at_the_end():
    config = FaultTolerance(sync_every=6, fragments=3)
    assert [due(step, 14, config) for step in range(1, 15)] == [
        [],
        [0],
        [],
        [1],
        [],
        [2],
        [],
        [0],
        [],
        [1],
        [],
        [2],
        [],
        [0, 1, 2],
    ]


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("tok_embeddings.weight", 0),
        ("layers.0.attention.wq.weight", 0),
        ("layers.2.feed_forward.w1.weight", 0),
        ("layers.3.ffn.w", 1),
        ("layers.5.attention_norm.weight", 1),
        ("norm.weight", 1),
        ("output.weight", 1),
    ],
)
def test_a_fragment_is_neighbouring_layers(name, fragment):
    modules = ["tok_embeddings", *(f"layers.{block}" for block in range(6)), "norm", "output"]
    assert fragment_of(name, modules, 2) == fragment


SGD = ("optimizer=sgd", "optimizer.max_norm=0", "steps=4", "data.global_batch=8", "data.local_batch=2")


def test_local_sgd_that_meets_at_every_step_is_data_parallel(tiny, run_job):
    """Each of two groups is FSDP over two ranks. Clipping is off, because a group knows only the norm of its own
    gradient.
    """
    apart = run_job(
        tiny(*SGD, "parallelism=fsdp", "gpus=2", "fault_tolerance=local_sgd", "fault_tolerance.sync_every=1")
    )
    together = run_job(tiny(*SGD, "parallelism=ddp", "gpus=4"))
    one, other = of_groups(apart, 2, 4)
    assert distance(one, other) == 0
    assert distance(one, weights(together, 4)) < 1e-6
    meetings = [row for row in run_job.rows(apart, "events") if row["event"] == "meeting"]
    assert [row["loss"] for row in meetings] == pytest.approx(list(run_job.losses(together).values()), abs=1e-6)
    assert run_job.rows(apart)[-1]["tokens_seen"] == 4 * 8 * 64


def test_diloco_without_momentum_at_rate_1_is_local_sgd(tiny, run_job):
    common = "steps=5", "fault_tolerance.sync_every=2", "fault_tolerance.fragments=2"
    outer = "fault_tolerance.outer_lr=1", "fault_tolerance.outer_momentum=0"
    jobs = tiny(*common, "fault_tolerance=local_sgd"), tiny(*common, "fault_tolerance=diloco", *outer)
    local_sgd, diloco = (of_groups(run_job(job), 2, 5) for job in jobs)
    assert distance(*local_sgd) == distance(*diloco) == 0
    assert distance(local_sgd[0], diloco[0]) < 1e-6


def test_resumed_between_meetings_it_ends_with_the_same_bits(tiny, run_job):
    job = tiny("steps=6", "fault_tolerance=diloco", "fault_tolerance.sync_every=2", "checkpoint.interval=3")
    directory = run_job(job)
    undisturbed = of_groups(directory, 2, 6)
    for folder in (directory, directory / "replicas" / "1"):
        shutil.rmtree(folder / "checkpoints" / "step-00000006")
    run_job(job, directory)
    assert [row["step"] for row in run_job.rows(directory / "replicas" / "1")] == [1, 2, 3, 4, 5, 6]
    for before, after in zip(undisturbed, of_groups(directory, 2, 6), strict=True):
        assert distance(before, after) == 0
