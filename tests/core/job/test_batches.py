"""Test how a global batch is divided."""

import pytest

from titan_hydra.core.job.batches import local_batches, microbatch_size, samples_at_once
from titan_hydra.experiments.compose.compose import compose_job

SMALL = ("debug=tiny", "data.local_batch=4")


@pytest.mark.parametrize(
    ("overrides", "at_once", "rounds", "size"),
    [
        (("gpus=1", "parallelism=single", "data.global_batch=12"), 4, 3, 4),
        (("gpus=4", "parallelism=hsdp", "data.global_batch=32"), 16, 2, 4),
        (("gpus=4", "parallelism=fsdp_tp", "parallelism.tp=2", "data.global_batch=8"), 8, 1, 4),
        (("gpus=2", "parallelism=pp", "pp_schedule.microbatches=2", "data.global_batch=8"), 4, 2, 2),
        (
            (
                "gpus=1",
                "parallelism=single",
                "fault_tolerance=local_sgd",
                "fault_tolerance.replicas=2",
                "data.global_batch=24",
            ),
            8,
            3,
            4,
        ),
    ],
)
def test_a_batch_is_cut_over_ranks_and_replica_groups(overrides, at_once, rounds, size):
    job = compose_job(*SMALL, *overrides)
    assert (samples_at_once(job), local_batches(job), microbatch_size(job)) == (at_once, rounds, size)
