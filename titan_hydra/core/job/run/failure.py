"""Determine why an attempt failed. `describe` turns a rank's exception into a record. `guilty` finds the rank that
failed and the cause, from the records of all ranks and from what their executor knows.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import KIND_OF, Exit, Kind, RunError

from . import hang, layout

# exit statuses of a rank that ended because it was asked to; they are no failures
STOPPED = (Exit.REQUEUED, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
OUT_OF_MEMORY = r"not enough memory|DefaultCPUAllocator|CUDA out of memory|ALLOC_FAILED"
DISK_FULL = r"No space left on device|Disk quota exceeded"
TIMED_OUT = r"tim(ed|e)[ -]?out|collective operation timeout"
# Error messages of gloo, NCCL and TCPStore on a rank that has lost its connection to another rank; the other rank is
# guilty.
SECONDARY = (
    r"[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|[Ss]ocket closed|recvValue failed|sendBytes failed|"
    r"remote process exited|communicator was aborted|ncclRemoteError|gloo/transport|failed to recv|unbound_buffer"
)
DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class Failure:
    """How an attempt failed. `rank` is the guilty rank, the one that caused the failure. `line` is a summary for lists;
    `detail` is the traceback, or the end of the rank's log. `host` is the rank's host, or the job's nodes.
    """

    rank: int | None
    status: int
    line: str
    detail: str = ""
    log: Path | None = None
    kind: Kind = Kind.UNKNOWN
    host: str | None = None
    attempt: Path | None = None


@dataclass(frozen=True)
class Outside:
    """What only the executor knows about the end of an attempt: why the executor ended the job (`cause`), how ranks
    ended (in the form of ranks.json), and which failure to report if no rank left a record (`otherwise`).
    """

    cause: Failure | None = None
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    otherwise: Failure | None = None


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the exit status of an exception, and its record for rank_<r>.json."""
    chain = _chain(error)
    record = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "" if isinstance(error, RunError) else "".join(traceback.format_exception(error)),
        "time": time.time(),
        "secondary": any(_is_secondary(link) for link in chain),
        # facts such as the step, the phase and the host, which watchdog.py and health.py of core/train/observe have
        # added to the exception
        **next((link.facts for link in chain if hasattr(link, "facts")), {}),
    }
    return _status(error, chain), record


def _status(error: BaseException, chain: list[BaseException]) -> int:
    """Return the exit status for the class of an error: that of a RunError, of memory, of a collective's time-out, or
    of a bug.
    """
    if isinstance(error, RunError):
        return int(error.status)
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        return code if code in set(Exit) else Exit.BUG
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    for link in chain:
        if type(link).__name__ == "OutOfMemoryError" or isinstance(link, MemoryError):
            return Exit.OUT_OF_MEMORY
        if isinstance(link, RuntimeError) and re.search(OUT_OF_MEMORY, str(link)):
            return Exit.OUT_OF_MEMORY
    distributed = [link for link in chain if type(link).__name__ in DISTRIBUTED or type(link) is RuntimeError]
    if any(re.search(TIMED_OUT, str(link), re.I) for link in distributed):
        return Exit.HANG
    return Exit.BUG


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and the exceptions that caused it. This is needed because pipeline stages and the compiler
    wrap a rank's exception in one of their own types.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < 16:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _is_secondary(error: BaseException) -> bool:
    """Whether an exception only reports that another rank has failed."""
    if type(error).__name__ in DISTRIBUTED or isinstance(error, ConnectionError):
        return True
    return type(error) is RuntimeError and bool(
        re.search(SECONDARY, str(error)) or re.search(f"(?i:{TIMED_OUT})", str(error))
    )


def guilty(attempt: Path, outside: Outside | None = None) -> Failure | None:
    """Return why a finished attempt failed; None if all ranks ended well, were asked to stop, or left no record (as
    after a power cut).

    The cause is the earliest error that began in a rank itself, or the earliest death of a rank without a record. If no
    rank recorded an error of its own, a cause that the executor knows (`outside`) comes first. Errors that only report
    the loss of another rank are considered last. Among these, a time-out comes first, and the guilty rank is the one
    for which all others waited.
    """
    outside = outside or Outside()
    ranks = Ended.all(attempt, outside.ranks)
    with_error = [rank for rank in ranks if rank.error and not rank.error["secondary"]]
    silent = [rank for rank in ranks if rank.silent]
    if outside.cause and not with_error:
        return outside.cause
    if with_error or silent:
        # At equal times, a rank that aborted comes last, as NCCL's watchdog aborts a rank when another rank has exited.
        return min(
            with_error + silent, key=lambda rank: (rank.time, rank.status == -signal.SIGABRT, rank.order)
        ).failure()
    others = [rank for rank in ranks if rank.error]
    if not others:
        return _without_ranks(attempt) or outside.otherwise
    first = min(others, key=lambda rank: (rank.status != Exit.HANG, rank.time))
    return first.failure() if first.status != Exit.HANG else _hang(attempt, ranks, first)


def _hang(attempt: Path, ranks: list[Ended], first: Ended) -> Failure:
    """Return the failure of a time-out. The message comes from `first`, the rank that noticed the time-out first; the
    guilty rank is the rank that had made the least progress.
    """
    failure = first.failure()
    if (said := hang.verdict(attempt)) and said.rank is not None:
        return replace(failure, rank=said.rank, line=said.line, host=said.host, detail=said.text)
    beats = {rank.rank: beat for rank in ranks if (beat := layout.BEAT.read(attempt, rank.rank))}
    behind = min((beat["count"] for beat in beats.values()), default=0)
    late = [rank for rank, beat in beats.items() if beat["count"] == behind]
    if len(late) == 1 and len(beats) > 1:
        beat, line = beats[late[0]], failure.line.removeprefix(f"rank {late[0]}: ")
        line = f"rank {late[0]} was late: in step {beat['step']}, {beat['phase']}; {line}"
        return replace(failure, rank=late[0], line=line, host=ranks[late[0]].host)
    missing = ", ".join(str(rank.rank) for rank in ranks if rank.killed)
    return (
        replace(failure, line=f"{failure.line}; rank {missing} was still waiting: see the end of its log")
        if missing
        else failure
    )


def _without_ranks(attempt: Path) -> Failure | None:
    """Return the failure of the ranks' parent process; None if this process has left no traceback."""
    log = layout.PARENT_LOG.of(attempt)
    if "Traceback" in (text := layout.last_lines(log)):
        return Failure(
            rank=None,
            status=Exit.BUG,
            line="the ranks' parent process failed",
            detail=text,
            log=log,
            kind=Kind.BUG,
            attempt=attempt,
        )
    return None


@dataclass(frozen=True)
class Ended:
    """How one rank ended, according to its own record (rank_<r>.json) and to that of its parent process (ranks.json) or
    of its executor.
    """

    attempt: Path
    rank: int
    status: int | None  # negative: the signal
    error: dict[str, Any] | None
    time: float
    killed: bool  # whether the parent process or the executor ended this rank after another rank had failed
    order: int  # position of this rank among the executor's lines about ended ranks
    spoke: bool  # whether the rank has recorded its own exit status
    host: str | None

    @classmethod
    def all(cls, attempt: Path, known: dict[int, dict[str, Any]]) -> list[Ended]:
        """Return all ranks of an attempt. A rank without any record was still starting."""
        records = layout.RANK.read_all(attempt)
        seen = dict(enumerate(layout.RANKS.read(attempt).get("ranks", []))) or known
        return [
            cls.of(attempt, rank, records.get(rank, {}), seen.get(rank, {}))
            for rank in range(1 + max([*seen, *records], default=-1))
        ]

    @classmethod
    def of(cls, attempt: Path, rank: int, recorded: dict[str, Any], seen: dict[str, Any]) -> Ended:
        """Combine what the rank recorded with what its parent or executor has `seen`; where both know something, the
        rank's own record counts.
        """
        error = recorded.get("error")
        if recorded.get("exit_status") in STOPPED:
            error = None
        status = recorded.get("exit_status", seen.get("exit_status"))
        time, host = (
            error["time"] if error else seen.get("ended", 0.0),
            (error or {}).get("host") or recorded.get("host") or seen.get("host"),
        )
        return cls(
            attempt,
            rank,
            status,
            error,
            time,
            bool(seen.get("killed")),
            seen.get("order", 0),
            "exit_status" in recorded,
            host,
        )

    @property
    def silent(self) -> bool:
        return not self.spoke and not self.killed and self.status is not None and self.status not in STOPPED

    def failure(self) -> Failure:
        """Return the failure of the attempt, with this rank as the guilty rank."""
        status, line, detail, log = self._recorded() if self.error else self._without_record()
        kind = Kind.KILLED if status == Exit.BUG and self.status == -signal.SIGKILL else KIND_OF.get(status, Kind.BUG)
        if kind == Kind.BUG and re.search(DISK_FULL, f"{line}\n{detail}\n{(self.error or {}).get('traceback', '')}"):
            kind = Kind.DISK
        return Failure(
            rank=self.rank,
            status=status,
            line=line,
            detail=detail,
            log=log,
            kind=kind,
            host=self.host,
            attempt=self.attempt,
        )

    def _recorded(self) -> tuple[int, str, str, Path | None]:
        """Return the status, line, detail and log of the failure of a rank that recorded its error."""
        message, trace = self.error["message"], self.error["traceback"]
        if self.status == Exit.OUT_OF_MEMORY and "step" in self.error:
            return self.status, _out_of_memory(self.rank, self.error), _tail(trace), self.log
        if not trace:
            return self.status, f"rank {self.rank}: {message}", "", None
        return self.status, f"rank {self.rank}: {self.error['type']}: {_first_line(message)}", _tail(trace), self.log

    def _without_record(self) -> tuple[int, str, str, Path]:
        """Return the status, line, detail and log of the failure of a rank that ended without recording an error."""
        text = layout.last_lines(self.log, 200)
        if self.status == -signal.SIGABRT and re.search("collective operation timeout", text):
            return Exit.HANG, f"rank {self.rank}: NCCL's watchdog ended it: a collective timed out", text, self.log
        if self.status == Exit.BUG and re.search(r"^Timeout \(\d", text, re.M):
            return Exit.HANG, f"rank {self.rank} was stuck, and its watchdog ended it", text, self.log
        if self.status < 0:
            who = (
                " (somebody's, or the kernel's when the machine ran out of memory)"
                if self.status == -signal.SIGKILL
                else ""
            )
            return Exit.BUG, f"rank {self.rank} was killed by signal {-self.status}{who}", text, self.log
        if self.status == Exit.UNHEALTHY:
            return (
                Exit.UNHEALTHY,
                f"{self.host} is lost: rank {self.rank} has not ended, and nothing was heard of it",
                text,
                self.log,
            )
        status = self.status if self.status in KIND_OF else Exit.BUG
        return status, f"rank {self.rank} ended with status {self.status} and without a word", text, self.log

    @property
    def log(self) -> Path:
        """The rank's log. For a rank that died before it opened its log (by an import error), the job's log."""
        log = layout.LOG.of(self.attempt, self.rank)
        return log if log.exists() else layout.JOB_LOG.of(self.attempt)


def _out_of_memory(rank: int, error: dict[str, Any]) -> str:
    """Return one line: the rank that ran out of memory, the step and, if known, its peak and the device's capacity."""
    where = f"rank {rank}, step {error['step']}:"
    if error.keys() >= {"peak_gib", "capacity_gib"}:
        return f"{where} peak {error['peak_gib']:.1f} of {error['capacity_gib']:.1f} GiB"
    return f"{where} {error['type']}: {_first_line(error['message'])}"  # on a CPU


def _tail(trace: str) -> str:
    return "\n".join(trace.rstrip().splitlines()[-30:])


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else ""
