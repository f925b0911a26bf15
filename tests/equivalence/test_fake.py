"""Build the layouts of the paper's tables, on up to 512 GPUs, with `comm=fake`, and let one rank at a time make a step."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_hydra.core.base.private import TorchDispatchMode
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.ranks import world_size
from titan_hydra.core.train.fake import fake_step, fake_world
from titan_hydra.core.train.trainer import assemble
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

LAUNCH = Path(__file__).parents[2] / "launch.py"
B8, B70, B405 = (("data=synthetic", f"model=llama3_{size}") for size in ("8b", "70b", "405b"))
FLOAT8 = ("compile=block", "precision=float8_tensorwise")
# AsyncTP and compile only choose kernels, of which the fake world has none; rows of the paper that differ only in these
# are listed once
TABLES = {
    "table 1, FSDP": (*B8, "parallelism=fsdp", "gpus=8", "data.seq_len=8192", "data.local_batch=2", "ac=op"),
    "table 1, Float8": (*B8, *FLOAT8, "parallelism=fsdp", "gpus=8", "data.seq_len=8192", "data.local_batch=2", "ac=op"),
    "table 2, FSDP": (*B8, "parallelism=fsdp", "gpus=128", "data.seq_len=8192", "data.local_batch=2", "ac=op"),
    "table 2, Float8": (
        *B8,
        *FLOAT8,
        "parallelism=fsdp",
        "gpus=128",
        "data.seq_len=8192",
        "data.local_batch=2",
        "ac=op",
    ),
    "table 3, 2-D": (
        *B70,
        *FLOAT8,
        "parallelism=fsdp_tp",
        "parallelism.tp=8",
        "gpus=256",
        "data.seq_len=8192",
        "data.local_batch=16",
        "ac=full",
    ),
    **{
        f"table 4, {schedule}": (
            *B405,
            *FLOAT8,
            "parallelism=fsdp_tp_pp",
            f"pp_schedule={schedule}",
            "parallelism.tp=8",
            "parallelism.pp=16",
            "gpus=512",
            "data.seq_len=8192",
            "data.local_batch=32",
            "ac=full",
        )
        for schedule in ("1f1b", "interleaved_1f1b")
    },
    **{
        f"table 5, CP {cp}": (
            *B8,
            *FLOAT8,
            "parallelism=fsdp_cp",
            f"parallelism.cp={cp}",
            "gpus=8",
            f"data.seq_len={32768 * cp}",
            "data.local_batch=1",
            "model.max_seq_len=262144",
            "ac=full",
        )
        for cp in (1, 2, 4, 8)
    },
    **{
        f"table 6, CP {cp}": (
            *B405,
            *FLOAT8,
            "parallelism=fsdp_tp_cp_pp",
            f"parallelism.cp={cp}",
            "parallelism.tp=8",
            "parallelism.pp=8",
            "gpus=512",
            f"data.seq_len={32768 * cp}",
            "data.local_batch=8",
            "model.max_seq_len=262144",
            "ac=full",
        )
        for cp in (1, 2, 4, 8)
    },
}


def step(overrides, rank, runs):
    """Run launch.py with comm=fake. Return the peak memory in GiB of all processes that it started."""
    code = (
        "import resource, subprocess, sys; status = subprocess.run(sys.argv[1:]).returncode; "
        "print('GIB', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20); sys.exit(status)"
    )
    line = [sys.executable, str(LAUNCH), "comm=fake", f"comm.rank={rank}", f"paths.runs={runs}", *overrides]
    return subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """Step the last rank of every row, and also the first rank if pipeline stages differ, two ranks at a time."""
    runs = tmp_path_factory.mktemp("fake")
    cells = [
        (name, rank) for name, row in TABLES.items() for rank in ([0, "last"] if "pp" in " ".join(row) else ["last"])
    ]
    with ThreadPoolExecutor(2) as pool:
        futures = {}
        for name, rank in cells:
            number = (
                int(next(part for part in TABLES[name] if part.startswith("gpus="))[5:]) - 1 if rank == "last" else rank
            )
            futures[name, rank] = pool.submit(step, TABLES[name], number, runs / str(len(futures)))
        return {cell: future.result() for cell, future in futures.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_row_of_the_paper_steps_in_little_memory(name, stepped):
    for (row, rank), run in stepped.items():
        if row == name:
            assert run.returncode == 0, (rank, run.stdout[-2000:], run.stderr[-2000:])
            assert float(run.stdout.rsplit("GIB", 1)[1]) < 2, rank


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_the_stages_of_405b_add_up_to_the_model(schedule):
    job = compose_job("comm=fake", *TABLES[f"table 4, {schedule}"])
    total = 0
    for stage in range(job.parallelism.pp):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * 512 // 16, world_size=world_size(job))
        try:
            job.precision.converter = None  # Float8 linears do not change the counts, and converting them takes seconds
            parts = assemble(job, torch.device("cpu"))
            total += sum(parameter.numel() for part in parts.stages for parameter in part.parameters())
        finally:
            dist.destroy_process_group()
    assert total == 405_853_388_800


@pytest.mark.parametrize("precision", ["fp32", "mxfp8", "float8_rowwise"])
def test_a_small_world_leaves_a_result(tmp_path, precision):
    run = step(("debug=tiny", f"precision={precision}", "data=synthetic", "parallelism=hsdp", "gpus=8"), 7, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(next(tmp_path.glob("*/result.json")).read_text())
    assert (result["status"], result["world_size"], result["final_loss"]) == ("done", 8, None)


def test_a_rank_that_the_world_has_not_is_refused(tmp_path):
    run = step(("gpus=8",), 8, tmp_path)
    assert run.returncode == 2
    assert "comm.rank=8: the world has 8 ranks; nearest legal: 7" in run.stderr


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_microbatch_gathers_the_head_once(microbatches):
    """If FSDP prefetched the head for an earlier microbatch, it would gather the head once more than needed."""
    job = freeze(
        compose_unchecked(
            "debug=tiny",
            "data=synthetic",
            "precision=bf16",
            "parallelism=fsdp",
            "gpus=4",
            "comm=fake",
            "model.vocab_size=4096",
            "data.local_batch=2",
            f"data.global_batch={8 * microbatches}",
        )
    )
    gathers = Gathers()
    with fake_world(job):
        fake_step(job, lambda trainer, batch: gathers)
    head = job.model.dim * (job.model.vocab_size + 1)  # with the final norm
    assert gathers.sizes.count(head) == microbatches
    # the backward gathers the blocks and the embedding again
    assert len(gathers.sizes) == microbatches * (2 * job.model.n_layers + 3)


class Gathers(TorchDispatchMode):
    """Record the size of every gathered group of parameters."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "allgather_base" in str(operator):
            self.sizes.append(max(one.numel() for one in args if isinstance(one, torch.Tensor)))
        return operator(*args, **(kwargs or {}))
