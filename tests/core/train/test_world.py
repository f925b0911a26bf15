"""Test the world of a rank: time-outs of all its process groups, precision, and sockets."""

import contextlib
import math
import os
import pickle
import platform
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.parallel import build_mesh
from titan_hydra.core.train import loop, world
from titan_hydra.core.train.observe import flight, metrics
from titan_hydra.experiments.compose.compose import compose_job


def test_a_store_on_loopback_listens_there_alone():
    store = world.open_store("127.0.0.1", 1, timedelta(seconds=5))
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, 1, False).get("key") == b"value"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [place for place in listening if int(place.rpartition(":")[2], 16) == store.port] == [
        f"0100007F:{store.port:04X}"
    ]


FAULTS = """
import resource, torch
from titan_hydra.core.train.world import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(100 * 2**20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_used_again():
    before, after = map(
        int, subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout.split()
    )
    assert before > 1000 > 10 * after, (before, after)


PRECISION = """
import torch
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.core.train.world import set_determinism
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
set_determinism(compose_job("debug=tiny"))
cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
print(cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cuda.allow_tf32, cudnn.allow_tf32)
"""


def test_float32_is_float32_where_the_environment_asks_for_tf32():
    """The compiler reads the older names of the setting, and fails if they differ from the newer ones."""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRECISION], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["ieee", "none", "none", "False", "False"], done.stderr


def test_all_groups_of_the_mesh_get_the_short_timeout(on_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")

    def task(rank):
        mesh = build_mesh(Parallelism(name="", dp_shard=2, cp=2), "cpu")
        own = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))  # as the group of checkpoints is made
        world.set_timeout(5)
        some = [
            mesh.world.get_group("dp_shard"),
            mesh.world.get_group("cp"),
            mesh.loss,
            mesh.batch,
            mesh.fsdp.get_group(),
            own,
        ]
        groups = list(dict.fromkeys([*some, dist.group.WORLD]))  # in the same order on all ranks
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        entries = pickle.loads(c10d._dump_fr_trace())["entries"][-len(groups) :]
        limits = {entry["process_group"][0]: entry["timeout_ms"] for entry in entries}
        assert len(limits) == len(groups) and limits.pop(own.group_name) == 77_000
        assert set(limits.values()) == {5_000}, limits
        assert {"dp_shard", "cp"} <= {group["mesh"] for group in flight.groups_of_rank(mesh).values()}
        assert all(len(flight.collectives()[-1]["stack"]) <= 2 * flight.FRAMES for _ in range(2))

    on_ranks(4, task)


def test_collectives_of_both_back_ends_are_read_in_the_order_of_time(monkeypatch):
    """A process group on GPUs has the recorders of gloo and of NCCL, each with its own numbers. NCCL's sends and
    receives cannot be compared.
    """

    def entry(name, time, p2p=False):
        return {
            "process_group": ("0", "default_pg"),
            "profiling_name": name,
            "collective_seq_id": 3,
            "p2p_seq_id": 9,
            "is_p2p": p2p,
            "input_sizes": [[2]],
            "state": "completed",
            "retired": True,
            "time_created_ns": time,
            "frames": [],
        }

    recorders = [[entry("gloo:barrier", 2e9)], [entry("nccl:all_reduce", 1e9), entry("nccl:send 0->1", 3e9, p2p=True)]]
    monkeypatch.setattr(
        flight,
        "RECORDERS",
        [lambda *_, found=found: pickle.dumps({"entries": found, "pg_status": {len(found): 1}}) for found in recorders],
    )
    assert [(one["backend"], one["op"], one["seq"]) for one in flight.collectives()] == [
        ("nccl", "all_reduce", 3),
        ("gloo", "barrier", 3),
    ]
    assert "{1: 1}" in flight.progress()[0] and "{2: 1}" in flight.progress()[0]


@pytest.mark.parametrize(
    "ranks, degrees",
    [
        (512, {"dp_shard": 512}),
        (512, {"pp": 16, "dp_shard": 4, "tp": 8}),
        (4096, {"dp_replicate": 4, "dp_shard": 128, "cp": 8}),
        (4096, {"pp": 8, "dp_replicate": 2, "dp_shard": 8, "cp": 4, "tp": 8, "ep": 32}),
    ],
)
def test_gloo_connects_thousands_of_ranks_in_two_groups_alone(ranks, degrees, monkeypatch):
    """A process group with gloo costs a rank one socket for each other rank. So all groups of the mesh except the
    default one use NCCL only.
    """
    made, new_group = [], dist.new_group

    def counted(ranks=None, backend=None, **options):
        made.append((backend, ranks))
        return new_group(ranks, backend="fake", **options)

    monkeypatch.setattr(device_mesh, "new_group", counted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        build_mesh(Parallelism(name="", **degrees), "cuda", sparse="ep" in degrees)
        own = [backend for backend, members in made if 0 in members]
    finally:
        dist.destroy_process_group()
    assert set(own) <= {"fake"} and len(own) <= 13, own  # only the back end of the device; None would add gloo


def test_large_worlds_have_room_for_their_connections(monkeypatch):
    limits = []
    monkeypatch.setattr(world.resource, "getrlimit", lambda _: (1024, 524_288))
    monkeypatch.setattr(world.resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    for ranks in (256, 512):
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
        world.allow_connections(ranks)
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == ("1" if ranks > 256 else None)
        assert ranks > 256 or 2 * (ranks - 1) < 1024
    assert limits == [(65_536, 524_288)] * 2


@pytest.mark.parametrize("lazy", [False, True])
def test_gloo_connects_few_ranks_where_it_may(on_ranks, monkeypatch, lazy):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", str(int(lazy)))

    def task(rank):
        def sockets():
            return sum(
                os.readlink(entry).startswith("socket:")
                for entry in Path("/proc/self/fd").iterdir()
                if entry.is_symlink()
            )

        before = sockets()
        group = dist.new_group(backend="gloo")
        made = sockets() - before
        dist.barrier(group)
        dist.all_gather_object([None] * 16, "news", group=group)
        used = sockets() - before
        # one rank listens; the barrier is a tree, and a rank that is ahead connects before this one has counted
        assert (made, used) == (16, 16) if not lazy else used <= 12, (made, used)
        # the collectives of a step: gathers of weights, gradients, the agreement
        whole, part = torch.ones(16 * 4096), torch.ones(4096)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        for sums in (torch.ones(4096), torch.ones(3)):
            dist.all_reduce(sums, group=group)
        dist.broadcast(part, 0, group=group)
        dist.barrier(group)
        stepped = sockets() - before
        assert stepped == 16 if not lazy else stepped <= 2 * math.log2(16) + 1, stepped  # one listens

    on_ranks(16, task)


def test_ranks_of_a_pipeline_may_compile_one_after_another(monkeypatch):
    """They compile at the first validation, which may come hours after the first step."""

    def limits(*words):
        set_to = []
        monkeypatch.setattr(loop, "set_timeout", set_to.append)
        running = loop.Loop.__new__(loop.Loop)
        running.job, running.watch, running.settled = (
            compose_job("debug=tiny", *words),
            SimpleNamespace(settle=set_to.append),
            False,
        )
        running.metrics = SimpleNamespace(clock=SimpleNamespace(leave_out=contextlib.nullcontext))
        running.settle()
        running.settle()
        return set_to

    pipeline = ("parallelism=pp", "parallelism.pp=4", "gpus=4", "model.n_layers=4", "data.local_batch=4")
    assert limits() == limits("compile=block") == limits(*pipeline) == [100, 100]
    assert limits(*pipeline, "compile=block") == [190, 190]


def test_a_process_may_train_any_number_of_compiled_models(tmp_path):
    """With cluster=inline a sweep trains in one process. torch compiles the same code only eight times and then fails,
    as every block must be one graph.
    """
    code = f"""
from pathlib import Path
import torch.distributed as dist
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.loop import train
for cell in range(1, 21):
    folder = Path("{tmp_path}") / str(cell)
    folder.mkdir()
    job = compose_job("debug=tiny", "precision=fp32", "steps=1", "checkpoint=off", "compile=block", "compile.backend=eager",
                      f"model.dim={{64 * cell}}", "model.n_layers=1", "model.vocab_size=64", "data=synthetic", "data.seq_len=8")
    train(job, Run(folder, folder, 0, 0, 1, dist.HashStore()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "device, cores, ranks, words",
    [
        ("cuda", 8, 8, "1 core for each rank"),
        ("cuda", 3, 1, "3 cores for each rank"),
        ("cuda", 32, 8, None),
        ("cpu", 8, 8, None),
    ],
)
def test_a_gpu_with_few_cores_is_noted(monkeypatch, device, cores, ranks, words):
    monkeypatch.setattr(loop.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    notes = loop.few_cores(torch.device(device))
    assert (words in notes[0] and "cluster.cpus_per_task" in notes[0]) if words else notes == []


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA GB300", 2.5e15),
        ("NVIDIA B300 SXM6 AC", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA RTX A6000", 154.85e12),
        ("NVIDIA X", None),
    ],
)
def test_the_peak_of_a_device(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert metrics.peak_flops(torch.device("cuda")) == peak
