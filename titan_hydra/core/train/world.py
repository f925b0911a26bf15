"""The environment of a rank: its device, its process group, and how reproducible its arithmetic is."""

import contextlib
import ctypes
import gc
import os
import resource
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import process_groups, set_group_timeout
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import flight, health

FILES = 2**16  # maximum number of open files that a rank may need, as rank 0 has a connection with every other rank
CONNECTED = 256  # largest number of ranks that gloo may connect with each other at the start
RECOMPILE = 30  # seconds in which a rank compiles a transformer block, on a busy host


@contextlib.contextmanager
def world(job: Job, run: Run) -> Iterator[torch.device]:
    """Join the process group (NCCL on GPUs, with gloo beside it for host tensors; gloo on CPUs) and leave it at the end
    of the block.
    """
    set_determinism(job)
    # forget what an earlier run in this process compiled: torch compiles the same code at most eight times
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    flight.configure(run)
    device = health.check_device(run, job.comm)
    # free the memory of an earlier run in this process (cluster=inline), which would count in this run's peak
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        keep_freed_memory()
    allow_connections(run.world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=run.store,
        rank=run.rank,
        world_size=run.world_size,
        timeout=timedelta(seconds=job.comm.init_timeout_seconds),
    )
    try:
        health.check_links(run, job.comm, device)
        yield device
        leave_together(run)
    except BaseException:
        if run.world_size > 1:  # NCCL could wait here for a rank that has failed; this process ends anyway
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def allow_connections(ranks: int) -> None:
    """Raise the limit of open files, often 1,024, as far as the system allows. In a large world, let gloo connect only
    ranks that exchange something. Otherwise each rank would connect with all others (gloo#419), in the default group
    and again in the checkpoints' group.

    A rank that dies before a group's first use may leave others connecting without a time-out (gloo#520). The launcher
    or the watchdog then ends these ranks. In a small world, gloo connects all ranks at the start instead.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if ranks > CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 1 GiB of freed memory, and to take buffers up to that size from this memory. By default,
    it returns buffers of 32 MiB and more to the system, which then maps and clears all their pages again at each step.
    With another C library, do nothing.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            mallopt(option, 1 << 30)


def leave_together(run: Run) -> None:
    """Wait until no rank is inside a collective. Otherwise, with gloo, a rank that closes its connections would make
    another rank's collective fail.

    The ranks wait through the store. Rank 0 leaves last, as it may host the store.
    """
    if run.store.add("leaving", 1) == run.world_size:
        run.store.set("all leave", "")
    run.store.wait(["all leave"])
    if run.rank > 0 and run.store.add("left", 1) == run.world_size - 1:
        run.store.set("others left", "")
    if run.rank == 0 and run.world_size > 1:
        run.store.wait(["others left"])


def refuse_stale(run: Run) -> None:
    """Raise ConfigError on all ranks if a later attempt has taken over the run. This attempt must no longer write the
    run's checkpoints and rows.

    This is a collective, called when the ranks have agreed to stop. During training rank 0's watchdog checks for a
    later attempt.
    """
    newer = [run.newer_attempt if run.rank == 0 else None]
    dist.broadcast_object_list(newer, src=0, device=torch.device("cpu"))
    if newer[0]:
        raise ConfigError(f"{run.home.name}: attempt {newer[0]} has taken over; this one stops and saves nothing")


def set_determinism(job: Job) -> None:
    """Seed torch, and compute float32 without TF32. With debug.deterministic, also refuse every kernel whose result may
    differ from run to run.
    """
    torch.manual_seed(job.seed)
    exact_float32()
    torch.autograd.set_detect_anomaly(job.debug.anomaly)
    torch.use_deterministic_algorithms(job.debug.deterministic)
    if job.debug.deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def exact_float32() -> None:
    """Compute float32 without TF32, even if the environment asks for TF32 (NVIDIA's containers set
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).

    This uses torch's older settings. The newer ones (fp32_precision) would not change the older ones, and the compiler
    fails if the two differ (pytorch#166387, pytorch#179445).
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def open_store(host: str, ranks: int | None, limit: timedelta) -> dist.TCPStore:
    """Open a store for other processes at `host`, on a free port. If `host` is the loopback address, the store listens
    only there.
    """
    if host != "127.0.0.1":
        return dist.TCPStore(host, 0, ranks, True, limit, wait_for_workers=False)
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host, listener.getsockname()[1], ranks, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def steady_timeout(job: Job) -> int:
    """Return the time-out of collectives after the first step, in seconds.

    A compiled pipeline gets RECOMPILE seconds more for each rank after the first. Its ranks compile one after another,
    for the first validation or for a new shape, as each waits for the activations of the rank before.
    """
    return job.comm.train_timeout_seconds + (RECOMPILE * (job.parallelism.pp - 1) if job.compile.name != "off" else 0)


def set_timeout(seconds: int) -> None:
    """Set the time-out of collectives after the slow first step, in the default group and all groups of the mesh."""
    dist.barrier()  # no rank may still be inside a collective that began with the long time-out
    for group in list(process_groups.pg_map):
        # other groups, such as that of the checkpoints, keep their time-outs
        if group.group_desc == "default_pg" or group.group_desc.startswith("mesh_"):
            set_group_timeout(timedelta(seconds=seconds), group)


def collect_garbage(step: int, interval: int) -> None:
    """Collect the young generations before the first step and then every `interval` steps, on all ranks in the same
    step. A rank that paused at any other time would delay the other ranks.
    """
    gc.disable()
    if step % interval == 0:
        gc.collect(1)
