"""Run one rank of a set of processes that run cases one after another: python gpu_rank.py FOLDER RANK. gpu_pool.py
starts it.

FOLDER/plan.json has the cases to run. Rank 0 writes begun.json before each case and done_N.json after it. A rank whose
check raises writes error_RANK.txt and exits. Printed text is written to rank_RANK.log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gpu_cases
import gpu_checks
import gpu_commands
import gpu_kernels
import gpu_together
import torch
import torch.distributed as dist

from titan_hydra.core.job.config.files import write_json
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import health
from titan_hydra.core.train.worker import set_environment
from titan_hydra.core.train.world import world


def main(folder: Path, rank: int) -> None:
    """Run the plan's cases."""
    set_environment(local_ranks=1, async_tp=True)  # as in a rank; some cases of a set use async TP
    faulthandler.enable()  # a rank that hangs gets SIGABRT and prints its stacks
    threading.Thread(target=outlive_nobody, daemon=True).start()
    plan = json.loads((folder / "plan.json").read_text())
    if not plan["gpu"]:
        torch.set_num_threads(1)
    if plan["beside"]:
        health.TAKEN = 0.6  # of the device's memory, which other sets of cases use at the same time
    here = gpu_checks.Here(Path(plan["shared"]), plan["gpu"], plan["dry"], rank, plan["ranks"])
    known = {case.name: case for case in [*gpu_cases.CASES, *gpu_cases.FAULTS]}
    known |= {f"reference of {case.name}": case for case in known.values()}
    with (
        joined(here, Run(folder, folder, rank, 0, plan["ranks"]))
        if plan["world"]
        else contextlib.nullcontext() as device
    ):
        here = dataclasses.replace(here, device=device)
        for number, name in enumerate(plan["cases"]):
            if rank == 0:
                write_json(folder / "begun.json", {"number": number})
            began, case = time.monotonic(), known[name]
            check = "reference" if name.startswith("reference of ") else case.check
            facts = check_of(check, plan["world"])(here, **case.options)
            tidy(here)
            if plan["world"]:
                dist.barrier()
            if rank == 0:
                write_json(folder / f"done_{number}.json", {"facts": facts, "seconds": time.monotonic() - began})


def outlive_nobody() -> None:
    """End this rank, and the processes that its check has started, as soon as the parent process ends for any reason:
    no process may keep the GPU.
    """
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def check_of(name: str, world: bool) -> Callable[..., dict[str, Any]]:
    """Return the function of a check. `world`: the check is for ranks that have joined a process group."""
    places = (gpu_together,) if world else (gpu_checks, gpu_kernels, gpu_commands)
    return next(getattr(place, name) for place in places if hasattr(place, name))


def joined(here: gpu_checks.Here, run: Run) -> contextlib.AbstractContextManager[torch.device]:
    """Return the process group of all ranks, each with the first device, joined as a run joins it."""
    store = dist.FileStore(str(run.directory / "store"), run.world_size)
    return world(dataclasses.replace(here, ranks=1).job(), dataclasses.replace(run, store=store))


def tidy(here: gpu_checks.Here) -> None:
    """Remove compiled code, garbage and cached memory, so that the next case starts without them."""
    torch.compiler.reset()
    gc.collect()
    if here.gpu:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    place, number = Path(sys.argv[1]), int(sys.argv[2])
    try:
        main(place, number)
    except BaseException:
        (place / f"error_{number}.txt").write_text(traceback.format_exc())
        traceback.print_exc()
        os._exit(1)  # exit at once, as another rank may wait in a collective
    os._exit(0)
