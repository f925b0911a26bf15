"""Define the checks of gpu_cases.py that run in one process. Each returns the facts that its row shows, and raises if
something is wrong. `Here` describes where a check runs. Most checks train through the worker, as cluster=inline does,
so that exit statuses, records and files are those of a run; on several ranks they call the training loop. The checks in
gpu_kernels.py call kernels; those in gpu_together.py, for ranks that share a process group, step a trainer as `titan
verify` does.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from titan_hydra.core.checkpoint import state
from titan_hydra.core.job.config import Job, identity
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.files import read_json
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.models import layers
from titan_hydra.core.models.init import Normal, fill
from titan_hydra.core.train import worker
from titan_hydra.core.train.loop import train
from titan_hydra.core.train.observe import health, memory, metrics
from titan_hydra.experiments.compose.compose import compose_job, later_wins
from titan_hydra.experiments.runs import rundir

# The debug model's default precision is fp32, which fused attention on CUDA does not support.
SMALL = (
    "precision=bf16",
    "parallelism=single",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "steps=12",
    "lr_scheduler.warmup_steps=2",
    "optimizer.lr=1e-3",
    "metrics.log_every=1",
    "checkpoint=off",
)
# in a dry run, these replace the values of SMALL
TINY = (
    "model.dim=64",
    "model.n_layers=2",
    "data.seq_len=64",
    "steps=6",
)
# config.json of a small model of transformers
FOREIGN = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 4096,
}
# A case may have more ranks than the machine has devices, which the checks of a cell would refuse.
PLACE = ("cluster=local", "cluster.gpus_per_node=16")


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a check runs. `shared` is a folder that all cases use; `device` is the device of a rank that has joined a
    process group.
    """

    shared: Path
    gpu: bool
    dry: bool
    rank: int
    ranks: int
    device: torch.device | None = None

    def overrides(self, *overrides: str) -> list[str]:
        """Return a run's overrides together with those that a CPU or a dry run needs; later overrides replace earlier
        ones.
        """
        place = (*PLACE, f"gpus={self.ranks}") if self.ranks > 1 else ("cluster=inline",)
        wanted = [*SMALL, *place, *(TINY if self.dry else ()), *overrides]
        if not self.gpu and "compile=block" in wanted:
            wanted.append("compile.backend=aot_eager")
        if not self.gpu and any(override.startswith("precision=float8") for override in wanted):
            wanted.append("precision.emulate=true")
        return later_wins(*wanted)

    def job(self, *overrides: str) -> Job:
        """Return the job of these overrides."""
        return compose_job(*self.overrides(*overrides))


def attempt(here: Here, job: Job, number: int = 1) -> tuple[Path, int]:
    """Run one attempt of a run in this process, or one rank of it. Return its directory and exit status; on several
    ranks errors are raised.
    """
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    folder = layout.ATTEMPT.of(directory, number)
    if here.rank == 0:
        rundir.claim(directory, number, job, [])
    if here.ranks == 1:
        status = worker.run_rank(str(directory), number, inline=True)
    else:
        worker.until_seen(layout.CLAIM.of(folder))
        store = torch.distributed.FileStore(str(folder / "store"), here.ranks)
        train(job, Run(directory, folder, here.rank, 0, here.ranks, store))
        status = 0
    if here.rank == 0:
        rundir.end_attempt(folder)
    return directory, status


def trained(here: Here, *overrides: str) -> tuple[Path, list[dict]]:
    """Return a finished run and its rows. Cases that run in the same process and need the same run share it."""
    job = here.job(*overrides)
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    if here.ranks > 1 or not (directory / "result.json").exists():
        if here.ranks == 1:
            shutil.rmtree(directory, ignore_errors=True)  # left by a set of processes that ended during this run
        _, status = attempt(here, job)
        assert status == 0, f"exit status {status}: {said(directory)}"
    return directory, rows(directory) if here.rank == 0 else []


def rows(directory: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def said(directory: Path, number: int = 1) -> str:
    """Return what the only rank of a run recorded of its error."""
    error = (read_json(directory / f"attempts/{number}/rank_0.json") or {}).get("error") or {}
    return f"{error.get('type')}: {error.get('message')}\n{error.get('traceback', '')[-2000:]}"


def learns(
    here: Here,
    overrides: tuple[str, ...],
    like: tuple[str, ...] | None = None,
    within: float = 0.0,
    saves: bool = False,
    falls: bool = True,
) -> dict[str, Any]:
    """A run ends well, learns, and reports. With `like`, its losses must be those of a second run, on one process, with
    the overrides `like`; with `saves`, it must take less memory than this second run. With `falls`, its loss must fall
    within its few steps.
    """
    directory, found = trained(here, *overrides)
    if here.rank:
        return {}
    result = read_json(directory / "result.json")
    losses = [row["loss"] for row in found]
    assert all(map(math.isfinite, losses)) and (here.dry or not falls or losses[-1] < losses[0] - 0.5), (
        f"it does not learn: {losses}"
    )
    facts = {"loss": losses[-1]}
    if here.gpu:
        peak, reserved = (max(row[key] for row in found) for key in ("memory_gib", "memory_reserved_gib"))
        assert 0 < peak <= reserved <= torch.cuda.get_device_properties().total_memory / 2**30
        assert (
            result["memory_gib"] == reserved
            and result["device"] == torch.cuda.get_device_name()
            and result["gpu_hours"] > 0
        )
        known = (
            not any(word in str(overrides) for word in ("float8", "adapter=lora"))
            and metrics.peak_flops(torch.device("cuda"))
            and family_of(here.job(*overrides).model).flops
        )
        assert (result["mfu"] is not None) == bool(known), result
        facts |= {"memory_gib": peak}
    if like is not None:
        model, others = trained(dataclasses.replace(here, ranks=1), *like)
        facts["off"] = max(
            abs(row["loss"] - other["loss"]) / other["loss"] for row, other in zip(found, others, strict=True)
        )
        assert facts["off"] <= within, f"losses are {facts['off']:.1e} from those of {like or 'bf16'}: {losses}"
        if "validation=on" in like:
            held, of_other = result["validation_loss"], read_json(model / "result.json")["validation_loss"]
            assert abs(held - of_other) <= within * of_other, f"validation losses are {held} and {of_other}"
        if saves and here.gpu:
            most = max(row["memory_gib"] for row in others)
            assert facts["memory_gib"] < most, f"{facts['memory_gib']} GiB, and {most} GiB without checkpointing"
    return facts


def fails(here: Here, overrides: tuple[str, ...], status: int, words: str) -> dict[str, Any]:
    """A run ends with this status and reason."""
    directory, got = attempt(here, here.job(*overrides))
    message = said(directory)
    assert got == status and words in message, f"exit status {got}: {message}"
    return {"status": got}


def refuses(here: Here, overrides: tuple[str, ...], words: str) -> dict[str, Any]:
    """A run that this device cannot compute is refused as a wrong configuration. On a device that can compute it,
    nothing is checked.
    """
    if here.gpu and torch.cuda.get_device_capability() >= (10, 0):
        return learns(here, overrides)
    return fails(here, overrides, 2, words)


def resumes(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run that lost its last steps repeats them from its checkpoint with bitwise equal losses, norms and last
    checkpoint.
    """
    job = here.job(*overrides, "debug=deterministic", "steps=6", "checkpoint.interval=2", "checkpoint.keep_latest_k=0")
    directory, status = attempt(here, job)
    assert status == 0, said(directory)
    if here.rank:
        attempt(here, job, 2)
        return {}
    before, last = rows(directory), directory / "checkpoints/step-00000006"
    sums = {
        name: file
        for name, file in json.loads((last / "manifest.json").read_text())["files"].items()
        if name.endswith(".distcp")
    }
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


def foreign(here: Here, overrides: tuple[str, ...], kind: str) -> dict[str, Any]:
    """A small model of transformers has the losses in bf16 that it has in fp32."""
    folder = here.shared / kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | FOREIGN))
    words = (*overrides, "model=transformers", f"model.path={folder}", "data=synthetic", "data.global_batch=8")
    return learns(here, words, like=(*words, "precision=fp32"), within=0.02, falls=False)


def profiles(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A profiled run leaves a table and a trace with kernels (with several ranks also NCCL's kernels), and on CUDA a
    memory snapshot.
    """
    directory, found = trained(here, *overrides)
    if here.rank:
        return {}
    folder = directory / "attempts/1/profile"
    with gzip.open(folder / "trace_0.json.gz", "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    kernels, summary = len(names), (folder / "summary.txt").read_text()
    assert not here.gpu or any("nccl" in name.lower() for name in names) == (here.ranks > 1), names
    assert (kernels > 0) == here.gpu and f"Self {'CUDA' if here.gpu else 'CPU'} time total" in summary, summary
    assert any("profiled_steps" in row for row in found)
    if here.gpu:
        assert (folder / "memory_0.pickle").stat().st_size > 10_000
    return {"kernels": kernels}


def out_of_memory(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run that has too little memory ends with status 76, and names the lines of the model that allocated most of it."""
    capacity = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / capacity)
    try:
        directory, status = attempt(here, here.job(*overrides))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    error = read_json(directory / "attempts/1/rank_0.json")["error"]
    assert status == 76 and error["type"] == "OutOfMemoryError", said(directory)
    names_lines_of_layers(directory)
    assert 0 < error["peak_gib"] <= 1 and abs(error["capacity_gib"] - capacity / 2**30) < 1
    return {"peak_gib": error["peak_gib"]}


def names_lines_of_layers(directory: Path) -> None:
    """Raise unless memory_0.txt of a run names lines of the model's layers as holders of memory."""
    text = (directory / "attempts/1/memory_0.txt").read_text()
    assert " GiB\n" in text and f"{layers.__file__}:" in text, text[:2000]


def own_memory(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A small run after a large one in the same process does not report the memory of the large one."""
    reserved = []
    for size in ("data.local_batch=32", "data.local_batch=1"):
        directory, _ = trained(here, *overrides, "seed=1", "data.seq_len=512", "steps=2", size)
        reserved.append(read_json(directory / "result.json")["memory_gib"])
    assert reserved[1] < reserved[0] / 2, reserved
    return {"large_gib": reserved[0], "small_gib": reserved[1]}


def device(here: Here) -> dict[str, Any]:
    """The device is fit and known, its capacity is read, and float32 matmuls do not use TF32."""
    found = health.check_device(Run(here.shared, here.shared), here.job().comm)
    a, b = (torch.randn(1024, 1024, device=found) for _ in range(2))
    exact = a.double() @ b.double()
    off = {
        name: ((matmul.double() - exact).norm() / exact.norm()).item()
        for name, matmul in (("fp32", a @ b), ("bf16", a.bfloat16() @ b.bfloat16()))
    }
    assert off["fp32"] < 1e-5 and 1e-4 < off["bf16"] < 1e-2, off
    if here.gpu:
        assert memory.facts()["capacity_gib"] > 1
        off["peak_tflops"] = (metrics.peak_flops(found) or 0) / 1e12
    return off


def initial_weights(here: Here) -> dict[str, Any]:
    """A GPU draws the same initial weights as a CPU, except for the last bits of erfinv."""
    there, one = (torch.empty(300, 40_009, device=place) for place in ("cpu", "cuda" if here.gpu else "cpu"))
    for tensor in (there, one):
        fill(tensor, Normal(1.0, cut=3.0), 12345)
    off = (one.cpu() - there).abs().max().item()
    assert off < 1e-4, off
    return {"off": off}


def generators(here: Here) -> dict[str, Any]:
    """Random generators, including the device's, continue from a checkpoint with the state that they had."""
    place = "cuda" if here.gpu else "cpu"
    folder = here.shared / "generators"
    folder.mkdir()
    (folder / state.rank_file(0)).write_text(state.of_rank(1, {"slots": {}}))
    first = [torch.rand(100), torch.rand(100, device=place)]
    state.restore_rank(folder, 0, 1)
    again = [torch.rand(100), torch.rand(100, device=place)]
    assert all(map(torch.equal, first, again))
    return {}
