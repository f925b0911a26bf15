"""Compare what a rank of the fake world holds and sends with numbers computed by hand, and what `comm=fake` prints."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.kits import forked
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.count import count_rank
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_cells, compose_job, compose_unchecked
from titan_hydra.experiments.compose.overrides import steps_of_a_fake_rank

SHAPE = (
    "model.n_layers=2",
    "model.dim=64",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.vocab_size=256",
    "data=synthetic",
    "data.seq_len=32",
    "data.local_batch=2",
    "comm=fake",
    "ac=none",
)
LLAMA = ("model=llama3_debug", "precision=fp32", *SHAPE)
EXPERTS = ("model=qwen3_moe_debug", "precision=bf16", *SHAPE)

BLOCK = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64  # attention, feed-forward of width 256, two norms
TABLE = 256 * 64  # the embedding, and the head
WHOLE = 2 * BLOCK + 2 * TABLE + 64
ROTARY = 2 * 32 * 8 * 4  # cosine and sine of 32 places and half a head, in float32
STATE = 2 * 32 * 64 * 4  # a local batch of hidden states, in float32


def counted(*words: str):
    job = freeze(compose_unchecked(*words))
    assert not check(job)
    return count_rank(job, 0)


def test_fsdp_gathers_twice_and_scatters_once():
    found = counted(*LLAMA, "gpus=4")
    assert found.held["weights"] == WHOLE + ROTARY  # 4 bytes, a quarter of the elements
    assert found.held["gradients"] == WHOLE
    assert found.held["optimizer"] == pytest.approx(2 * WHOLE, abs=200)  # and a number of steps for each parameter
    # Gathered in forward and in backward, but for the last unit (head and norm), which stays; gradients once.
    assert found.messages == {"fsdp": pytest.approx(4 * (3 * WHOLE - TABLE - 64), abs=100)}


def test_tensor_parallel_gathers_and_scatters_hidden_states():
    found = counted(*LLAMA, "gpus=2", "parallelism=tp", "parallelism.tp=2")
    norms = 5 * 64  # whole on each rank; all other weights are halved
    assert found.held["weights"] == 4 * ((WHOLE - norms) // 2 + norms) + ROTARY
    # In each direction a block gathers and scatters twice; embedding and head once together in each.
    logits = 2 * 32 * 4 * 4 * 2
    assert found.messages == {"tp": pytest.approx((2 * 2 * 4 + 4) * STATE + logits, abs=100)}


def test_pipeline_stages_exchange_hidden_states_and_their_gradients():
    found = counted(
        *LLAMA,
        "gpus=2",
        "parallelism=fsdp_pp",
        "parallelism.dp_shard=1",
        "parallelism.pp=2",
        "pp_schedule=1f1b",
        "pp_schedule.microbatches=2",
    )
    assert found.held["weights"] == 4 * (BLOCK + TABLE) + ROTARY  # of the first stage
    assert found.messages == {"pp": pytest.approx(2 * STATE, abs=100)}  # one sent forward, one received backward


@pytest.mark.parametrize("gpus", [2, 4])  # with 2, the ranks that exchange rows shard the other weights too
def test_experts_exchange_rows(gpus):
    found = counted(*EXPERTS, f"gpus={gpus}", "parallelism.ep=2")
    rows = 2 * 32 * 2 * 64 * 2  # two experts a token, in bfloat16
    assert found.messages["ep"] == pytest.approx(2 * 4 * rows, abs=100)  # there and back, in both directions
    attention = 64 * 4 * 32 * 4 + 2 * 32 + 2 * 64 + 8 * 64  # four linears, norms of queries and keys, norms, router
    dense = 2 * attention + 2 * TABLE + 64
    experts = 2 * 8 * 3 * 64 * 384 * (gpus // 2 - 1) // 2  # half of them, sharded over gpus / 2 ranks
    sent = dense + (dense - TABLE - 64) + 2 * experts  # gathered in bfloat16
    assert found.messages["fsdp"] == pytest.approx(2 * sent + 4 * (dense + experts), rel=0.02)


def test_a_fake_rank_makes_one_step_and_refuses_others():
    (line,) = steps_of_a_fake_rank(["gpus=8", "steps=3", "comm=fake"])
    assert line.startswith("steps=3: ") and line.endswith("nearest legal: 1")
    assert not steps_of_a_fake_rank(["steps=1", "comm=fake"]) + steps_of_a_fake_rank(["steps=3"])
    with pytest.raises(ConfigError, match="steps=3: "):
        compose_cells(["comm=fake", "gpus=8", "++steps=3"])


def test_a_fake_rank_prints_what_it_holds_and_sends(tmp_path: Path):
    words = [*LLAMA, "gpus=8", "parallelism=fsdp_tp", "parallelism.tp=2", "comm.rank=5"]
    done = forked.run("launch.py", [*words, f"paths.runs={tmp_path}/runs"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    sent = {line[0]: line[1] for line in lines if line[:1] in (["tp"], ["fsdp"])}
    assert sent == {"tp": "2", "fsdp": "4"} and "held: weights " in done.stdout and "done, 1 step," in done.stdout
    (result,) = (json.loads(file.read_text()) for file in tmp_path.glob("runs/*/result.json"))
    assert set(result["counted"]["sent_gib"]) == {"tp", "fsdp"} and result["memory_gib"] is None
    assert result["steps"] == 1
    assert result["counted"]["held_gib"]["peak"] > result["counted"]["held_gib"]["weights"] > 0


def test_ranks_after_a_fake_world_hold_their_own_shards(on_ranks):
    """DTensor's caches outlive a world, and the mesh of a fake rank equals the mesh of real ranks."""
    words = (*LLAMA, "gpus=2", "parallelism=tp", "parallelism.tp=2")
    counted(*words)
    job, name = compose_job(*words, "comm=default"), "layers.0.attention.wq.weight"
    whole = models.build(job.model, job.data.seq_len)
    init_weights(whole, job.model, job.seed)

    def compare(rank: int) -> None:
        weight = build(job, torch.device("cpu")).model.get_parameter(name)
        assert torch.equal(weight.full_tensor(), whole.get_parameter(name))

    on_ranks(2, compare)
