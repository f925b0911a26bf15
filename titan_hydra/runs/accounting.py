"""SLURM's report on an attempt: its state of a job that is over, and what it and srun wrote into the attempt's
slurm.log.
"""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.base.errors import Exit, Kind

from . import layout

NODE_LOST, HOST_MEMORY = "SLURM lost a node of the job", "a host ran out of memory, and its kernel killed a rank"
VERDICTS = {  # SLURM's state of a job that is over: class, our exit status, and the words for it
    "NODE_FAIL": (Kind.NODE, Exit.UNHEALTHY, NODE_LOST),
    "BOOT_FAIL": (Kind.NODE, Exit.UNHEALTHY, "a node of the job did not boot"),
    "TIMEOUT": (Kind.TIME_LIMIT, Exit.REQUEUED, "the time limit was over"),
    "DEADLINE": (Kind.TIME_LIMIT, Exit.REQUEUED, "the job's deadline was over"),
    "CANCELLED": (Kind.KILLED, Exit.REQUEUED, "cancelled"),
    "OUT_OF_MEMORY": (Kind.OUT_OF_MEMORY, Exit.OUT_OF_MEMORY, HOST_MEMORY),
    "FAILED": (Kind.UNKNOWN, Exit.BUG, "SLURM reports FAILED, and no rank has recorded an error"),
}
WRITTEN = (  # what slurmd writes when it ends a job; used once SLURM has forgotten the job's state
    (r"JOB \d+ .*DUE TO TIME LIMIT", "TIMEOUT"),
    (r"DUE TO NODE FAILURE|error: Node failure on", "NODE_FAIL"),
    (r"oom_kill event|Out Of Memory", "OUT_OF_MEMORY"),
    (r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*", "CANCELLED"),
)
DEATH = re.compile(r"srun: error: (\S+?): tasks? ([\d,-]+): (.+)")
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


@dataclass(frozen=True)
class SlurmVerdict:
    """The end of a job as SLURM reports it."""

    kind: Kind
    status: int
    line: str
    host: str | None = None
    detail: str = ""


def of(attempt: Path, state: str | None) -> SlurmVerdict | None:
    """Return SLURM's verdict from its state of the job and slurm.log; None if the job ended by itself, or was
    preempted.
    """
    log = layout.last_lines(layout.SLURM_LOG.of(attempt), 2000, 1 << 20)
    if layout.SPENT.of(attempt).exists():  # the batch script's mark
        return SlurmVerdict(Kind.PREEMPTED, Exit.REQUEUED, "asked to stop again, and cluster.max_requeues is reached")
    written = next((state for pattern, state in WRITTEN if re.search(pattern, log)), None)
    if state in (None, "FAILED", "COMPLETED"):  # the log may give a more exact cause
        state = written
    if state not in VERDICTS or state == "FAILED":
        return None
    return SlurmVerdict(*VERDICTS[state], _host(state, log))


def without_trace(attempt: Path) -> SlurmVerdict:
    """Return the verdict on a job that SLURM calls failed although no rank left a record: the end of its log."""
    return SlurmVerdict(*VERDICTS["FAILED"], detail=layout.last_lines(layout.SLURM_LOG.of(attempt)))


def _host(state: str, log: str) -> str | None:
    """Return the host that SLURM's message names as the cause."""
    patterns = {
        "NODE_FAIL": r"STEP \S+ ON (\S+) CANCELLED AT \S+ DUE TO NODE FAILURE|Node failure on (\S+)",
        "OUT_OF_MEMORY": r"srun: error: (\S+?): tasks? [\d,-]+: Out Of Memory",
    }
    found = re.search(patterns[state], log) if state in patterns else None
    return next(filter(None, found.groups())) if found else None


def deaths(attempt: Path) -> dict[int, tuple[int, str, int]]:
    """Return how ranks ended, as srun reported it, in the order of its lines: {rank: (exit status, or -signal; host;
    line)}.
    """
    found: dict[int, tuple[int, str, int]] = {}
    for number, (host, tasks, how) in enumerate(DEATH.findall(layout.last_lines(layout.SLURM_LOG.of(attempt), 2000, 1 << 20))):
        status = _status(how)
        for rank in _numbers(tasks):
            found.setdefault(rank, (status, host, number))
    return found


def _status(how: str) -> int:
    if code := re.match(r"Exited with exit code (\d+)", how):
        return int(code[1])
    return next((-number for words, number in SIGNALS.items() if words and how.startswith(words)), Exit.BUG)


def _numbers(tasks: str) -> list[int]:
    """Expand SLURM's short form of numbers: 0-2,5."""
    ranges = [part.partition("-") for part in tasks.split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
