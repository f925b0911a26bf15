"""Test the predicted time of what a step repeats for each microbatch: sums of gradients, messages between stages, and
the exchanges and starts of blocks with experts.
"""

from dataclasses import replace

import pytest

from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import links, time
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


def experts_of(*overrides: str):
    line = "model=qwen3_30b_a3b data.local_batch=1 ac=none parallelism.ep=8 compile=block"
    return shape_of(job_of(*line.split(), *overrides))


def test_copies_for_all_to_all_take_the_traffic_of_their_rows():
    """They take as long as the rows are wide and the memory is slow. DeepEP needs no such copies."""

    def copies(*overrides: str) -> float:
        shape = experts_of(*overrides)
        return sum(links.exchange_passes(shape, FITTED)) - sum(links.exchange_passes(shape, replace(FITTED, copy=0.0)))

    plain = copies()
    rows = 8 * 8192 * FITTED.imbalance
    assert plain == pytest.approx(4 * FITTED.copy * rows * 2048 * 2 / (3.35e12 * FITTED.memory))
    assert copies("model.dim=4096") == pytest.approx(2 * plain)
    assert copies("hardware.memory_tbs=6.7") == pytest.approx(plain / 2)
    assert copies("hardware.dispatcher=deep_ep") == 0


def test_the_host_starts_each_kernel_of_an_eager_block_with_experts():
    """The host starts a dense block's kernels and those of the experts. Megatron compiles nothing; CUDA graphs need no
    host. If an exchange runs behind another microbatch, the host works in that time too.
    """
    few = ("data.seq_len=128", "model.max_seq_len=128")  # so few tokens that only the host matters

    def late(shape) -> float:
        return time.block_passes(shape, FITTED)["host"].forward

    compiled, eager = experts_of(*few), experts_of(*few, "compile=off")
    assert late(eager) - late(compiled) == pytest.approx(FITTED.launch, rel=0.1)
    megatron = replace(compiled, transformer_engine=True)
    assert late(megatron) - late(compiled) == pytest.approx(FITTED.launch, rel=0.1)
    assert late(replace(megatron, captured=True)) == 0
    tp = replace(experts_of(*few, "parallelism.tp=2", "parallelism.ep=8"), transformer_engine=True)
    assert late(tp) - late(megatron) == pytest.approx((FITTED.launch_tp - 1) * FITTED.launch, rel=0.1)

    slow = replace(experts_of(*few, "hardware.nvlink_gbs=0.001"), transformer_engine=True)
    hidden = replace(slow, hidden_exchange=True)
    assert late(slow) > 0 == late(hidden)
    parts = [time.block_passes(one, FITTED) for one in (slow, hidden)]
    assert parts[1]["EP communication"].forward < parts[0]["EP communication"].forward
