"""A run directory: created whole or not at all, claimed by one launcher at a time, and what its files say about the state of the run.

    runs/<name>-<hash>/config.json overrides.txt env.json attempts/<n>/... and what the trainer adds

An attempt is claimed by renaming a finished folder to attempts/<n>, which fails if that exists. Whoever claims writes who it is into the
folder first, so there is no moment in which an attempt exists and nobody knows whose it is.
"""
from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import titan_hydra
from titan_hydra.config import Job, identity, to_dict
from titan_hydra.config.files import read_json, write_json, write_text
from titan_hydra.config.redact import redact
from titan_hydra.config.run import attempts_of, rank_files, versions
from titan_hydra.config.status import Exit

from . import slurm
from .failure import Failure, guilty
from .records import alive, this_process
from .slurm import Queue, SlurmJob

REPLACED = ".replaced"  # where launch.force moves a directory before it is deleted
SILENCE = 120  # seconds without a sign of life after which a run on another host counts as interrupted


@dataclass(frozen=True)
class State:
    """Where a run stands: new, queued, running, done, interrupted, failed, or unknown (a SLURM that does not answer); its newest
    attempt (0: none), and why it failed. For those who look at it (`inspect`) also damaged."""

    kind: str
    attempt: int = 0
    failure: Failure | None = None
    host: str | None = None  # where it runs: a host, or SLURM's list of nodes
    job: SlurmJob | None = None  # what SLURM says of it
    damage: str = ""  # of a damaged run: which of its files cannot be read

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


def directory_of(job: Job) -> Path:
    """Where a job's run directory is, or will be."""
    return Path(job.paths.runs).expanduser().absolute() / f"{job.name}-{identity(job)}"


def state(directory: Path, queue: Queue | None = None) -> State:
    """Read the state of a run from its files and, for one that was given to SLURM, from SLURM's queue."""
    attempt = newest_attempt(directory)
    if not directory.is_dir():
        return State("new")
    folder = directory / "attempts" / str(attempt)
    owner = read_json(folder / "attempt.json")
    if owner and owner.get("executor") == "slurm":
        return slurm_state(directory, attempt, owner, queue_of([directory]) if queue is None else queue)
    host = host_of_running(folder)
    if host:
        return State("running", attempt, host=host)
    if (read_json(directory / "result.json") or {}).get("status") == "done":
        return State("done", attempt)
    failure = guilty(folder)
    return State("failed", attempt, failure) if failure else State("interrupted", attempt)


def states(directories: list[Path]) -> list[State]:
    """The states of many runs, with one squeue call for all that SLURM has."""
    queue = queue_of(directories)
    return [state(directory, queue) for directory in directories]


def inspect(directory: Path, queue: Queue | None = None) -> State:
    """The state of a run for those who only look at it: damaged where a file that says what it is, or how it ended, cannot be read.

    The launcher asks `state`, to which a file that cannot be read is one that is not there: the run goes on, and writes it again.
    """
    try:
        now = state(directory, queue)
        damage = "" if now.kind in ("new", "queued", "running", "unknown") else damage_of(directory, now)
    except OSError as error:  # no permission, a broken disk
        now, damage = State("unknown"), f"{Path(error.filename or directory).name}: {error.strerror}"
    return replace(now, kind="damaged", failure=None, damage=damage) if damage else now


def inspect_all(directories: list[Path]) -> list[State]:
    """The states of many runs for those who only look at them, with one squeue call."""
    queue = queue_of(directories)
    return [inspect(directory, queue) for directory in directories]


def damage_of(directory: Path, now: State) -> str:
    """The first file that is needed to know a run, or how it ended, and cannot be read, in words; "" if all can."""
    names = ["config.json"]
    if now.kind != "done":
        names += ["result.json", *(f"attempts/{now.attempt}/{file}.json" for file in ("attempt", "ranks", "rank_0"))]
    for name in names:
        if read_json(directory / name) is None and (name == "config.json" or os.path.lexists(directory / name)):
            return f"{name} cannot be read" if os.path.lexists(directory / name) else f"{name} is missing"
    return ""


def slurm_state(directory: Path, attempt: int, owner: dict, queue: Queue) -> State:
    """The state of a run whose newest attempt is SLURM's. `owner` is its attempt.json, written by the submitter."""
    folder = directory / "attempts" / str(attempt)
    if (read_json(directory / "result.json") or {}).get("status") == "done":
        return State("done", attempt)
    job = queue.find(owner)
    if job and owner["job_id"] is None and not being_submitted(owner):  # the submitter died before he could note it
        with contextlib.suppress(OSError):
            owner = note(folder, job_id=job.id)
    if job and job.waiting:
        return State("queued", attempt, job=job)
    over = owner.get("packed") and (folder / "exit").exists() and not (folder / "stopped").exists()  # its other cells may still run
    if job and job.active and not over:
        started = not owner.get("packed") or any(folder.glob("rank_*.json"))
        return State("running" if started else "queued", attempt, host=job.nodes, job=job)
    if job is None and not over:
        if not queue.answers and "ended" not in owner:
            heard = max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)
            alive_lately = owner["job_id"] and time.time() - heard < SILENCE and any(folder.glob("rank_*.json"))
            return State("running" if alive_lately else "unknown", attempt)
        if owner["job_id"] is None and being_submitted(owner):
            return State("queued", attempt)
    word = owner.get("slurm_state") if job is None or job.active else job.state
    if "ended" not in owner:  # so that nobody need ask SLURM again, which forgets
        with contextlib.suppress(OSError):
            note(folder, ended=time.time(), slurm_state=word)
    ran = (owner["job_id"] or any(folder.glob("rank_*.json"))) and not (word or "").startswith("CANCELLED")
    failure = guilty(folder, word) if ran else None
    return State("failed", attempt, failure, job=job) if failure else State("interrupted", attempt, job=job)


def note(attempt: Path, **known: object) -> dict:
    """Add to what an attempt says of its job. One with a job is not over, whatever somebody thought who did not find it."""
    record = {**read_json(attempt / "attempt.json"), **known}
    if "job_id" in known:
        record.pop("ended", None)
    write_json(attempt / "attempt.json", record)
    return record


def being_submitted(owner: dict) -> bool:
    """Whether the one who claimed an attempt may still hand it to SLURM. On another host only time can tell."""
    if owner["host"] == socket.gethostname():
        return alive(owner) and "ended" not in owner
    return "ended" not in owner and time.time() - owner["started"] < SILENCE


def queue_of(directories: list[Path]) -> Queue:
    """What SLURM says of the newest attempts of these runs: one squeue call for all, none if no run is SLURM's."""
    owners = []
    for directory in directories:
        owner = read_json(directory / "attempts" / str(newest_attempt(directory)) / "attempt.json")
        if owner and owner.get("executor") == "slurm" and not (directory / "result.json").exists():
            owners.append(owner)
    return slurm.queue_of(owners)


def newest_attempt(directory: Path) -> int:
    """Number of the newest attempt; 0 when there is none."""
    return max(attempts_of(directory), default=0)


def processes(attempt: Path) -> list[dict]:
    """The ranks of an attempt that still run on this host."""
    ranks = map(read_json, rank_files(attempt, "rank").values())
    return [rank for rank in ranks if rank and "exit_status" not in rank and alive(rank)]


def host_of_running(attempt: Path) -> str | None:
    """The host on which an attempt is running; None when it is over.

    Its owner is the launcher until the ranks' parent has written ranks.json, then that parent. Ranks may outlive both.
    """
    owner = read_json(attempt / "ranks.json") or read_json(attempt / "attempt.json")
    if owner and owner.get("executor") == "slurm":
        return None  # SLURM knows: see slurm_state
    if owner and "ended" not in owner:
        if owner.get("host") == socket.gethostname():
            return owner["host"] if alive(owner) or processes(attempt) else None
        heard = max((file.stat().st_mtime for file in attempt.iterdir()), default=0.0)
        return owner.get("host") if time.time() - heard < SILENCE else None
    return socket.gethostname() if processes(attempt) else None


def claim(directory: Path, number: int, job: Job, overrides: list[str], fresh: bool = False, **owner: object) -> Path | None:
    """Become the one that runs attempt `number`. Returns its folder, or None if somebody else was faster: look at the state again.

    `fresh` starts the run again from nothing: the old directory goes away as a whole. `owner` is what attempt.json says beside the
    process: for a SLURM job its executor, token, user and code. Raises OSError when it cannot be written.
    """
    owner |= {"overrides": overrides}
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        return _create(directory, job, owner)
    attempts = directory / "attempts"
    attempts.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".claim-", dir=attempts, ignore_cleanup_errors=True) as scratch:
        mine = Path(scratch) / "attempt"
        _write_attempt(mine, owner)
        try:
            mine.rename(attempts / str(number))
        except OSError:
            return None
    if any(host_of_running(attempts / str(other)) for other in attempts_of(directory) if other != number):
        shutil.rmtree(attempts / str(number))  # the directory was replaced under us by a launcher with launch.force
        return None
    if fresh:
        _remove(directory)
        return _create(directory, job, owner)
    _write_run(directory, job, overrides)
    return attempts / str(number)


def _create(directory: Path, job: Job, owner: dict) -> Path | None:
    """A new run directory with its first attempt, in one rename."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory.parent, ignore_cleanup_errors=True) as scratch:
        run = Path(scratch) / directory.name
        _write_attempt(run / "attempts" / "1", owner)
        _write_run(run, job, owner["overrides"])
        try:
            run.rename(directory)
        except OSError:
            if directory.is_dir():
                return None
            raise
    return directory / "attempts" / "1"


def _remove(directory: Path) -> None:
    """Take a run directory away in one rename, then delete it: what a kill in between leaves is not taken for a run."""
    grave = directory.parent / REPLACED / f"{directory.name}-{os.getpid()}-{time.time_ns()}"
    grave.parent.mkdir(exist_ok=True)
    directory.rename(grave)
    for folder in grave.parent.glob(f"{directory.name}-*"):  # also what a kill has left there earlier
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        grave.parent.rmdir()


def _write_attempt(folder: Path, owner: dict) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "attempt.json", {**this_process(), "started": time.time(), **owner})


def _write_run(directory: Path, job: Job, overrides: list[str]) -> None:
    """What runs: the newest attempt's, where settings that are not part of the identity may have changed."""
    write_json(directory / "config.json", to_dict(job))
    write_text(directory / "overrides.txt", "".join(f"{override}\n" for override in overrides))
    environment = describe_environment()
    write_json(directory / "env.json", environment)
    newest = directory / "attempts" / str(newest_attempt(directory))
    write_json(newest / "env.json", environment)


def end_attempt(attempt: Path) -> None:
    """Mark that the launcher is through with an attempt, while it goes on to other cells."""
    record = read_json(attempt / "attempt.json")
    if record:
        write_json(attempt / "attempt.json", {**record, "ended": time.time()})


@functools.cache
def describe_environment() -> dict:
    """Code, versions and machine of this run. Nothing from os.environ, and a diff without what looks like a secret."""
    diff = _git("diff", "HEAD")
    return {
        "git_sha": _git("rev-parse", "HEAD"),
        "git_diff": redact(diff, code=True) if diff else diff,
        "git_untracked": (_git("ls-files", "--others", "--exclude-standard") or "").splitlines(),
        "versions": {**versions(), **{name: metadata.version(name) for name in ("hydra-core", "submitit")}},
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout of this code; None if it is not one, or there is no git."""
    root = Path(titan_hydra.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, errors="replace").stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def result_status(state: State) -> int:
    """Exit status that a run's state stands for."""
    if state.kind == "failed":
        return state.failure.status
    return Exit.DONE if state.kind == "done" else Exit.REQUEUED
