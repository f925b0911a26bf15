"""Run directories: created atomically, claimed by one launcher at a time; their files give the state of the run.

    runs/<name>-<hash>/config.json overrides.txt env.json attempts/<n>/... and what the trainer adds

An attempt is claimed by renaming a prepared folder to attempts/<n>, which fails if that exists. The folder already
contains the owner's record, so an attempt never exists without a known owner.
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import titan_hydra
from titan_hydra.base.errors import Exit, denied
from titan_hydra.base.redact import redact
from titan_hydra.base.versions import versions
from titan_hydra.config import Job, identity, to_dict
from titan_hydra.config.files import write_text

from . import layout, slurm
from .failure import Failure, guilty
from .records import alive, this_process
from .run import homes_of, newest_attempt
from .slurm import Queue, SlurmJob

REPLACED = ".replaced"  # where launch.force moves a directory before it is deleted
SILENCE = 120  # seconds without a sign of life after which a run on another host counts as interrupted


@dataclass(frozen=True)
class State:
    """Where a run stands: its kind (new, not submitted, queued, running, done, interrupted, failed, or unknown if SLURM
    does not answer), its newest attempt (0: none), and its failure. `inspect` can also return the kind damaged.
    """

    kind: str
    attempt: int = 0
    failure: Failure | None = None
    host: str | None = None  # where it runs: a host, or SLURM's list of nodes
    job: SlurmJob | None = None  # SLURM's entry of its job
    damage: str = ""  # of a damaged run: which of its files cannot be read
    refused: str = ""  # sbatch's words, if it has refused a run that is not submitted
    groups: tuple[State, ...] = ()  # of replica groups that are SLURM jobs of their own, each with its own attempts

    @property
    def active(self) -> bool:
        """Whether it will change without anybody doing anything, as far as is known."""
        return self.kind in ("queued", "running", "unknown")

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


def directory_of(job: Job) -> Path:
    """Return the path of a job's run directory, whether or not it exists."""
    return Path(job.paths.runs).expanduser().absolute() / f"{job.name}-{identity(job)}"


def state(directory: Path, queue: Queue | None = None) -> State:
    """Read the state of a run from its files and, for one that was submitted to SLURM, from SLURM's queue."""
    attempt = newest_attempt(directory)
    if not directory.is_dir():
        return State("new")
    folder = layout.ATTEMPT.of(directory, attempt)
    owner = layout.CLAIM.read(folder)
    if owner.get("executor") == "slurm":
        return slurm_state(directory, attempt, owner, queue_of([directory]) if queue is None else queue)
    host = host_of_running(folder)
    if host:
        return State("running", attempt, host=host)
    if layout.RESULT.read(directory).get("status") == "done":
        return State("done", attempt)
    failure = guilty(folder)
    return State("failed", attempt, failure) if failure else State("interrupted", attempt)


def states(directories: list[Path]) -> list[State]:
    """Read the states of many runs, with one squeue call for all SLURM jobs."""
    queue = queue_of(directories)
    return [state(directory, queue) for directory in directories]


def inspect(directory: Path, queue: Queue | None = None) -> State:
    """Read the state of a run for display. Its kind is damaged if a file that defines the run or its end cannot be
    read.

    The launcher uses `state`, which treats an unreadable file as absent: the run continues and writes it again.
    """
    try:
        now = state(directory, queue)
        damage = "" if now.active or now.kind == "new" else damage_of(directory, now)
    except PermissionError as error:
        now, damage = State("unknown"), denied(error)
    except OSError as error:  # a broken disk
        now, damage = State("unknown"), f"{Path(error.filename or directory).name}: {error.strerror}"
    return replace(now, kind="damaged", failure=None, damage=damage) if damage else now


def inspect_all(directories: list[Path]) -> list[State]:
    """Read the states of many runs for display, as `inspect` does, with one squeue call."""
    queue = queue_of(directories)
    return [inspect(directory, queue) for directory in directories]


def damage_of(directory: Path, now: State) -> str:
    """Name the first unreadable file that defines a run or its end; "" if all are readable."""
    attempt = layout.ATTEMPT.of(directory, now.attempt)
    others = ((layout.RESULT, directory), (layout.CLAIM, attempt), (layout.RANKS, attempt), (layout.RANK, attempt))
    for entry, folder in ((layout.CONFIG, directory), *(others if now.kind != "done" else ())):
        file = entry.of(folder)
        if not entry.read(folder) and (entry is layout.CONFIG or os.path.lexists(file)):
            return f"{file.relative_to(directory)} {'cannot be read' if os.path.lexists(file) else 'is missing'}"
    return ""


def slurm_state(directory: Path, attempt: int, owner: dict[str, Any], queue: Queue) -> State:
    """Read the state of a run whose newest attempt was submitted to SLURM. `owner` is its attempt.json, written by the
    submitter.

    Replica groups are jobs of one submission. The run goes on while one of them does, and failed if one has when all
    are over.
    """
    groups = [job_state(directory, attempt, owner, queue)]
    for home, number, other in submitted_groups(directory, owner["token"]):
        groups.append(State("done", number) if groups[0].kind == "done" else job_state(home, number, other, queue))
    if len(groups) == 1:
        return groups[0]
    named = [
        replace(group, failure=group.failure and replace(group.failure, line=f"replica group {number}: {group.failure.line}"))
        for number, group in enumerate(groups)
    ]
    kinds = ("running", "queued", "unknown", "failed", "interrupted", "not submitted", "done")
    first = min(named, key=lambda group: kinds.index(group.kind))
    hosts = [group.host for group in groups if group.host]
    return replace(first, attempt=attempt, host=",".join(hosts) or None, groups=tuple(named))


def submitted_groups(directory: Path, token: str) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield run folder, newest attempt and its attempt.json of the replica groups but the first that a submission to
    SLURM has claimed.
    """
    homes = homes_of(directory, 1 + sum(layout.ATTEMPT.of(home).parent.is_dir() for home in layout.REPLICA.all(directory).values()))[1:]
    for home in homes:
        number = newest_attempt(home)
        owner = layout.CLAIM.read(layout.ATTEMPT.of(home, number))
        if owner and owner.get("token") == token:
            yield home, number, owner


def job_state(directory: Path, attempt: int, owner: dict[str, Any], queue: Queue) -> State:
    """Read the state of a job from the newest attempt in the folder of its run, or of its replica group."""
    folder = layout.ATTEMPT.of(directory, attempt)
    if layout.RESULT.read(directory).get("status") == "done":
        return State("done", attempt)
    cluster = slurm.elsewhere(owner)
    if cluster and "ended" not in owner:
        return State("running" if heard_of_ranks(folder) else "unknown", attempt, host=f"cluster {cluster}")
    job = None if cluster else queue.find(owner)
    if job and owner["job_id"] is None and not being_submitted(owner):  # the submitter died before recording the id
        with contextlib.suppress(OSError):
            owner = note(folder, job_id=job.id)
    if job and job.waiting:
        return State("queued", attempt, job=job)
    # other cells may run
    over = owner.get("packed") and layout.EXIT.of(folder).exists() and not layout.STOPPED.of(folder).exists()
    if job and job.active and not over:
        started = not owner.get("packed") or layout.RANK.all(folder)
        return State("running" if started else "queued", attempt, host=job.nodes, job=job)
    if job is None and not over:
        if "ended" not in owner and owner["job_id"] and heard_of_ranks(folder):
            return State("running", attempt)  # another cluster of this name may know the job
        if not queue.answers and "ended" not in owner:
            alive_lately = owner["job_id"] and heard_lately(folder) and layout.RANK.all(folder)
            return State("running" if alive_lately else "unknown", attempt)
        if owner["job_id"] is None and being_submitted(owner):
            return State("queued", attempt)
    word = owner.get("slurm_state") if job is None or job.active else job.state
    if "ended" not in owner:  # recorded, as SLURM forgets jobs
        with contextlib.suppress(OSError):
            note(folder, ended=time.time(), slurm_state=word)
    if job is None and owner["job_id"] is None and not layout.RANK.all(folder):
        return State("not submitted", attempt, refused=owner.get("refused", ""))
    ran = (owner["job_id"] or layout.RANK.all(folder)) and not (word or "").startswith("CANCELLED")
    failure = guilty(folder, word) if ran else None
    return State("failed", attempt, failure, job=job) if failure else State("interrupted", attempt, job=job)


def note(attempt: Path, **known: object) -> dict[str, Any]:
    """Update the record of an attempt, attempt.json, and return it.

    Setting a job id clears `ended`: another launcher may have marked the attempt finished before the id was known.
    """
    record = {**layout.CLAIM.read(attempt), **known}
    if "job_id" in known:
        record.pop("ended", None)
    layout.CLAIM.write(attempt, record)
    return record


def being_submitted(owner: dict[str, Any]) -> bool:
    """Whether the process that claimed an attempt may still submit it. On another host only the elapsed time can
    tell.
    """
    if owner["host"] == socket.gethostname():
        return alive(owner) and "ended" not in owner
    return "ended" not in owner and time.time() - owner["started"] < SILENCE


def queue_of(directories: list[Path]) -> Queue:
    """Ask SLURM about the newest attempts of these runs: one squeue call for all, none if no run was submitted to
    SLURM.
    """
    owners = []
    for directory in directories:
        with contextlib.suppress(PermissionError):  # `inspect` names it
            owner = layout.CLAIM.read(layout.ATTEMPT.of(directory, newest_attempt(directory)))
            if owner.get("executor") == "slurm" and not layout.RESULT.of(directory).exists():
                owners += [owner, *(other for _, _, other in submitted_groups(directory, owner["token"]))]
    return slurm.ask_queue(owners)


def running_ranks(attempt: Path) -> list[dict[str, Any]]:
    """Return the records of an attempt's ranks that still run on this host."""
    return [rank for rank in layout.RANK.read_all(attempt).values() if "exit_status" not in rank and alive(rank)]


def host_of_running(attempt: Path) -> str | None:
    """Return the host on which an attempt is running; None if it is over.

    The owner of an attempt is the launcher until the ranks' parent has written ranks.json, then that parent. Ranks may
    outlive both.
    """
    owner = layout.RANKS.read(attempt) or layout.CLAIM.read(attempt)
    if owner.get("executor") == "slurm":
        return None  # only SLURM knows: see slurm_state
    if owner and "ended" not in owner:
        if owner.get("host") == socket.gethostname():
            return owner["host"] if alive(owner) or running_ranks(attempt) else None
        return owner.get("host") if heard_lately(attempt) else None
    return socket.gethostname() if running_ranks(attempt) else None


def heard_lately(attempt: Path) -> bool:
    """Whether anything was written into the folder of an attempt within the last SILENCE seconds."""
    newest = 0.0
    for file in attempt.iterdir():
        if not file.name.startswith("."):  # in the making, by `write_json`
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, file.stat().st_mtime)
    return file_time(attempt) - newest < SILENCE


def file_time(folder: Path) -> float:
    """Return the present time by the clock that gives the files of a folder theirs; hosts' own clocks may differ from
    it by an hour.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def heard_of_ranks(attempt: Path) -> bool:
    """Whether a rank of an attempt has not ended, and some rank has written to a file within the last SILENCE
    seconds.
    """
    return (
        not layout.EXIT.of(attempt).exists()
        and any("exit_status" not in rank for rank in layout.RANK.read_all(attempt).values())
        and heard_lately(attempt)
    )


def claim(directory: Path, number: int, job: Job, overrides: list[str], fresh: bool = False, **owner: object) -> Path | None:
    """Claim attempt `number` of a run. Returns its folder, or None if another launcher was faster: then read the state
    again.

    `fresh` restarts the run from nothing: the old directory is removed as a whole. `owner` holds further fields of
    attempt.json: for a SLURM job its executor, token, user and code. Raises OSError if nothing can be written.
    """
    owner |= {"overrides": overrides}
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        return _create(directory, job, owner)
    if (mine := _rename_into(directory, number, owner)) is None:
        return None
    if any(host_of_running(attempt) for other, attempt in layout.ATTEMPT.all(directory).items() if other != number):
        shutil.rmtree(mine)  # a launcher with launch.force has replaced the directory meanwhile
        return None
    if fresh:
        _remove(directory)
        return _create(directory, job, owner)
    _write_run(directory, job, overrides)
    return mine


def claim_groups(directory: Path, replicas: int, overrides: list[str], **owner: object) -> list[Path]:
    """Claim the next attempt of each replica group but the first, for the launcher that has claimed the run's."""
    claimed = []
    for home in homes_of(directory, replicas)[1:]:
        while (attempt := _rename_into(home, newest_attempt(home) + 1, owner | {"overrides": overrides})) is None:
            continue  # a job of an earlier submission, requeued after its end, was faster
        claimed.append(attempt)
    return claimed


def _rename_into(directory: Path, number: int, owner: dict[str, Any]) -> Path | None:
    """Create an attempt's folder and its owner's record in one rename; None if another launcher has it. Raises OSError
    on a full disk.
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
    """Create a run directory with its first attempt, in one rename. Returns None if another launcher was faster."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory.parent, ignore_cleanup_errors=True) as scratch:
        run = Path(scratch) / directory.name
        _write_attempt(layout.ATTEMPT.of(run, 1), owner)
        _write_run(run, job, owner["overrides"])
        try:
            run.rename(directory)
        except OSError:
            if directory.is_dir():
                return None
            raise
    return layout.ATTEMPT.of(directory, 1)


def _remove(directory: Path) -> None:
    """Rename a run directory away, then delete it: what an interrupted deletion leaves is not mistaken for a run."""
    grave = directory.parent / REPLACED / f"{directory.name}-{os.getpid()}-{time.time_ns()}"
    grave.parent.mkdir(exist_ok=True)
    directory.rename(grave)
    for folder in grave.parent.glob(f"{directory.name}-*"):  # also what an interrupted deletion left there earlier
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        grave.parent.rmdir()


def _write_attempt(folder: Path, owner: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    layout.CLAIM.write(folder, {**this_process(), "started": time.time(), **owner})


def _write_run(directory: Path, job: Job, overrides: list[str]) -> None:
    """Write the configuration of the newest attempt; settings outside the identity may have changed since the last
    one.
    """
    layout.CONFIG.write(directory, to_dict(job))
    write_text(layout.OVERRIDES.of(directory), "".join(f"{override}\n" for override in overrides))
    for folder in (directory, layout.ATTEMPT.of(directory, newest_attempt(directory))):
        layout.ENV.write(folder, describe_environment())


def end_attempt(attempt: Path) -> None:
    """Mark that the launcher has finished with an attempt, while it continues with other cells."""
    if layout.CLAIM.read(attempt):
        note(attempt, ended=time.time())


@functools.cache
def describe_environment() -> dict[str, Any]:
    """Return code, versions and machine of this run. Includes nothing from os.environ, and a diff without what looks
    like a secret.
    """
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
    """Return the output of git in the checkout of this code; None if it is not a checkout, or git is not available."""
    root = Path(titan_hydra.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, errors="replace").stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def result_status(state: State) -> int:
    """Return the exit status that corresponds to a run's state."""
    if state.kind == "failed":
        return state.failure.status
    return Exit.DONE if state.kind == "done" else Exit.REQUEUED
