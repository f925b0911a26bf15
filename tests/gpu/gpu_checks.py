"""The checks of gpu_cases.py of one process. Each returns the facts that its row shows, and raises where something is wrong.

`Here` says where a check runs. Most train through the worker, as cluster=inline does, so that exit statuses, records and files are those of
a run. Those of kernels (gpu_kernels.py) call them; those of several ranks (gpu_together.py) step a trainer as `titan verify` does.
"""
from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from titan_hydra.checkpoint import state
from titan_hydra.config import Job, compose_job, identity
from titan_hydra.config.files import read_json
from titan_hydra.launch import worker
from titan_hydra.models.init import Normal, fill
from titan_hydra.observe import health, memory, metrics
from titan_hydra.runs import rundir
from titan_hydra.runs.run import Run
from titan_hydra.verify.matrix import later_wins

ROOT = Path(__file__).parents[2]
SMALL = ("cluster=inline", "parallelism=single", "model.n_heads=4", "model.n_kv_heads=2", "steps=12", "lr_scheduler.warmup_steps=2",
         "optimizer.lr=1e-3", "metrics.log_every=1", "checkpoint=off")
TINY = ("model.n_layers=2", "data.seq_len=64", "steps=6")  # in a dry run, over what SMALL says
STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # no other process's place


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a check runs. `shared` is a folder of all cases, `device` that of a rank that has joined a process group."""

    shared: Path
    gpu: bool
    dry: bool
    rank: int
    device: torch.device | None = None

    def overrides(self, *overrides: str) -> list[str]:
        """A run's overrides, later ones over earlier ones, with what a CPU or a dry run needs."""
        wanted = [*SMALL, *(TINY if self.dry else ()), *overrides]
        if not self.gpu and "compile=block" in wanted:
            wanted.append("compile.backend=aot_eager")
        if not self.gpu and any(override.startswith("precision=float8") for override in wanted):
            wanted.append("precision.emulate=true")
        return later_wins(*wanted)

    def job(self, *overrides: str) -> Job:
        """The job of these overrides."""
        return compose_job(*self.overrides(*overrides))


def attempt(here: Here, job: Job, number: int = 1) -> tuple[Path, int]:
    """Be the run's attempt, in this process. Returns its directory and its exit status."""
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    folder = rundir.claim(directory, number, job, [])
    status = worker.run_rank(str(directory), number, inline=True)
    rundir.end_attempt(folder)
    return directory, status


def trained(here: Here, *overrides: str) -> tuple[Path, list[dict]]:
    """A run that is done, once for all cases that want the same one, and its rows."""
    job = here.job(*overrides)
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    if not (directory / "result.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        _, status = attempt(here, job)
        assert status == 0, f"exit status {status}: {said(directory)}"
    return directory, rows(directory)


def rows(directory: Path) -> list[dict]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def said(directory: Path, number: int = 1) -> str:
    """What a run's only rank recorded of its error."""
    error = (read_json(directory / f"attempts/{number}/rank_0.json") or {}).get("error") or {}
    return f"{error.get('type')}: {error.get('message')}\n{error.get('traceback', '')[-2000:]}"


def learns(here: Here, overrides: tuple[str, ...], like: tuple[str, ...] | None = None, within: float = 0.0,
           saves: bool = False) -> dict[str, Any]:
    """A run ends well, learns, and reports; its losses are those of another run, or it takes less memory than that one."""
    directory, found = trained(here, *overrides)
    result = read_json(directory / "result.json")
    losses = [row["loss"] for row in found]
    assert here.dry or losses[-1] < losses[0] - 0.5, f"it does not learn: {losses}"
    facts = {"loss": losses[-1]}
    if here.gpu:
        peak, reserved = (max(row[key] for row in found) for key in ("memory_gib", "memory_reserved_gib"))
        assert 0 < peak <= reserved <= torch.cuda.get_device_properties().total_memory / 2**30
        assert result["memory_gib"] == reserved and result["device"] == torch.cuda.get_device_name() and result["gpu_hours"] > 0
        assert (result["mfu"] is None) == ("float8" in str(overrides) or metrics.peak_flops(torch.device("cuda")) is None)
        facts |= {"memory_gib": peak}
    if like is not None:
        _, others = trained(here, *like)
        facts["off"] = max(abs(row["loss"] - other["loss"]) / other["loss"] for row, other in zip(found, others, strict=True))
        assert facts["off"] <= within, f"losses are {facts['off']:.1e} from those of {like or 'bf16'}: {losses}"
        if saves and here.gpu:
            most = max(row["memory_gib"] for row in others)
            assert facts["memory_gib"] < most, f"{facts['memory_gib']} GiB, and {most} GiB without checkpointing"
    return facts


def fails(here: Here, overrides: tuple[str, ...], status: int, words: str) -> dict[str, Any]:
    """A run ends with a status and its reason."""
    directory, got = attempt(here, here.job(*overrides))
    message = said(directory)
    assert got == status and words in message, f"exit status {got}: {message}"
    return {"status": got}


def refuses(here: Here, overrides: tuple[str, ...], words: str) -> dict[str, Any]:
    """A run that this device cannot compute is refused as a wrong configuration, unless the device can."""
    if here.gpu and torch.cuda.get_device_capability() >= (10, 0):
        return learns(here, overrides)
    return fails(here, overrides, 2, words)


def resumes(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run that lost its last steps makes them again from its checkpoint, to the bit: losses, norms, and the last checkpoint's bytes."""
    job = here.job(*overrides, "debug=deterministic", "steps=6", "checkpoint.interval=2", "checkpoint.keep_latest_k=0")
    directory, status = attempt(here, job)
    assert status == 0, said(directory)
    before, last = rows(directory), directory / "checkpoints/step-00000006"
    sums = {name: file for name, file in json.loads((last / "manifest.json").read_text())["files"].items() if name.endswith(".distcp")}
    shutil.rmtree(last)
    (directory / "result.json").unlink()
    _, status = attempt(here, job, 2)
    assert status == 0, said(directory, 2)
    for old, new in zip(before, rows(directory), strict=True):
        assert (old["loss"], old["grad_norm"]) == (new["loss"], new["grad_norm"]), f"step {old['step']} is another one"
    again = json.loads((last / "manifest.json").read_text())["files"]
    assert sums and all(again[name] == file for name, file in sums.items()), "the last checkpoint has other bytes"
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    held = [event["seconds_held"] for event in events if event["event"] == "checkpoint"]
    return {"held_ms": 1000 * max(held)}


def profiles(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A profiled run leaves a trace with kernels, a table, and on CUDA a memory snapshot."""
    directory, found = trained(here, *overrides)
    folder = directory / "attempts/1/profile"
    with gzip.open(folder / "trace_0.json.gz", "rt") as file:
        kernels = sum(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    summary = (folder / "summary.txt").read_text()
    assert (kernels > 0) == here.gpu and f"Self {'CUDA' if here.gpu else 'CPU'} time total" in summary, summary
    assert any("profiled_steps" in row for row in found)
    if here.gpu:
        assert (folder / "memory_0.pickle").stat().st_size > 10_000
    return {"kernels": kernels}


def out_of_memory(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run that finds its memory too small ends with 76, and names what held it by the lines that allocated it."""
    capacity = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / capacity)
    try:
        directory, status = attempt(here, here.job(*overrides))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    error = read_json(directory / "attempts/1/rank_0.json")["error"]
    assert status == 76 and error["type"] == "OutOfMemoryError", said(directory)
    text = (directory / "attempts/1/memory_0.txt").read_text()
    assert " GiB\n" in text and "llama3.py:" in text, text[:2000]
    assert 0 < error["peak_gib"] <= 1 and abs(error["capacity_gib"] - capacity / 2**30) < 1
    return {"peak_gib": error["peak_gib"]}


def own_memory(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A small run after a large one in the same process does not report the large one's memory."""
    reserved = []
    for size in ("data.local_batch=32", "data.local_batch=1"):
        directory, _ = trained(here, *overrides, "seed=1", "data.seq_len=512", "steps=2", size)
        reserved.append(read_json(directory / "result.json")["memory_gib"])
    assert reserved[1] < reserved[0] / 2, reserved
    return {"large_gib": reserved[0], "small_gib": reserved[1]}


def launches(here: Here) -> dict[str, Any]:
    """launch.py starts a rank of its own for this device, through the local executor."""
    runs = here.shared / "launched"
    overrides = here.overrides("steps=3", "cluster=local", f"paths.runs={runs}")
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *overrides], env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (result,) = runs.glob("*/result.json")
    device = read_json(result)["device"]
    assert not here.gpu or device == torch.cuda.get_device_name()
    return {"seconds": read_json(result)["seconds"]}


def two_workers(here: Here) -> dict[str, Any]:
    """Two real workers on this device, by torchrun's variables: FSDP with async_pinned checkpoints, resumed bitwise, then as TP."""
    common = ("gpus=2", "cluster=local", "cluster.gpus_per_node=16", "precision=fp32", "debug=deterministic", "steps=6",
              "checkpoint=async_pinned", "checkpoint.interval=2", "checkpoint.keep_latest_k=0")
    job = here.job(*common, "parallelism=fsdp", "data.local_batch=2")
    whole = workers(here, job, 1)
    before = rows(whole)
    shutil.rmtree(whole / "checkpoints/step-00000006")
    (whole / "result.json").unlink()
    workers(here, job, 2)
    for old, new in zip(before, rows(whole), strict=True):
        assert (old["loss"], old["grad_norm"]) == (new["loss"], new["grad_norm"]), f"step {old['step']} is another one"
    other = here.job(*common, "parallelism=tp", "data.local_batch=4", "checkpoint.exclude_from_loading=[]",
                     f"checkpoint.initial_load_path={whole}/checkpoints/step-00000004")
    found = rows(workers(here, other, 1))
    off = max(abs(old["loss"] - new["loss"]) / old["loss"] for old, new in zip(before[4:], found, strict=True))
    assert off <= 1e-4, f"under tensor parallelism the losses are {off:.1e} away"
    return {"off": off}


def times_out(here: Here) -> dict[str, Any]:
    """Where one of two ranks sleeps in a step, both are ended for a time-out, by this project's watchdog or NCCL's own."""
    folder = here.shared / "modules"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    sys.path.append(str(folder))
    job = here.job("gpus=2", "cluster=local", "cluster.gpus_per_node=16", "parallelism=fsdp", "data.local_batch=2",
                   "comm.train_timeout_seconds=10", "train.imports=[sleeper]")
    directory, statuses = started(here, job, 1, PYTHONPATH=f"{folder}:{plain_environment()['PYTHONPATH']}")
    logs = [(directory / f"attempts/1/rank_{rank}.log").read_text() for rank in range(2)]
    for status, log in zip(statuses, logs, strict=True):
        assert status == 77 or (status == -signal.SIGABRT and "collective operation timeout" in log), f"{statuses}: {log[-2000:]}"
    return {"statuses": statuses}


SLEEPER = """import os, time
from titan_hydra.train.trainer import Trainer
forward_backward, calls = Trainer.forward_backward, []
def sleeping(self, batch):
    calls.append(1)
    if len(calls) == 3 and os.environ.get("RANK") == "1":
        time.sleep(1000)
    return forward_backward(self, batch)
Trainer.forward_backward = sleeping
"""


def workers(here: Here, job: Job, number: int) -> Path:
    """Run an attempt of a job to its end in `started` workers. Returns the run's directory."""
    directory, statuses = started(here, job, number)
    logs = [(directory / f"attempts/{number}/rank_{rank}.log").read_text()[-2000:] for rank in range(job.gpus)]
    assert not any(statuses), f"exit statuses {statuses}: {logs}"
    return directory


def started(here: Here, job: Job, number: int, **environment: str) -> tuple[Path, list[int]]:
    """Start a worker a rank, all with the first device, and wait for them. Returns the run's directory and their exit statuses."""
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    rundir.claim(directory, number, job, [])
    processes = []
    for rank in range(job.gpus):
        place = {"RANK": str(rank), "WORLD_SIZE": str(job.gpus), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(job.gpus)}
        command = [sys.executable, "-m", "titan_hydra.launch.worker", str(directory), str(number)]
        processes.append(subprocess.Popen(command, env=plain_environment() | place | {"NCCL_HOSTID": f"host{rank}"} | environment))
    try:
        statuses = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    rundir.end_attempt(directory / "attempts" / str(number))
    return directory, statuses


def plain_environment() -> dict[str, str]:
    """This process's environment without its place among ranks, in which titan_hydra is found."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {name: value for name, value in os.environ.items() if name not in STARTED_BY} | {"PYTHONPATH": path}


def device(here: Here) -> dict[str, Any]:
    """The device is fit and known, its capacity is read, and float32 matmuls are not TF32."""
    found = health.check_device(Run(here.shared, here.shared), here.job().comm)
    a, b = (torch.randn(1024, 1024, device=found) for _ in range(2))
    exact = a.double() @ b.double()
    off = {name: ((matmul.double() - exact).norm() / exact.norm()).item()
           for name, matmul in (("fp32", a @ b), ("bf16", a.bfloat16() @ b.bfloat16()))}
    assert off["fp32"] < 1e-5 and 1e-4 < off["bf16"] < 1e-2, off
    if here.gpu:
        assert memory.facts()["capacity_gib"] > 1
        off["peak_tflops"] = (metrics.peak_flops(found) or 0) / 1e12
    return off


def initial_weights(here: Here) -> dict[str, Any]:
    """A GPU draws the numbers that a CPU draws, but for the last bits of erfinv."""
    there, one = (torch.empty(300, 40_009, device=place) for place in ("cpu", "cuda" if here.gpu else "cpu"))
    for tensor in (there, one):
        fill(tensor, Normal(1.0, cut=3.0), 12345)
    off = (one.cpu() - there).abs().max().item()
    assert off < 1e-4, off
    return {"off": off}


def generators(here: Here) -> dict[str, Any]:
    """Random generators go on from a checkpoint where they were, that of the device too."""
    place = "cuda" if here.gpu else "cpu"
    folder = here.shared / "generators"
    folder.mkdir()
    (folder / state.rank_file(0)).write_text(state.of_rank(1, {"slots": {}}))
    first = [torch.rand(100), torch.rand(100, device=place)]
    state.into_rank(folder, 0, 1)
    again = [torch.rand(100), torch.rand(100, device=place)]
    assert all(map(torch.equal, first, again))
    return {}
