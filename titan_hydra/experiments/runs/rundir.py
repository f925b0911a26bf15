"""Run directories. They are created atomically, and one launcher at a time claims them. Their files show a run's state.

    runs/<name>-<hash>/config.json overrides.txt env.json attempts/<n>/... and what the trainer adds

An attempt is claimed by renaming a prepared folder to attempts/<n>, which fails if attempts/<n> exists. The prepared
folder already contains the owner's record, so an attempt never exists without a known owner.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit, denied
from titan_hydra.core.job.config import Job, identity, to_dict
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.registry import EXECUTORS
from titan_hydra.core.job.config.user_code import digest_of_code, sources
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.core.job.run.code import code_here, describe_code, versions
from titan_hydra.core.job.run.failure import Failure, guilty
from titan_hydra.core.job.run.records import alive, this_process
from titan_hydra.core.job.run.run import draw_tracked_id, hash_of, homes_of, newest_attempt

from .queue import Queue, QueuedJob, ask, executor_of, is_here, name_of, owner_in

REPLACED = ".replaced"  # the folder into which a run directory is moved before it is deleted
# a run on another host counts as interrupted if nothing was written into its attempt's folder for this many seconds
SILENCE = 120


@dataclass(frozen=True)
class State:
    """The state of a run: its kind, its newest attempt (0: none), and its failure. The kinds are new, not submitted,
    queued, running, done, interrupted, failed, unknown (the executor does not answer) and, returned only by `inspect`,
    damaged and removed (by `titan runs`, which may have put the run elsewhere).
    """

    kind: str
    attempt: int = 0
    failure: Failure | None = None
    host: str | None = None  # where the run is running: a host, or a list of nodes
    job: QueuedJob | None = None  # the run's job in the executor's queue
    damage: str = ""  # for a damaged run: the name of the file that cannot be read, with the reason
    # for a run that is interrupted, or not submitted: why the executor has refused or dropped it; if removed: where it is
    refused: str = ""
    groups: tuple[State, ...] = ()  # states of replica groups that are separate jobs, each with its own attempts
    asked: bool = True  # whether the run's executor could be asked; if not, as without its module, the state stays

    @property
    def active(self) -> bool:
        """Whether the state may change although nobody types a command."""
        return self.kind in ("queued", "running", "unknown")

    @property
    def may_change(self) -> bool:
        """Whether a command that follows the run should look again."""
        return self.active and self.asked

    def stopped_by(self, run: str) -> str:
        """Return how to stop this run: by titan stop or, if it belongs to another cluster, there."""
        there = (self.host or "").startswith("cluster ")
        return f"stop it first, on the {self.host}" if there else f"stop it first (titan stop {run})"

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


def directory_of(job: Job) -> Path:
    """Return the path of a job's run directory, whether or not it exists."""
    return layout.runs_of(job) / f"{job.name}-{identity(job)}"


def state(directory: Path, queues: dict[str, Queue] | None = None) -> State:
    """Read the state of a run from its files and, if its executor has a queue, from the answer of the queue. `queues`
    are answers of `ask`; None: ask now.
    """
    attempt = newest_attempt(directory)
    if not directory.is_dir():
        return State("new")
    owner = owner_in(directory, attempt)
    answers = ask([directory]) if queues is None else queues
    executor = executor_of(directory, owner)
    run_state: State = executor.state(directory, attempt, owner, answers.get(name_of(owner), Queue()))
    return run_state


def state_here(directory: Path, attempt: int) -> State:
    """Read the state of a run whose ranks are processes of a known machine."""
    folder = layout.ATTEMPT.of(directory, attempt)
    host = host_of_running(folder)
    if host:
        return State("running", attempt, host=host)
    if layout.RESULT.read(directory).get("status") == "done":
        return State("done", attempt)
    failure = guilty(folder)
    return State("failed", attempt, failure) if failure else State("interrupted", attempt)


def states(directories: list[Path]) -> list[State]:
    """Read the states of many runs. Each executor is asked once."""
    queues = ask(directories)
    return [state(directory, queues) for directory in directories]


def inspect(directory: Path, queues: dict[str, Queue] | None = None) -> State:
    """Read the state of a run for display. The state's kind is `damaged` if a file that defines the run, or that
    records its end, cannot be read.

    The launcher uses `state` instead, which treats a damaged file as absent, so that the run continues and writes the
    file again.
    """
    try:
        now = state(directory, queues)
        if now.kind == "new":
            return gone(directory) or now
        damage = "" if now.active else damage_of(directory, now)
    except PermissionError as error:
        now, damage = State("unknown"), denied(error)
    except ConfigError as error:  # a user's own executor whose module is not here; a finished run does not need it
        done = layout.RESULT.read(directory).get("status") == "done"
        now, damage = (
            (State("done", newest_attempt(directory)), "")
            if done
            else (
                State("unknown", newest_attempt(directory), refused=str(error), asked=False),
                "",
            )
        )
    except OSError as error:  # a broken disk
        now, damage = State("unknown"), f"{Path(error.filename or directory).name}: {error.strerror}"
    return replace(now, kind="damaged", failure=None, damage=damage) if damage else now


def gone(directory: Path) -> State | None:
    """Return the state of a sweep's cell that `titan runs` has removed, archived or moved; None for any other run."""
    record = layout.GONE_RUN.read(layout.GONE.of(directory.parent), directory.name)
    where = f" to {record['to']}" if record.get("to") else ""
    return State("removed", refused=f"{record['word']}{where} by {record['by']}") if record else None


def inspect_all(directories: list[Path]) -> list[State]:
    """Read the states of many runs for display, as `inspect` does. Each executor is asked once."""
    queues = ask(directories)
    return [inspect(directory, queues) for directory in directories]


def damage_of(directory: Path, now: State) -> str:
    """Return the name of the first unreadable file of those that define the run or record its end; "" if there is none."""
    attempt = layout.ATTEMPT.of(directory, now.attempt)
    others = ((layout.RESULT, directory), (layout.CLAIM, attempt), (layout.RANKS, attempt), (layout.RANK, attempt))
    for entry, folder in ((layout.CONFIG, directory), *(others if now.kind != "done" else ())):
        file = entry.of(folder)
        if not entry.read(folder) and (entry is layout.CONFIG or os.path.lexists(file)):
            return f"{file.relative_to(directory)} {'cannot be read' if os.path.lexists(file) else 'is missing'}"
    return ""


def note(attempt: Path, **known: object) -> dict[str, Any]:
    """Update the record of an attempt, attempt.json, and return it.

    When a job id is recorded, `ended` is cleared: another launcher may have marked the attempt as ended before the id
    was known.
    """
    record = {**layout.CLAIM.read(attempt), **known}
    if "job_id" in known:
        record.pop("ended", None)
    layout.CLAIM.write(attempt, record)
    return record


def running_ranks(attempt: Path) -> list[dict[str, Any]]:
    """Return the records of an attempt's ranks that still run on this host."""
    return [rank for rank in layout.RANK.read_all(attempt).values() if "exit_status" not in rank and alive(rank)]


def host_of_running(attempt: Path) -> str | None:
    """Return the host on which an attempt is running; None if the attempt is over, or if only its executor can know.

    The owner of an attempt is the launcher at first; once the ranks' parent process has written ranks.json, the owner
    is that process. Ranks may outlive their owner.
    """
    owner = layout.RANKS.read(attempt) or layout.CLAIM.read(attempt)
    known = name_of(owner) in EXECUTORS
    if known and not is_here(owner):
        return None  # only the executor knows whether the attempt is running
    if running_ranks(attempt) or alive(owner if "ended" not in owner else {}):
        return socket.gethostname()
    if not owner or not (known or owner.get("here")):  # attempt.json is damaged or lost, or its executor's module is
        others = [rank["host"] for rank in layout.RANK.read_all(attempt).values() if rank and "exit_status" not in rank]
        return others[0] if others and others[0] != socket.gethostname() and ranks_seem_to_run(attempt) else None
    elsewhere = "ended" not in owner and owner.get("host") != socket.gethostname()
    return owner.get("host") if elsewhere and written_lately(attempt) else None


def written_lately(attempt: Path) -> bool:
    """Whether anything was written into the folder of an attempt within the last SILENCE seconds."""
    newest = 0.0
    for file in attempt.iterdir():
        if not file.name.startswith("."):  # the temporary files of `write_json` begin with a dot
            with contextlib.suppress(OSError):  # it is gone again, or is a link that leads to itself
                newest = max(newest, file.stat().st_mtime)
    return file_time(attempt) - newest < SILENCE


def file_time(folder: Path) -> float:
    """Return the present time by the clock of a folder's file system, which sets the times of the folder's files. A
    host's own clock may differ from this clock by an hour.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def ranks_seem_to_run(attempt: Path) -> bool:
    """Whether ranks of an attempt seem to run. This is so if a rank has not recorded its end, and if a file of the
    attempt was written within the last SILENCE seconds.
    """
    return (
        not layout.EXIT.of(attempt).exists()
        and any("exit_status" not in rank for rank in layout.RANK.read_all(attempt).values())
        and written_lately(attempt)
    )


def claim(
    directory: Path, number: int, job: Job, overrides: list[str], fresh: bool = False, **owner: object
) -> Path | None:
    """Claim attempt `number` of a run, and return the attempt's folder. Return None if another launcher was faster;
    then the caller must read the state again.

    With `fresh`, the run starts from nothing: the whole old directory is removed. `owner` holds further fields for
    attempt.json, such as a submitted job's token, user and code. Raises OSError if nothing can be written.
    """
    name = job.cluster.executor
    owner = {"executor": name, "here": EXECUTORS[name].here, "overrides": overrides, **owner}
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        return _create(directory, job, owner)
    if (mine := _rename_into(directory, number, owner)) is None:
        return None
    if any(host_of_running(attempt) for other, attempt in layout.ATTEMPT.all(directory).items() if other != number):
        shutil.rmtree(mine)  # meanwhile, a launcher with launch.force has replaced the directory
        return None
    if fresh:
        delete_aside(lay_aside(directory), directory.name)  # a partly deleted directory is never taken for a run
        return _create(directory, job, owner)
    _write_run(directory, job, owner)
    return mine


def claim_groups(directory: Path, replicas: int, overrides: list[str], **owner: object) -> list[Path]:
    """Claim the next attempt of each replica group except the first, whose attempt `claim` has claimed."""
    claimed = []
    for home in homes_of(directory, replicas)[1:]:
        while (attempt := _rename_into(home, newest_attempt(home) + 1, owner | {"overrides": overrides})) is None:
            continue  # a requeued job of an earlier submission has claimed this attempt first
        claimed.append(attempt)
    return claimed


def claim_next(directory: Path, number: int, owner: dict[str, Any]) -> None:
    """Create the next attempt of a submitted job, unless it exists. `owner` is attempt.json of the attempt before."""
    past = ("pid", "host", "born", "started", "ended", "end")
    _rename_into(directory, number, {key: value for key, value in owner.items() if key not in past})


def _rename_into(directory: Path, number: int, owner: dict[str, Any]) -> Path | None:
    """Create an attempt's folder and its owner's record in one rename. Return None if another launcher has created it.
    Raises OSError on a full disk.
    """
    final = layout.ATTEMPT.of(directory, number)
    attempts = final.parent
    attempts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".claim-", dir=attempts, ignore_cleanup_errors=True) as scratch:
        mine = Path(scratch) / "attempt"
        _write_attempt(mine, owner)
        try:
            return mine.rename(final)
        except OSError:
            if attempts.is_dir() and not os.path.lexists(final):
                raise
            return None


def _create(directory: Path, job: Job, owner: dict[str, Any]) -> Path | None:
    """Create a run directory with its first attempt, in one rename. Return None if another launcher was faster."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory.parent, ignore_cleanup_errors=True) as scratch:
        run = Path(scratch) / directory.name
        _write_attempt(layout.ATTEMPT.of(run, 1), owner)
        _write_run(run, job, owner)
        draw_tracked_id(run, directory.name)
        try:
            run.rename(directory)
        except OSError:
            if directory.is_dir():
                return None
            raise
    return layout.ATTEMPT.of(directory, 1)


def lay_aside(directory: Path) -> Path:
    """Move a run directory, or another folder beside runs, into REPLACED, in one rename, and return its place there."""
    grave = directory.parent / REPLACED / f"{directory.name}-{os.getpid()}-{time.time_ns()}"
    grave.parent.mkdir(exist_ok=True)
    return directory.rename(grave)


def delete_aside(grave: Path, name: str) -> None:
    """Delete what was set aside of this name, also by an earlier deletion that was interrupted."""
    for folder in grave.parent.glob(f"{glob.escape(name)}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        grave.parent.rmdir()


def _write_attempt(folder: Path, owner: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    layout.CLAIM.write(folder, {**this_process(), "started": time.time(), **owner})


def _write_run(directory: Path, job: Job, owner: dict[str, Any]) -> None:
    """Write the configuration of the newest attempt into the run directory. Settings outside the identity may differ from
    those of the attempt before.
    """
    layout.CONFIG.write(directory, to_dict(job))
    if layout.FIRST_CONFIG.of(directory).exists() and identity(job) == hash_of(directory):
        layout.FIRST_CONFIG.write(directory, to_dict(job))  # it may be damaged, and this job has the first layout
    write_text(layout.OVERRIDES.of(directory), "".join(f"{override}\n" for override in owner["overrides"]))
    attempt = newest_attempt(directory)
    environment = describe_environment(job, owner.get("code")) | inputs.record_files(
        job, directory, layout.runs_of(job), attempt
    )
    for folder in (directory, layout.ATTEMPT.of(directory, attempt)):
        layout.ENV.write(folder, environment)


def mark_cancelled(attempt: Path) -> None:
    """Record in an attempt that it is cancelled, and by whom. Call this before stopping anything."""
    layout.CANCELLED.write(attempt, {"by": getpass.getuser(), "time": time.time()})


def end_attempt(attempt: Path) -> None:
    """Mark an attempt as ended. This is needed because the launcher that owns the attempt continues with other cells."""
    if layout.CLAIM.read(attempt):
        note(attempt, ended=time.time())


def shared_with(directory: Path) -> tuple[str, ...]:
    """Return the runs that shared the machine with any attempt of a run, as the ranks' parent processes saw them."""
    attempts = layout.ATTEMPT.all(directory).values()
    return tuple(dict.fromkeys(name for attempt in attempts for name in layout.RANKS.read(attempt).get("beside", ())))


def describe_environment(job: Job, code: str | None = None) -> dict[str, Any]:
    """Return the code, versions and machine of a run, without environment variables. `code` is the digest of the copy of
    the code that the run imports; None: the run imports this checkout.
    """
    here = describe_code() if code is None else layout.CODE_STATE.read(layout.CODE.of(layout.runs_of(job)), code)
    return {
        **here,
        "code": code or digest_of_code(code_here(sources(job.train.imports))),
        "versions": {**versions(), **{name: metadata.version(name) for name in ("hydra-core", "submitit")}},
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
    }


def result_status(state: State) -> int:
    """Return the exit status that corresponds to a run's state."""
    if state.kind == "failed":
        return state.failure.status
    return Exit.DONE if state.kind == "done" else Exit.REQUEUED
