"""TensorBoard and wandb: copies of metrics.jsonl for those who like to watch. A tracker that fails never stops a run."""
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any, Protocol

from titan_hydra.config import identity, to_dict
from titan_hydra.config.run import Run
from titan_hydra.config.schema import Job


class Tracker(Protocol):
    """Takes rows: `step` and numbers; None values are left out."""

    name: str

    def log(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under tensorboard/ in the run directory. After a resume, `purge_step` hides the rows that are made again."""

    name = "tensorboard"

    def __init__(self, job: Job, run: Run, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run.directory / "tensorboard", purge_step=resumed_at + 1 if resumed_at else None)

    def log(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A wandb run whose id is the identity hash, in the group of its sweep: a resumed run goes on in the same one.

    Offline, what a killed process had not written is lost, so each start writes a whole new copy from metrics.jsonl, and the newest
    folder under wandb/ holds all rows, each once; folders that it replaces and that nobody has sent go away.
    """

    name = "wandb"

    def __init__(self, job: Job, run: Run, resumed_at: int) -> None:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        offline = job.metrics.wandb_mode == "offline"
        for folder in (run.directory / "wandb").glob("offline-run-*") if offline else ():
            if not any(folder.glob("*.synced")):
                shutil.rmtree(folder, ignore_errors=True)
        self.run = wandb.init(
            project=job.metrics.wandb_project, mode=job.metrics.wandb_mode, id=identity(job), name=run.directory.name, resume="allow",
            group=job.sweep.name, dir=run.directory, config=to_dict(job), settings=wandb.Settings(console="off"),
        )
        if offline:
            rows = (json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines())
            for row in rows:
                self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] < self.run.step:  # online: the server has it, from before a kill
            return
        self.run.log({key: value for key, value in row.items() if key != "step" and value is not None}, step=row["step"])

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Job, Run, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def open_trackers(job: Job, run: Run, resumed_at: int) -> list[Tracker]:
    """The trackers that the job names; one that cannot start is left out with a warning."""
    trackers = []
    for name in job.metrics.trackers:
        try:
            trackers.append(TRACKERS[name](job, run, resumed_at))
        except Exception as error:
            print(f"warning: {name} could not start and is left out: {error}", flush=True)
    return trackers
