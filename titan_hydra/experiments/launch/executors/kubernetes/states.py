"""Determine the state of a run whose newest attempt was submitted as a Job, from the run's files and from kubectl."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import KIND_OF, Exit, Kind
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import Failure, Outside, guilty
from titan_hydra.experiments.launch.executors.queued import being_submitted
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner
from titan_hydra.experiments.runs.rundir import State

from .kubectl import KubernetesJob, KubernetesQueue
from .manifest import AGAIN

KILLED = 137  # the status of a container that was ended by SIGKILL


def state_of_run(directory: Path, attempt: int, owner: Owner, queue: KubernetesQueue) -> State:
    """Read the state of a run. `owner` is the content of the attempt's attempt.json."""
    folder = layout.ATTEMPT.of(directory, attempt)
    if layout.RESULT.read(directory).get("status") == "done":
        return State("done", attempt)
    job: KubernetesJob | None = queue.jobs.get(owner["job_id"] or owner["token"])
    # if the submitter died before it recorded the Job's name, record it now
    if job and owner["job_id"] is None and not being_submitted(owner):
        with contextlib.suppress(OSError):
            owner = rundir.note(folder, job_id=job.id)
    if job and job.state == "Ending" and is_over(folder):
        job = None
    if job and not job.over:
        listed = layout.NODES.read(folder).get("names")
        return State(
            "running" if listed and not is_over(folder) else "queued", attempt, host=job.nodes or None, job=job
        )
    if job is None and "ended" not in owner:
        heard = owner["job_id"] and rundir.ranks_seem_to_run(folder) and not is_over(folder)
        if cluster := queue.elsewhere.get(owner["token"]):
            return State("running" if heard else "unknown", attempt, host=f"cluster {cluster}")
        if why := queue.silent.get(owner["token"]):
            return State("running" if heard else "unknown", attempt, refused="" if heard else why)
        if heard:  # whatever the listing lacks, its ranks write
            return State("running", attempt)
        if owner["token"] not in queue.asked or (owner["job_id"] is None and being_submitted(owner)):
            return State("queued", attempt)
    if "ended" not in owner:  # record the end now, as an ended Job is deleted after some days
        with contextlib.suppress(OSError):
            owner = rundir.note(folder, ended=time.time(), end=end_of(job) if job else {})
    return ended_state(folder, attempt, owner, job)


def ended_state(folder: Path, attempt: int, owner: Owner, job: KubernetesJob | None) -> State:
    """Return the state of an attempt whose Job has ended or is gone."""
    if owner["job_id"] is None and job is None and not layout.RANK.all(folder):
        return State("not submitted", attempt, refused=owner.get("refused", ""))
    end = owner.get("end") or (end_of(job) if job else {})
    cancelled = layout.CANCELLED.of(folder).exists()
    if failure := None if cancelled else cause(folder, end):
        return State("failed", attempt, failure, job=job)
    gone = "" if end or cancelled else "its Job was deleted, and not by titan stop"
    return State("interrupted", attempt, job=job, refused=gone)


def is_over(attempt: Path) -> bool:
    """Whether the ranks of all pods of an attempt have ended. The Job itself may go on, and start its pods again."""
    nodes = layout.NODE.read_all(attempt).values()
    return bool(nodes) and all("exit_status" in node for node in nodes)


def end_of(job: KubernetesJob) -> dict[str, Any]:
    """Return what is recorded about a Job's end: the Job's reason, and each pod that failed."""
    pods = [asdict(pod) for pod in job.pods if pod.phase == "Failed"]
    return {"state": job.state, "reason": job.reason, "message": job.message, "pods": pods}


def cause(attempt: Path, end: dict[str, Any]) -> Failure | None:
    """Return why an attempt failed: from the records of its ranks and pods, and from the recorded end of its Job."""
    ranks = {
        int(number): {**how, "host": node.get("node")}
        for node in layout.NODE.read_all(attempt).values()
        for number, how in node.get("ranks", {}).items()
    }
    failed = end.get("state") == "Failed"
    return guilty(
        attempt,
        Outside(cause_outside(attempt, end) if failed else None, ranks, otherwise(attempt, end) if failed else None),
    )


def cause_outside(attempt: Path, end: dict[str, Any]) -> Failure | None:
    """Return the failure that follows from the Job's own reason or from a pod's end; None if only the ranks know it."""
    if layout.SPENT.of(attempt).exists():
        line = "asked to stop or lost again, and cluster.max_requeues is reached"
        return Failure(None, Exit.REQUEUED, line, kind=Kind.PREEMPTED, attempt=attempt)
    if end["reason"] == "DeadlineExceeded":
        return Failure(None, Exit.REQUEUED, "the time limit was reached", kind=Kind.TIME_LIMIT, attempt=attempt)
    for pod in end["pods"]:
        about = {"detail": pod["message"], "host": pod["node"] or None, "attempt": attempt}
        if pod["disrupted"]:
            continue
        if pod["reason"] == "OOMKilled":
            line = f"pod {pod['name']} used more than its memory, and its kernel killed it (cluster.memory)"
            return Failure(None, Exit.OUT_OF_MEMORY, line, kind=Kind.OUT_OF_MEMORY, **about)
        if pod["exit_status"] == KILLED:
            return Failure(None, Exit.BUG, f"pod {pod['name']} was killed by signal 9", kind=Kind.KILLED, **about)
        if pod["exit_status"] == Exit.UNHEALTHY and not layout.RANK.all(attempt):
            return Failure(None, Exit.UNHEALTHY, last_line(pod["message"]), kind=Kind.NODE, **about)
    return None


def otherwise(attempt: Path, end: dict[str, Any]) -> Failure:
    """Return the failure of a Job of which no rank has left a record: the failure of its first pod or, without one, the
    reason that the Job gives.
    """
    pods = [pod for pod in end["pods"] if not pod["disrupted"] and pod["exit_status"] not in AGAIN]
    if not pods:
        line = f"the Job failed: {end['reason']}: {end['message']}"
        return Failure(None, Exit.BUG, line, kind=Kind.UNKNOWN, attempt=attempt)
    pod = pods[0]
    status = pod["exit_status"] if pod["exit_status"] in KIND_OF else Exit.BUG
    how = f"ended with status {pod['exit_status']}" if pod["exit_status"] is not None else f"failed ({pod['reason']})"
    line = f"pod {pod['name']} {how}: {last_line(pod['message']) or 'without a word'}"
    kind = KIND_OF.get(status, Kind.UNKNOWN if pod["exit_status"] is not None else Kind.NODE)
    return Failure(None, status, line, pod["message"], kind=kind, host=pod["node"] or None, attempt=attempt)


def last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""
