"""Small jobs that the tests of the trainer share."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.experiments.launch.conftest import launcher as launcher
from tests.kits.forked import PRELOADED
from titan_hydra.core.job.config import Job, from_dict, identity, to_dict
from titan_hydra.core.job.ranks import all_ranks, world_size
from titan_hydra.core.job.run.run import Run, folders_of
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.executors.ranks import start_local_lighthouse

TINY = ("debug=tiny", "precision=fp32", "metrics.log_every=1")


def rows(directory: Path, name: str = "metrics") -> list[dict]:
    """Return the rows of metrics.jsonl, or of events.jsonl, without their checksums."""
    file = directory / f"{name}.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if key != "crc32"} for row in found]


def losses(directory: Path, key: str = "loss") -> dict[int, float]:
    """Return loss or validation_loss by step."""
    return {row["step"]: row[key] for row in rows(directory) + rows(directory, "events") if key in row}


@pytest.fixture
def tiny():
    """Return `tiny(*overrides)`, which makes a job that takes a second."""
    return lambda *overrides: compose_job(*TINY, *overrides)


@pytest.fixture
def run_job(tmp_path):
    """Return `run_job(job)`, which trains the job to its end on real ranks and returns its run directory under
    tmp_path.

    `run_job.rows` and `run_job.losses` read its rows.
    """

    def run(job: Job, directory: Path | None = None, expect: int = 0) -> Path:
        directory = directory or tmp_path / f"{job.name}-{identity(job)}"
        number = 1 + sum(1 for _ in (directory / "attempts").glob("*")) if directory.exists() else 1
        attempt = directory / "attempts" / str(number)
        attempt.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(to_dict(job)))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ranks = [
            context.Process(target=_rank, args=(to_dict(job), directory, attempt, rank))
            for rank in range(all_ranks(job))
        ]
        silent = job.fault_tolerance.timeout_seconds
        helpers = [start_local_lighthouse(attempt, silent)] if job.fault_tolerance.name == "torchft" else []
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        for helper in helpers:
            helper.kill()
        errors = [path.read_text() for path in sorted(attempt.glob("error_*"))]
        assert [process.exitcode for process in ranks] == [expect] * len(ranks), errors
        return directory

    run.rows, run.losses = rows, losses
    return run


def _rank(config: dict, directory: Path, attempt: Path, rank: int) -> None:
    import sys
    import traceback

    import torch

    from titan_hydra.core.base.errors import RunError
    from titan_hydra.core.train.fault_tolerance import open_groups
    from titan_hydra.core.train.loop import train

    torch.set_num_threads(1)
    job = from_dict(Job, config)
    size = world_size(job)
    home, folder = folders_of(rank // size, directory, attempt)
    for place in (home, folder):
        place.mkdir(parents=True, exist_ok=True)
    log = (attempt / f"rank_{rank}.log").open("a")
    os.dup2(log.fileno(), 1)
    store = dist.FileStore(str(folder / "store"), size)
    try:
        run = Run(home, folder, rank % size, rank, size, store, rank // size)
        train(job, run, *[open_groups] * (job.fault_tolerance.name != "off"))
    except RunError as error:
        (attempt / f"error_{rank}").write_text(str(error))
        sys.exit(int(error.status))
    except BaseException:
        (attempt / f"error_{rank}").write_text(traceback.format_exc())
        sys.exit(1)
