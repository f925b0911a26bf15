"""`titan report --row` writes a run of ours in the form of a published row. `titan rates score` predicts the same for
this row as for the run's own job.
"""

import pytest

from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory, time
from titan_hydra.instruments.rates.own_row import row_of
from titan_hydra.instruments.rates.published import rows_of, score

BASE = (
    "model=llama3_8b",
    "data=synthetic",
    "data.seq_len=4096",
    "hardware=h100",
    "comm=fake",
    "gpus=16",
    "data.global_batch=64",
)
JOBS = {
    "fsdp": ("data.local_batch=2", "compile=block", "ac=op"),
    "hsdp, lean, rowwise with high precision": (
        "parallelism=hsdp",
        "parallelism.dp_shard=8",
        "ac=lean",
        "precision=float8_rowwise",
        "precision.recipe=rowwise_with_gw_hp",
    ),
    "tp, chunked loss": (
        "parallelism=fsdp_tp",
        "parallelism.tp=8",
        "data.local_batch=4",
        "loss=linear_cross_entropy",
        "loss.chunk_tokens=512",
    ),
    "pp, fp32, smaller": (
        "parallelism=fsdp_pp",
        "parallelism.pp=4",
        "data.local_batch=16",
        "pp_schedule=zbv",
        "precision=fp32",
        "model.n_layers=16",
    ),
    "experts, muon": ("model=qwen3_30b_a3b", "parallelism.ep=8", "optimizer=muon", "ac=full"),
    "adapters, split masters": ("adapter=lora", "adapter.rank=64", "parallelism.reshard_after_forward=never"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_row_is_predicted_as_its_job(name, tmp_path):
    job = freeze(compose_unchecked(*BASE, *JOBS[name]))
    row = {"source": "titan_hydra, a run", "tokens_per_second_per_gpu": 1000.0, "memory_gib": 10.0} | row_of(job, name)
    (tmp_path / "rows.yaml").write_text(f"- {row}".replace("True", "true").replace("False", "false"))
    (read,) = rows_of(tmp_path / "rows.yaml")
    found = score(read)
    assert found.speed == (1000.0, pytest.approx(time.speed(job).tokens_per_second))
    assert found.memory == (10.0, pytest.approx(memory.peak(job).gib))
