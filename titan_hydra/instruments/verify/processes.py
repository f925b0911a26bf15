"""Processes that verify jobs: worlds of gloo ranks that run a function, and jobs spread over the cores."""

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_hydra.core.base.threads import cores
from titan_hydra.core.job.config import Job, from_dict
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.world import world

# These modules are imported once, in the fork server, and not once for each rank.
PRELOADED = [
    "titan_hydra.instruments.verify.verify",
    "titan_hydra.core.train.loop",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


# How ranks are started. Python's default start method is not used: it may be fork, and any library may set it. The fork
# of a process that has had process groups inherits their names, and its ranks then exchange values with the wrong
# ranks. The trial's server (tests/equivalence/mutants/server.py) sets a faster method.
START_METHOD = "forkserver"


class Raised(RuntimeError):
    """A rank has raised an exception, whose traceback is the message."""


class Crashed(RuntimeError):
    """A signal has ended a rank: a user sent it, memory was short, or native code had a fault."""


def share_over_cores(function: Callable[..., Any], folder: str, jobs: list[Any]) -> None:
    """Run jobs of one rank each: start a process per core, and give each an equal share of the jobs."""
    processes = min(cores(), len(jobs))
    spawn_ranks(1, function, folder, *(jobs[first::processes] for first in range(processes)))


def spawn_ranks(ranks: int, function: Callable[..., Any], folder: str, *worlds: list[Any]) -> None:
    """Start a world of `ranks` gloo ranks for each list of jobs, all at once. Each rank runs `function(device, folder,
    jobs)`. Raises Crashed if a signal ended a rank, else Raised with the traceback of the first rank that failed.
    """
    context: Any = multiprocessing.get_context(START_METHOD)
    context.set_forkserver_preload(PRELOADED)
    stores = [tempfile.mktemp(dir=folder) for _ in worlds]
    processes = [
        context.Process(target=_rank, args=(rank, ranks, store, function, folder, jobs))
        for store, jobs in zip(stores, worlds, strict=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    failed = False
    for process in processes:  # waits until all ranks have ended or one has failed
        while process.is_alive() and not failed:
            process.join(0.2)
            failed = any(peer.exitcode not in (None, 0) for peer in processes)
    if failed:
        crashed = []
        for number, process in enumerate(processes):
            process.join(2)
            if (process.exitcode or 0) < 0:
                crashed.append(f"rank {number % ranks} was killed by signal {-process.exitcode}")
            process.kill()
        if crashed:
            raise Crashed(crashed[0])
        errors = sorted(Path(folder).glob("error_*"), key=lambda path: path.stat().st_mtime)
        text = errors[0].read_text()
        for path in errors:
            path.unlink()
        raise Raised(text)


def end_with_caller() -> None:
    """End this rank when the process that started it has ended, by whatever signal. Its parent is the fork server, which
    lives as long as its ranks: they would go on with their cases.
    """
    caller = multiprocessing.parent_process()
    assert caller is not None

    def wait() -> None:
        caller.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _rank(rank: int, ranks: int, store: str, function: Callable[..., Any], folder: str, jobs: list[Any]) -> None:
    """Run `function` as one rank. An error is left as a file in the folder, for the process that waits for the ranks."""
    end_with_caller()
    os.dup2(2, 1)  # the output of a rank's libraries, such as gloo, does not belong to the command's output
    logging.getLogger("torch").setLevel(logging.ERROR)  # warnings, which runs show too, would stand between the cases
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    run = Run(
        directory=Path(folder),
        attempt=Path(folder),
        rank=rank,
        local_rank=rank,
        world_size=ranks,
        store=dist.FileStore(store, ranks),
    )
    try:
        with world(from_dict(Job, jobs[0][-1]), run) as device:
            function(device, folder, jobs)
    except BaseException:
        Path(f"{folder}/error_{os.getpid()}").write_text(traceback.format_exc())
        os._exit(1)
