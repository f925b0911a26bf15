"""Health checks before training: is this rank's device present, free and correct, did all ranks start, and does a
collective over them complete?

With these checks, an unfit machine ends the run within a minute, with a message that names the machine. Without them,
the run might end after hours with a time-out that names no machine.
"""

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_hydra.core.base.errors import ConfigError, Unhealthy
from titan_hydra.core.base.private import set_allocator
from titan_hydra.core.base.threads import thread
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.operation import Comm
from titan_hydra.core.job.ranks import devices_here
from titan_hydra.core.job.run.run import Run

TAKEN = 0.1  # fraction of a device's memory that other processes may use; a desktop uses less, another job more
PATIENCE = 20  # seconds within which an earlier process must have released its memory
# Seconds that healthy ranks wait before they end, so that the rank at fault can write its record before it is killed.
HEAD_START = 2.0


def check_device(run: Run, comm: Comm) -> torch.device:
    """Check this rank's device, and return it once the devices of all ranks have passed the check. Call this before a
    process group exists. Raises Unhealthy if the device of any rank is unfit, or a rank did not start. Raises
    ConfigError if a rank was given too few devices, which is not a fault of its host.
    """
    fault: Unhealthy | ConfigError | None = None
    try:
        device = device_of(run)
        if comm.health_check_seconds and device.type == "cuda":
            wait_until_free(device, PATIENCE)
        if comm.health_check_seconds:
            run_within(comm.health_check_seconds, f"the matmul of device {device}", lambda: matmul(device))
    except (Unhealthy, ConfigError) as error:
        fault, device = error, torch.device("cpu")
    misconfigured = isinstance(fault, ConfigError) if fault else not devices_here()
    report = {"device": device.type, "fault": str(fault or ""), "config": misconfigured}
    verdict = await_verdict(run, report, comm.init_timeout_seconds)
    if fault:
        raise fault
    if verdict["fault"]:
        time.sleep(HEAD_START)
        raise error_of_another(verdict, run)
    return device


def check_links(run: Run, comm: Comm, device: torch.device) -> None:
    """All-reduce a tensor over all ranks. Raises Unhealthy if the collective does not complete, or gives a wrong sum."""
    if not comm.health_check_seconds:
        return

    def add_up() -> None:
        ranks = torch.full((1024,), float(run.rank), device=device)
        dist.all_reduce(ranks)
        if (ranks != run.world_size * (run.world_size - 1) / 2).any():
            raise Unhealthy(
                f"{socket.gethostname()}: an all-reduce over {run.world_size} ranks gave a wrong sum on rank {run.rank}"
            )

    run_within(comm.health_check_seconds, f"the first collective over {run.world_size} ranks (rank {run.rank})", add_up)


def device_of(run: Run) -> torch.device:
    """Return the rank's device. It is the GPU with the rank's index on its host, the only visible GPU if SLURM gives
    each task its own GPU, or the CPU if there is no GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    whole = count == devices_here()  # `whole` is False if a device of the host has failed
    index = 0 if count == 1 and whole else run.local_rank
    if index >= count and whole:
        raise ConfigError(
            f"{socket.gethostname()}: rank {run.rank} is number {index} there and was given {counted(count, 'device')}: it "
            "needs all of the node's (SLURM's --gpus-per-node), or a single one of its own (--gpus-per-task=1)"
        )
    if index >= count:
        raise Unhealthy(f"{socket.gethostname()}: device {index} is missing; {count} can be seen")
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        try:
            torch.empty(2**20, device=device)
        # in some virtual machines, the driver cannot map memory in the way that expandable segments require
        except RuntimeError:
            set_allocator("expandable_segments:False")
            torch.empty(2**20, device=device)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise Unhealthy(
            f"{socket.gethostname()}: device {index} does not start: {str(error).splitlines()[0]}"
        ) from error
    return device


def wait_until_free(device: torch.device, patience: float) -> None:
    """Wait until other processes hold less than TAKEN of a GPU's memory. Raises Unhealthy after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left, capacity = torch.cuda.mem_get_info(device)
        if capacity - left - torch.cuda.memory_reserved(device) < TAKEN * capacity:
            return
        if time.monotonic() > deadline:
            raise Unhealthy(
                f"{socket.gethostname()}: {(capacity - left) / 2**30:.1f} of the {capacity / 2**30:.1f} GiB of device "
                f"{device.index} are taken by other processes (comm.health_check_seconds=0 starts nevertheless)"
            )
        time.sleep(0.5)


def matmul(device: torch.device) -> None:
    """Multiply two matrices whose elements are powers of two, so that the result is exact. Raises Unhealthy if the
    result is wrong.
    """
    size = 256 if device.type == "cpu" else 2048
    where = f"{socket.gethostname()}: a matmul of device {device.index or 0} ({device.type})"
    try:
        powers = torch.arange(size, device=device, dtype=torch.float32).remainder(4).exp2()
        for dtype in (torch.float32, torch.bfloat16):
            product = powers.to(dtype)[:, None].expand(size, size) @ powers.to(dtype)[None, :].expand(size, size)
            if (product.float() != size * powers[:, None] * powers[None, :]).any():
                raise Unhealthy(f"{where} gave wrong numbers in {dtype}")
    except RuntimeError as error:
        raise Unhealthy(f"{where} failed: {str(error).splitlines()[0]}") from error


def await_verdict(run: Run, mine: dict, seconds: float) -> dict:
    """Report this rank's health, and wait for rank 0's verdict on all ranks: the fault ("" if there is none) and the
    host that has it. Reports go through the store instead of a collective, because then rank 0 can name the ranks that
    did not start.
    """
    if run.world_size == 1:
        return {"fault": "", "host": None}
    run.store.set(f"health/{run.rank}", json.dumps({**mine, "host": socket.gethostname(), "reported": True}))
    if run.rank == 0:
        run.store.set("health", json.dumps(judge(run, seconds)))
    try:
        run.store.wait(["health"], timedelta(seconds=seconds + 30))
    except RuntimeError:  # for example a DistStoreError, after a time-out
        return {
            "fault": f"rank 0 did not report within {seconds + 30:.0f} s that all had started",
            "host": host_of(run, 0),
        }
    return json.loads(run.store.get("health"))


def judge(run: Run, seconds: float) -> dict:
    """Wait for the reports of all ranks and return the verdict, which names the first rank that is unfit, did not
    start, or has no GPU although other ranks have one.
    """
    keys = [f"health/{rank}" for rank in range(run.world_size)]
    deadline = time.monotonic() + seconds
    reports: dict[int, dict] = {}
    while (
        len(reports) < run.world_size
        and time.monotonic() < deadline
        and not any(rank["fault"] for rank in reports.values())
    ):
        for rank, key in enumerate(keys):
            if rank not in reports and run.store.check([key]):
                reports[rank] = json.loads(run.store.get(key))
        time.sleep(0.01 if len(reports) < run.world_size else 0)
    for rank in reports.values():
        if rank["fault"]:
            return rank
    if missing := [rank for rank in range(run.world_size) if rank not in reports]:
        names = ", ".join(f"{host_of(run, rank) or 'unknown host'} (rank {rank})" for rank in missing[:8])
        return {"fault": f"{names}: did not come within {seconds:.0f} s", "host": host_of(run, missing[0])}
    if len({rank["device"] for rank in reports.values()}) > 1:
        without, *_ = (rank for rank in reports.values() if rank["device"] == "cpu")
        fault = f"{without['host']}: no GPU can be seen there, and other ranks have one"
        return {"fault": fault, "host": without["host"], "config": without.get("config", False)}
    return {"fault": "", "host": None}


def host_of(run: Run, rank: int) -> str | None:
    """Return the host of a rank; None if the rank was not started. The rank's worker records its host before it does
    anything else.
    """
    try:
        return json.loads(run.record_of(rank).read_text())["host"]
    except (OSError, ValueError, KeyError):
        return None


def error_of_another(verdict: dict, run: Run) -> Unhealthy | ConfigError:
    """Return the error to raise on a healthy rank. The error is marked secondary, so that the launcher names the
    unhealthy rank as the one that failed. If the unhealthy rank never started, it has no record of its own; then rank
    0's error is not marked.
    """
    error = (ConfigError if verdict.get("config") else Unhealthy)(verdict["fault"])
    error.facts = {"host": verdict["host"], "secondary": verdict.get("reported", False) or run.rank > 0}
    return error


def run_within(seconds: float, what: str, action: Callable[[], None]) -> None:
    """Run an action that may never return. Raises what the action raises, or Unhealthy after `seconds`."""
    raised: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    acting = thread(act, "health check")
    acting.start()
    acting.join(seconds)
    if acting.is_alive():
        raise Unhealthy(f"{socket.gethostname()}: {what} did not end within {seconds} s")
    if raised:
        raise raised[0]
