"""TensorBoard and wandb: copies of metrics.jsonl. A tracker that fails never stops a run."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.config.registry import TRACKERS, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run, draw_tracked_id, hash_of, tracked_id


class Tracker(Protocol):
    """Receives rows: dicts of `step` and numbers, in which a value of None is ignored."""

    name: str
    has: int  # the last step whose rows the tracker already holds when it is opened

    def log(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files to tensorboard/ in the run directory. After a resume, some steps are repeated, and
    `purge_step` hides their old rows.
    """

    name = "tensorboard"

    def __init__(self, job: Job, run: Run, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.has = resumed_at
        self.writer = SummaryWriter(
            layout.TENSORBOARD.of(run.directory), purge_step=resumed_at + 1 if resumed_at else None
        )

    def log(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Writes to a wandb run whose id belongs to the run directory (`tracked_id`), so that a resumed run continues it, and
    one that is started anew does not. The run's hash is one of its tags. The sweep is the run's group in wandb.

    When a process is killed in offline mode, wandb loses the rows that it has not yet written. So each start writes all
    recorded rows again, into a new folder, and deletes older folders that were not sent. The newest folder in wandb/
    has every row once.
    """

    name, has = "wandb", 0

    def __init__(self, job: Job, run: Run, resumed_at: int) -> None:
        """Begin or continue the run. What an earlier attempt wrote offline and nobody has sent is written again from
        the start.
        """
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        # a new wandb service is started: that of the parent process may still have the run of a killed attempt open
        os.environ.pop("WANDB_SERVICE", None)
        keys: Any = job.metrics.wandb  # type: ignore[attr-defined]
        offline = keys.mode == "offline"
        for folder in layout.WANDB.of(run.directory).glob("offline-run-*") if offline else ():
            if not any(folder.glob("*.synced")):
                shutil.rmtree(folder, ignore_errors=True)
        given = {
            "project": keys.project,
            "entity": keys.entity,
            "mode": keys.mode,
            "name": run.directory.name,
            "resume": "allow",
            "group": job.sweep.name,
            "tags": list(dict.fromkeys([*keys.tags, hash_of(run.home)])),
            "notes": job.notes or None,
            "dir": run.directory,
            "config": to_dict(job),
            "settings": wandb.Settings(console="off"),
        }
        try:
            self.run = wandb.init(id=tracked_id(run.home), **given)
        except Exception as error:  # wandb's classes of errors differ from version to version
            if not re.search(r"\b409\b|previously created and deleted", str(error)):
                raise
            draw_tracked_id(run.home, run.home.name)  # the server never takes the id of a deleted run again
            self.run = wandb.init(id=tracked_id(run.home), **given)

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] < self.run.step:  # in online mode, the server already has the rows of earlier processes
            return
        self.run.log(
            {key: value for key, value in row.items() if key != "step" and value is not None}, step=row["step"]
        )

    def close(self) -> None:
        self.run.finish()


def open_trackers(job: Job, run: Run, resumed_at: int) -> list[Tracker]:
    """Open the trackers that the job names, and send them all rows recorded so far. A tracker that cannot start is left
    out, with a warning.
    """
    trackers = []
    for name in job.metrics.trackers:
        try:
            trackers.append(open_tracker(name, job, run, resumed_at))
        except Exception as error:
            print(f"warning: {name} could not start and is left out: {error}", flush=True)
    return trackers


def open_tracker(name: str, job: Job, run: Run, resumed_at: int = 0) -> Tracker:
    """Open a tracker, and send it the recorded rows that it does not have yet."""
    tracker: Tracker = resolve(TRACKERS[name].open)(job, run, resumed_at)
    for row in recorded(run.directory):
        if row["step"] > tracker.has:
            tracker.log(row)
    return tracker


def recorded(directory: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of metrics.jsonl and events.jsonl in the form for trackers, ordered by step. Damaged rows are left
    out.
    """
    rows = layout.METRICS.rows(directory)[0] + layout.EVENTS.rows(directory)[0]
    return iter(sorted(map(trackable, rows), key=lambda row: row["step"]))


def trackable(row: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row. For an event, the numbers' names begin with the names of the event and of its task."""
    prefix = "".join(f"{row[name]}/" for name in ("event", "task") if name in row)
    return {
        name if name == "step" else prefix + name: value
        for name, value in row.items()
        if isinstance(value, int | float)
    }
