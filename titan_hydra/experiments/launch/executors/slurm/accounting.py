"""Find out from SLURM how an attempt ended: from its job's final state, and from what slurmd and srun wrote into
job.log.
"""

import re
import signal
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import KIND_OF, Exit, Kind
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import Failure, Outside, guilty

NODE_LOST, HOST_MEMORY = "SLURM lost a node of the job", "a host ran out of memory, and its kernel killed a rank"
VERDICTS = {  # for each final state of a job in SLURM: the failure's class, our exit status, and the message
    "NODE_FAIL": (Kind.NODE, Exit.UNHEALTHY, NODE_LOST),
    "BOOT_FAIL": (Kind.NODE, Exit.UNHEALTHY, "a node of the job did not boot"),
    "TIMEOUT": (Kind.TIME_LIMIT, Exit.REQUEUED, "the time limit was reached"),
    "DEADLINE": (Kind.TIME_LIMIT, Exit.REQUEUED, "the job's deadline was reached"),
    "CANCELLED": (Kind.KILLED, Exit.REQUEUED, "cancelled"),
    "OUT_OF_MEMORY": (Kind.OUT_OF_MEMORY, Exit.OUT_OF_MEMORY, HOST_MEMORY),
    "FAILED": (Kind.UNKNOWN, Exit.BUG, "SLURM reports FAILED, and no rank has recorded an error"),
}
WRITTEN = (  # what slurmd writes into job.log when it ends a job (a pattern), and the state that this means
    (r"JOB \d+ .*DUE TO TIME LIMIT", "TIMEOUT"),
    (r"DUE TO NODE FAILURE|error: Node failure on", "NODE_FAIL"),
    (r"oom_kill event|Out Of Memory", "OUT_OF_MEMORY"),
    (r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*", "CANCELLED"),
)
DEATH = re.compile(r"srun: error: (\S+?): tasks? ([\d,-]+): (.+)")
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


def cause_of_end(attempt: Path, state: str | None = None) -> Failure | None:
    """Return why an attempt ended. Besides what `guilty` uses, this uses SLURM's reports. `state` is SLURM's final
    state of the attempt's job; None if SLURM no longer lists the job.
    """
    last = _without_trace(attempt) if state == "FAILED" else None
    return guilty(attempt, Outside(_verdict(attempt, state), _seen_by_srun(attempt), last))


def _verdict(attempt: Path, state: str | None) -> Failure | None:
    """Return the failure according to SLURM's state of the job, or to the job's log. None if SLURM did not end the job,
    or if it preempted the job and will requeue it.
    """
    log = layout.last_lines(layout.JOB_LOG.of(attempt), 2000, 1 << 20)
    if layout.SPENT.of(attempt).exists():  # the batch script writes this file when no requeue is left
        line = "asked to stop again, and cluster.max_requeues is reached"
        return Failure(None, Exit.REQUEUED, line, kind=Kind.PREEMPTED, attempt=attempt)
    written = next((state for pattern, state in WRITTEN if re.search(pattern, log)), None)
    if state in (None, "FAILED", "COMPLETED"):  # for these states, the log may name a more exact cause
        state = written
    if state not in VERDICTS or state == "FAILED":
        return None
    kind, status, line = VERDICTS[state]
    return Failure(None, status, line, kind=kind, host=_host(state, log), attempt=attempt)


def _without_trace(attempt: Path) -> Failure:
    """Return the failure of a job that SLURM calls FAILED although no rank left a record. The failure contains the
    log's end. If the batch script owned the attempt and did not record its end, or if srun did not report the end of
    any rank, something has killed the script or srun on the job's first node.
    """
    kind, status, line = VERDICTS["FAILED"]
    owned_by_script, exit_file = layout.OWN_JOB.of(attempt).exists(), layout.EXIT.of(attempt)
    host = layout.RANK.read(attempt, 0).get("host")
    last = layout.last_lines(layout.JOB_LOG.of(attempt), 1)
    if last.endswith("nothing is started") and exit_file.exists():  # the script could not take a layout
        status = int(exit_file.read_text())
        kind, line = KIND_OF.get(status, Kind.UNKNOWN), last
    elif owned_by_script and not exit_file.exists():
        kind, status, line = Kind.NODE, Exit.UNHEALTHY, f"the batch script was killed, on {host or 'its first node'}"
    elif owned_by_script and exit_file.read_text().strip() == str(int(Exit.UNHEALTHY)):
        kind, status, line = Kind.NODE, Exit.UNHEALTHY, f"srun was killed, on {host or 'its first node'}"
    log = layout.JOB_LOG.of(attempt)
    existing_log = log if log.exists() else None
    return Failure(
        rank=None,
        status=status,
        line=line,
        detail=layout.last_lines(log),
        log=existing_log,
        kind=kind,
        host=host if kind == Kind.NODE else None,
        attempt=attempt,
    )


def _host(state: str, log: str) -> str | None:
    """Return the host that SLURM's lines in job.log name for this state; None if they name no host."""
    patterns = {
        "NODE_FAIL": r"STEP \S+ ON (\S+) CANCELLED AT \S+ DUE TO NODE FAILURE|Node failure on (\S+)",
        "OUT_OF_MEMORY": r"srun: error: (\S+?): tasks? [\d,-]+: Out Of Memory",
    }
    match = re.search(patterns[state], log) if state in patterns else None
    return next(filter(None, match.groups())) if match else None


def _seen_by_srun(attempt: Path) -> dict[int, dict[str, Any]]:
    """Return how ranks ended according to srun, in the form of ranks.json. srun gives no times, and its lines are not
    in order of time.

    srun reports neither ranks that ended with status 0 nor the ranks of a lost node. When srun ends ranks itself, it
    sends only SIGTERM and then SIGKILL; ranks record the time of the SIGTERM in their heartbeat files (`asked`). A rank
    without a heartbeat, or any rank in a hang, counts as killed by srun, unless srun's first line is about this rank.
    """
    died, records = deaths(attempt), layout.RANK.read_all(attempt)
    hung = any(record.get("exit_status") == Exit.HANG for record in records.values())
    seen = {}
    for rank, (status, host, order) in died.items():
        asked = layout.BEAT.read(attempt, rank).get("asked")
        killed = status in (-signal.SIGKILL, -signal.SIGTERM) and bool(asked or (order and (hung or asked is None)))
        seen[rank] = {"exit_status": status, "host": host, "ended": float("inf"), "killed": killed, "order": order}
    noticed = any((record.get("error") or {}).get("secondary") for record in records.values())
    hosts_of_ended = {record.get("host") for rank, record in records.items() if rank in died or "exit_status" in record}
    for rank, record in records.items() if died and noticed else ():
        if rank not in died and "exit_status" not in record:
            # SLURM reports a lost node only after its SlurmdTimeout, when the job has long ended
            lost = record.get("host") not in hosts_of_ended
            seen[rank] = {"exit_status": Exit.UNHEALTHY if lost else 0, "ended": float("inf")}
    return seen


def deaths(attempt: Path) -> dict[int, tuple[int, str, int]]:
    """Return how ranks ended according to srun: {rank: (exit status or -signal, host, number of srun's line)}, in the
    order of the lines.
    """
    by_rank: dict[int, tuple[int, str, int]] = {}
    for number, (host, tasks, how) in enumerate(
        DEATH.findall(layout.last_lines(layout.JOB_LOG.of(attempt), 2000, 1 << 20))
    ):
        status = _status(how)
        for rank in _numbers(tasks):
            by_rank.setdefault(rank, (status, host, number))
    return by_rank


def _status(how: str) -> int:
    if code := re.match(r"Exited with exit code (\d+)", how):
        return int(code[1])
    return next(
        (-number for signal_text, number in SIGNALS.items() if signal_text and how.startswith(signal_text)), Exit.BUG
    )


def _numbers(tasks: str) -> list[int]:
    """Return the numbers in a list that SLURM has abbreviated, such as 0-2,5."""
    ranges = [part.partition("-") for part in tasks.split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
