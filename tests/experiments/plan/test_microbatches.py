"""Test the predicted time of what a step repeats for each microbatch: sums of gradients, messages between stages."""

import pytest

from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import time
from titan_hydra.experiments.plan.factors import FITTED
from titan_hydra.experiments.plan.shape import shape_of


def job_of(*overrides: str):
    line = "model=llama3_8b data=synthetic data.seq_len=8192 data.local_batch=2 hardware=h100 cluster=slurm gpus=8"
    return freeze(compose_unchecked(*line.split(), *overrides))


def test_gradients_are_added_up_for_each_microbatch_of_a_pipeline_and_each_local_batch():
    """A pipeline's ranks add up whole gradients, before ranks reduce them; FSDP adds up shards, once in a local batch."""

    def sums(*overrides: str) -> float:
        return time.speed(job_of("data.local_batch=1", *overrides)).parts["gradient sums"]

    layout = ("parallelism=pp", "parallelism.pp=2", "parallelism.dp_shard=4", "data.local_batch=4")
    two, four = (sums(*layout, f"pp_schedule.microbatches={number}") for number in (2, 4))
    bandwidth = 3.35e12 * FITTED.memory
    block = shape_of(job_of()).block
    assert four == pytest.approx(2 * two) == pytest.approx(4 * 16 * block * 10 / bandwidth)
    assert sums("data.global_batch=8") == 0
    assert sums("data.global_batch=16") == pytest.approx(2 * 32 * block / 8 * 10 / bandwidth)


def test_each_further_microbatch_waits_for_the_messages_of_1f1b():
    """On a slow network, a microbatch of 1F1B takes as much longer at the end of many as in the few that are simulated."""

    def waits(number: int) -> float:
        layout = (
            "gpus=16",
            "parallelism=pp",
            "parallelism.pp=4",
            "parallelism.dp_shard=4",
            f"data.local_batch={number}",
            "pp_schedule.microbatches=" + str(number),
        )
        idle = [time.speed(job_of(*layout, f"hardware.nic_gbs={rate}")).parts["pipeline idle"] for rate in (1, 40)]
        return idle[0] - idle[1]

    assert waits(64) == pytest.approx(waits(16) * 64 / 16, rel=0.2)
