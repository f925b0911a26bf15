"""What a rank makes of the environment that it inherits."""

import dataclasses

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.train import worker
from titan_hydra.experiments.compose.compose import compose_job

CONTAINER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8"}  # as enroot's hook sets it


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Return `monkeypatch`, with a copy of the environment that a test may change."""
    monkeypatch.setattr(worker.os, "environ", {"TMPDIR": str(tmp_path)})
    monkeypatch.setattr(worker.tempfile, "gettempdir", lambda: str(tmp_path))
    return monkeypatch


def test_replica_groups_start_where_a_container_has_set_the_variables_of_torchrun(clean, tmp_path):
    job = compose_job(
        "debug=tiny", "model=llama3_debug", "fault_tolerance=local_sgd", "fault_tolerance.replicas=2", "gpus=1"
    )
    place = worker.Place(rank=1, ranks=2, local_rank=1, local_ranks=2)
    worker.os.environ.update(CONTAINER)
    assert worker._group_of(job, place, tmp_path / "run-12345678")[0] == 1
    with pytest.raises(ConfigError, match="torchrun"):
        worker._group_of(job, dataclasses.replace(place, torchrun=True), tmp_path / "run-12345678")


def test_no_cache_of_kernels_lies_in_the_home_folder(clean, tmp_path):
    worker.set_environment(2, False, 1)
    assert worker.os.environ["TRITON_CACHE_DIR"].startswith(f"{tmp_path}/torchinductor_")
    worker.os.environ.clear()
    worker.os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/scratch/kernels"
    worker.set_environment(2, False, 1)
    assert worker.os.environ["TRITON_CACHE_DIR"] == "/scratch/kernels/triton/1"
    worker.os.environ["TRITON_CACHE_DIR"] = "/mine"
    worker.set_environment(2, False, 1)
    assert worker.os.environ["TRITON_CACHE_DIR"] == "/mine"


SLURM = ("cluster=slurm", "cluster.gpus_per_node=8")
KUBERNETES = (
    "cluster=kubernetes",
    "cluster.gpus_per_node=8",
    "cluster.image=x",
    "+cluster.volumes={runs: /shared}",
    "paths.runs=/shared/runs",
)


@pytest.mark.parametrize(
    "line",
    [
        *((*SLURM, f"+cluster.environment.{name}=x") for name in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "UID")),
        *((*KUBERNETES, f"+cluster.environment.{name}=x") for name in ("PYTHONPATH", "PYTHONHOME", "POD_NAME")),
        (*SLURM, "paths.runs=/x/s_12:30:00"),
        (*KUBERNETES, "paths.runs=/shared/12:30"),
        ("cluster=local", "paths.runs=a:b"),
    ],
)
def test_nothing_may_lead_ranks_to_other_code(line):
    with pytest.raises(ConfigError) as refused:
        compose_job("debug=tiny", "gpus=1", *line)
    key = "paths.runs=" if "paths.runs" in line[-1] else "cluster.environment="
    assert [text.partition(key)[0] for text in str(refused.value).split("\n")] == [""]
    if key == "paths.runs=":
        assert line[-1].replace(":", "-").removeprefix(key) in str(refused.value)


def test_a_run_in_this_process_needs_no_copy():
    assert compose_job("debug=tiny", "cluster=inline", "gpus=1", "paths.runs=a:b").paths.runs == "a:b"
