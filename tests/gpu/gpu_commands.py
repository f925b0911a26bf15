"""Define the checks of gpu_cases.py that start processes, and those of commands that compute with a model. See
gpu_checks.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CHAT
from gpu_checks import Here, rows, trained

from titan_hydra import cli
from titan_hydra.core.checkpoint.reader import PREFIX, Reader
from titan_hydra.core.job.config import Job, identity
from titan_hydra.core.job.config.files import ASSETS, read_json
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import checkpoints
from titan_hydra.experiments.runs import rundir

ROOT = Path(__file__).parents[2]
# the checks must not inherit another process's place among ranks
STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def titan(*words: object) -> str:
    """Return what a `titan` command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main([str(word) for word in words])
    assert status == 0, f"{words}: exit status {status}: {out.getvalue()[-2000:]}"
    return out.getvalue()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's newest checkpoint."""
    reader = Reader(checkpoints.newest(directory / "checkpoints"))
    stored = {name: entry for name, entry in reader.metadata.state_dict_metadata.items() if name.startswith(PREFIX)}
    return {name: reader.tensor(name.removeprefix(PREFIX), entry.size, torch.float32) for name, entry in stored.items()}


def same(first: Path, second: Path) -> None:
    """Raise unless two runs ended with the same weights."""
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), (
        "the weights are others"
    )


def exported(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run's weights, exported in Hugging Face's format, can be loaded on this device with the same bits, and the
    model continues a text.
    """
    directory, _ = trained(here, *overrides, "checkpoint=sync")
    folder = here.shared / f"hf_{directory.name}"
    titan("checkpoint", "export", directory, folder, "--dtype", "float32")
    again, _ = trained(
        here, *overrides, "checkpoint=sync", "steps=1", "optimizer.lr=0", f"checkpoint.initial_load_path={folder}"
    )
    same(directory, again)
    words = [
        titan("generate", directory, "--prompt", "The", "--max-tokens", 8, "--temperature", 0, "--dtype", dtype)
        for dtype in ("float32", "bfloat16")
    ]
    assert all(text.startswith("The") and len(text) > 4 for text in words), words
    return {"text": words[1].strip()}


def samples(here: Here, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run's model draws images, and draws different ones from different noise."""
    directory, _ = trained(here, *overrides, "checkpoint=sync")
    images = []
    for seed in (0, 1):
        folder = here.shared / f"images_{seed}"
        titan(
            "generate",
            "images",
            directory,
            "--prompt",
            "a red circle",
            "--steps",
            4,
            "--guidance",
            2,
            "--seed",
            seed,
            "--to",
            folder,
        )
        (file,) = folder.glob("*.png")
        images.append(file.read_bytes())
    assert images[0] != images[1]
    return {"bytes": len(images[0])}


def prefers(here: Here) -> dict[str, Any]:
    """A model that has scored pairs is trained on them; the loss begins at log 2, as the model is its own reference. It
    is trained on sampled tokens too.
    """
    start, _ = trained(here, *CHAT, "checkpoint=sync")
    lines = [
        json.loads(line)["messages"]
        for line in (ASSETS.parent / "recipes/chat/assets/train.jsonl").read_text().splitlines()[:100]
    ]
    pairs, scored, rollouts = (here.shared / f"{name}.jsonl" for name in ("pairs", "scored", "rollouts"))
    write_lines(
        pairs,
        [{"prompt": one[:-1], "chosen": [one[-1]], "rejected": other[-1]["content"]} for one, other in pairwise(lines)],
    )
    titan("data", "score-pairs", start, pairs, "--out", scored)
    common = ("data.seq_len=192", f"checkpoint.initial_load_path={start}", "data.local_batch=4")
    _, found = trained(here, "data=preference", f"data.path={scored}", *common)
    first = found[0]["loss"]
    assert abs(first - 0.6931) < 0.02, f"the loss begins at {first}, and the policy is the reference"
    dice = random.Random(0)
    write_lines(
        rollouts,
        [
            {
                "tokens": [dice.randrange(4096) for _ in range(12)],
                "old_logprobs": [-8.0 - dice.random() for _ in range(8)],
                "advantages": dice.uniform(-1, 1),
            }
            for _ in range(100)
        ],
    )
    _, policy = trained(here, "data=rollouts", f"data.path={rollouts}", *common)
    assert all(0 < row["grad_norm"] < 1e4 for row in policy), policy
    return {"dpo": first, "policy": policy[0]["loss"]}


def write_lines(file: Path, values: list[dict]) -> None:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


def replicas(here: Here) -> dict[str, Any]:
    """Two replica groups of one process each have a meeting at every second step, and end with the same weights."""
    job = here.job(
        "gpus=1",
        "cluster=local",
        "cluster.gpus_per_node=16",
        "fault_tolerance=diloco",
        "fault_tolerance.sync_every=2",
        "steps=6",
        "checkpoint=async_pinned",
    )
    directory = workers(here, job, 1)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    meetings = [event for event in events if event["event"] == "meeting"]
    assert [event["groups"] for event in meetings] == [2, 2, 2], events
    same(directory, directory / "replicas/1")
    return {"seconds": max(event["seconds"] for event in meetings)}


def launches(here: Here) -> dict[str, Any]:
    """launch.py starts a separate rank for this device, through the local executor."""
    runs = here.shared / "launched"
    overrides = here.overrides("steps=3", "cluster=local", f"paths.runs={runs}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *overrides], env=plain_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (result,) = runs.glob("*/result.json")
    device = read_json(result)["device"]
    assert not here.gpu or device == torch.cuda.get_device_name()
    return {"seconds": read_json(result)["seconds"]}


def two_workers(here: Here) -> dict[str, Any]:
    """Two real workers run on this device with torchrun's variables: FSDP with async_pinned checkpoints, resumed
    bitwise, then TP.
    """
    here, common = (
        dataclasses.replace(here, ranks=2),
        (
            "precision=fp32",
            "debug=deterministic",
            "steps=6",
            "checkpoint=async_pinned",
            "checkpoint.interval=2",
            "checkpoint.keep_latest_k=0",
        ),
    )
    job = here.job(*common, "parallelism=fsdp", "data.local_batch=2")
    whole = workers(here, job, 1)
    before = rows(whole)
    shutil.rmtree(whole / "checkpoints/step-00000006")
    (whole / "result.json").unlink()
    workers(here, job, 2)
    for old, new in zip(before, rows(whole), strict=True):
        assert (old["loss"], old["grad_norm"]) == (new["loss"], new["grad_norm"]), f"step {old['step']} is another one"
    other = here.job(
        *common,
        "parallelism=tp",
        "data.local_batch=4",
        "checkpoint.exclude_from_loading=[]",
        f"checkpoint.initial_load_path={whole}/checkpoints/step-00000004",
    )
    found = rows(workers(here, other, 1))
    off = max(abs(old["loss"] - new["loss"]) / old["loss"] for old, new in zip(before[4:], found, strict=True))
    assert off <= 1e-4, f"under tensor parallelism the losses are {off:.1e} away"
    return {"off": off}


def times_out(here: Here) -> dict[str, Any]:
    """If one of two ranks sleeps in a step, both are ended with a time-out, by this project's watchdog or by NCCL's."""
    folder = here.shared / "modules"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    sys.path.append(str(folder))
    job = dataclasses.replace(here, ranks=2).job(
        "parallelism=fsdp", "data.local_batch=2", "comm.train_timeout_seconds=10", "train.imports=[sleeper]"
    )
    directory, statuses = started(here, job, 1, PYTHONPATH=f"{folder}:{plain_environment()['PYTHONPATH']}")
    logs = [(directory / f"attempts/1/rank_{rank}.log").read_text() for rank in range(2)]
    for status, log in zip(statuses, logs, strict=True):
        assert status == 77 or (status == -signal.SIGABRT and "collective operation timeout" in log), (
            f"{statuses}: {log[-2000:]}"
        )
    return {"statuses": statuses}


SLEEPER = """import os, time
from titan_hydra.core.train.trainer import Trainer
forward_backward, calls = Trainer.forward_backward, []
def sleeping(self, batch):
    calls.append(1)
    if len(calls) == 3 and os.environ.get("RANK") == "1":
        time.sleep(1000)
    return forward_backward(self, batch)
Trainer.forward_backward = sleeping
"""


def workers(here: Here, job: Job, number: int) -> Path:
    """Run an attempt of a job to its end in `started` workers. Return the run's directory."""
    directory, statuses = started(here, job, number)
    logs = [(directory / f"attempts/{number}/rank_{rank}.log").read_text()[-2000:] for rank in range(len(statuses))]
    assert not any(statuses), f"exit statuses {statuses}: {logs}"
    return directory


def started(here: Here, job: Job, number: int, **environment: str) -> tuple[Path, list[int]]:
    """Start one worker for each rank, all with the first device, and wait for them. Return the run's directory and
    their exit statuses.
    """
    directory = here.shared / "runs" / f"{job.name}-{identity(job)}"
    rundir.claim(directory, number, job, [])
    started, ranks = [], processes(job)
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, "-m", "titan_hydra.core.train.worker", str(directory), str(number)]
        started.append(
            subprocess.Popen(command, env=plain_environment() | place | {"NCCL_HOSTID": f"host{rank}"} | environment)
        )
    try:
        statuses = [process.wait(150) for process in started]
    finally:
        for process in started:
            process.kill()
    rundir.end_attempt(directory / "attempts" / str(number))
    return directory, statuses


def plain_environment() -> dict[str, str]:
    """Return this process's environment without the variables of its place among ranks, and with titan_hydra on
    Python's path.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {name: value for name, value in os.environ.items() if name not in STARTED_BY} | {"PYTHONPATH": path}
