"""Determine the state of a run whose newest attempt was submitted to SLURM, from the run's files and from the queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.base.plain import NotPlain, read_plain
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import homes_of, newest_attempt
from titan_hydra.experiments.launch.executors.queued import being_submitted
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Queue
from titan_hydra.experiments.runs.rundir import State

from . import accounting, squeue


def run_state(directory: Path, attempt: int, owner: dict[str, Any], queue: Queue) -> State:
    """Read the state of a run whose newest attempt was submitted to SLURM. `owner` is the content of the attempt's
    attempt.json, which the submitter has written.

    Each replica group is a job. The run is running while one of these jobs runs. Once all jobs have ended, the run has
    failed if at least one job has failed.
    """
    groups = [job_state(directory, attempt, owner, queue)]
    for home, number, other in submitted_groups(directory, owner["token"]):
        groups.append(State("done", number) if groups[0].kind == "done" else job_state(home, number, other, queue))
    if len(groups) == 1:
        return groups[0]
    named = [
        replace(
            group,
            failure=group.failure and replace(group.failure, line=f"replica group {number}: {group.failure.line}"),
        )
        for number, group in enumerate(groups)
    ]
    kinds = ("running", "queued", "unknown", "failed", "interrupted", "not submitted", "done")
    first = min(named, key=lambda group: kinds.index(group.kind))
    hosts = [group.host for group in groups if group.host]
    return replace(first, attempt=attempt, host=",".join(hosts) or None, groups=tuple(named))


def submitted_groups(directory: Path, token: str) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield (run folder, newest attempt, content of attempt.json) for each replica group that was submitted with this
    token, except the first group.
    """
    homes = homes_of(
        directory, 1 + sum(layout.ATTEMPT.of(home).parent.is_dir() for home in layout.REPLICA.all(directory).values())
    )[1:]
    for home in homes:
        number = newest_attempt(home)
        owner = layout.CLAIM.read(layout.ATTEMPT.of(home, number))
        if owner and owner.get("token") == token:
            yield home, number, owner


def job_state(directory: Path, attempt: int, owner: dict[str, Any], queue: Queue) -> State:
    """Read the state of a job from the newest attempt in the folder of the job's run or replica group."""
    folder = layout.ATTEMPT.of(directory, attempt)
    if layout.RESULT.read(directory).get("status") == "done":
        return State("done", attempt)
    cluster = squeue.elsewhere(owner)
    if cluster and "ended" not in owner:
        return State("running" if rundir.ranks_seem_to_run(folder) else "unknown", attempt, host=f"cluster {cluster}")
    job = None if cluster else squeue.find_job(queue, owner)
    if job and owner["job_id"] is None and not being_submitted(owner):  # the submitter died before recording the id
        with contextlib.suppress(OSError):
            owner = rundir.note(folder, job_id=job.id)
    if job and job.waiting:
        return State("queued", attempt, job=job)
    # whether this cell has ended, although its packed job continues with other cells
    over = owner.get("packed") and _has_ended(folder)
    if job and job.active and not over:
        started = not owner.get("packed") or layout.RANK.all(folder)
        return State("running" if started else "queued", attempt, host=job.nodes, job=job)
    if job is None and not over:
        if "ended" not in owner and owner["job_id"] and rundir.ranks_seem_to_run(folder):
            # squeue does not list the job: it may be on another cluster with the same name
            return State("running", attempt)
        if not queue.answers and "ended" not in owner:
            alive_lately = owner["job_id"] and rundir.written_lately(folder) and layout.RANK.all(folder)
            return State("running" if alive_lately else "unknown", attempt)
        if owner["job_id"] is None and being_submitted(owner):
            return State("queued", attempt)
    word = owner.get("slurm_state") if job is None or job.active else job.state
    if "ended" not in owner:  # record the end now, as SLURM does not list old jobs for ever
        with contextlib.suppress(OSError):
            rundir.note(folder, ended=time.time(), slurm_state=word)
    if job is None and owner["job_id"] is None and not layout.RANK.all(folder):
        return State("not submitted", attempt, refused=owner.get("refused", ""))
    ran = (owner["job_id"] or layout.RANK.all(folder)) and not (word or "").startswith("CANCELLED")
    failure = accounting.cause_of_end(folder, word) if ran else None
    return State("failed", attempt, failure, job=job) if failure else State("interrupted", attempt, job=job)


def _has_ended(attempt: Path) -> bool:
    """Whether the batch script recorded that the ranks of an attempt ended without having been asked to stop."""
    try:
        return read_plain(layout.EXIT.of(attempt)).decode(errors="replace").strip() != str(int(Exit.REQUEUED))
    except (OSError, NotPlain):
        return False
