"""fault_tolerance=torchft: groups that sum their gradients at every step equal one data-parallel world, and a group
that is behind catches up.
"""

import shutil

import pytest

from .test_fault_tolerance import distance, of_groups, weights

pytest.importorskip("torchft", reason="the extra torchft is not installed")

STEPS = ("steps=6", "data.global_batch=8", "data.local_batch=2")
TORCHFT = (*STEPS, "fault_tolerance=torchft", "checkpoint.interval=3")


def quorums(run_job, directory):
    return [
        (row["step"], row["groups"], row["caught_up"])
        for row in run_job.rows(directory, "events")
        if row["event"] == "quorum"
    ]


def test_groups_are_one_data_parallel_world(tiny, run_job):
    """Each of two groups is FSDP over two ranks. Clipping is on, because a group knows the norm of the gradient summed
    over all groups.
    """
    apart = run_job(tiny(*TORCHFT, "parallelism=fsdp", "gpus=2"))
    together = run_job(tiny(*STEPS, "parallelism=ddp", "gpus=4"))
    one, other = of_groups(apart, 2, 6)
    assert distance(one, other) == 0
    assert distance(one, weights(together, 6)) < 1e-6
    for key in ("loss", "grad_norm"):
        expected = list(run_job.losses(together, key).values())
        for directory in (apart, apart / "replicas" / "1"):
            assert list(run_job.losses(directory, key).values()) == pytest.approx(expected, rel=1e-5)
    assert quorums(run_job, apart) == [(0, 2, 0)]


def test_a_start_afresh_on_data_that_go_on(tiny, run_job):
    """A run that starts from another run's checkpoint of step 3 counts steps from 1 again, but goes on with the data of
    step 4.
    """
    whole = run_job(tiny(*STEPS, "parallelism=ddp", "gpus=2", "checkpoint.interval=3"))
    start = f"checkpoint.initial_load_path={whole}/checkpoints/step-00000003"
    afresh = (start, "checkpoint.exclude_from_loading=[optimizer,lr_scheduler]", "steps=4")
    expected = run_job.losses(run_job(tiny(*STEPS, "parallelism=ddp", "gpus=2", *afresh)))
    assert list(expected) == [1, 2, 3, 4]
    assert list(run_job.losses(run_job(tiny(*TORCHFT, *afresh))).values()) == pytest.approx(
        list(expected.values()), rel=1e-5
    )


def test_a_group_that_lost_its_checkpoint_catches_up_and_sees_no_sample_twice(tiny, run_job):
    """The group starts from scratch while the other group resumes from step 6. Both groups end with the same bits as if
    no checkpoint had been lost.
    """
    undisturbed = run_job(tiny(*TORCHFT, "steps=9"))
    expected = of_groups(undisturbed, 2, 9)
    for folder in (undisturbed, undisturbed / "replicas" / "1"):
        shutil.rmtree(folder / "checkpoints" / "step-00000009")
        (folder / "result.json").unlink(missing_ok=True)
    shutil.rmtree(undisturbed / "replicas" / "1" / "checkpoints" / "step-00000006")
    run_job(tiny(*TORCHFT, "steps=9"), undisturbed)
    assert quorums(run_job, undisturbed / "replicas" / "1")[-1] == (6, 2, 6)
    for before, after in zip(expected, of_groups(undisturbed, 2, 9), strict=True):
        assert distance(before, after) == 0
