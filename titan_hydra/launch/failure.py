"""What went wrong: a rank's exception as a record, and from the records of all ranks the one that is to blame."""
from __future__ import annotations

import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.config.status import Exit, RunError

from .records import last_lines, read_json

LAST_WORDS = "--- this rank ends with exit status"  # the worker's line before a traceback; from there on, a log is not echoed
STOPPED = (Exit.REQUEUED, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)  # asked to end, not failed
OUT_OF_MEMORY = r"not enough memory|DefaultCPUAllocator|CUDA out of memory|ALLOC_FAILED"
TIMED_OUT = r"tim(ed|e)[ -]?out|collective operation timeout"
# What a rank says when another one has died; the other one is to blame. The spellings are gloo's, NCCL's and TCPStore's.
SECONDARY = (r"[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|[Ss]ocket closed|recvValue failed|sendBytes failed|"
             r"remote process exited|communicator was aborted|ncclRemoteError|gloo/transport|failed to recv|unbound_buffer")
DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class Failure:
    """How an attempt failed: the guilty rank, its exit status, one line for lists, and what it left (traceback or end of its log)."""

    rank: int | None
    status: int
    line: str
    detail: str = ""
    log: Path | None = None


def describe(error: BaseException) -> tuple[int, dict]:
    """Exit status of an exception, and the record of it that goes into rank_<r>.json."""
    chain = _chain(error)
    record = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "" if isinstance(error, RunError) else "".join(traceback.format_exception(error)),
        "time": time.time(),
        "secondary": any(_is_secondary(link) for link in chain),
    }
    return _status(error, chain), record


def _status(error: BaseException, chain: list[BaseException]) -> int:
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
    if any(_is_distributed(link) and re.search(TIMED_OUT, str(link), re.I) for link in chain):
        return Exit.HANG
    return Exit.BUG


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and those that it was raised from or during: pipeline stages and the compiler wrap what happened in their own."""
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < 16:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _is_distributed(error: BaseException) -> bool:
    return type(error).__name__ in DISTRIBUTED or type(error) is RuntimeError


def _is_secondary(error: BaseException) -> bool:
    """Whether an exception only says that something is wrong with another rank."""
    if type(error).__name__ in DISTRIBUTED or isinstance(error, ConnectionError):
        return True
    return type(error) is RuntimeError and bool(re.search(SECONDARY, str(error)) or re.search(f"(?i:{TIMED_OUT})", str(error)))


def guilty(attempt: Path) -> Failure | None:
    """Who ended an attempt that is over; None if nobody did: all ranks ended well, were asked to stop, or left no trace (power cut).

    The earliest error of a rank's own, or the earliest rank that died without a word. Errors that only say that another rank is gone
    count when there is nothing else: then a time-out comes first, and the ranks that did not even notice it are named.
    """
    supervised = (read_json(attempt / "ranks.json") or {}).get("ranks", [])
    size = max(len(supervised), 1 + max((int(file.stem.split("_")[1]) for file in attempt.glob("rank_*.json")), default=-1))
    ranks = [Ended.read(attempt, rank, supervised[rank] if rank < len(supervised) else {}) for rank in range(size)]
    own = [rank for rank in ranks if (rank.error and not rank.error["secondary"]) or rank.silent]
    others = [rank for rank in ranks if rank.error and rank.error["secondary"]]
    if own:
        return min(own, key=lambda rank: rank.time).failure(attempt)
    if not others:
        log = attempt / "submitit" / "parent.log"
        text = last_lines(log)
        return Failure(None, Exit.BUG, "the ranks' parent process failed", text, log) if "Traceback" in text else None
    first = min(others, key=lambda rank: (rank.status != Exit.HANG, rank.time))
    missing = [str(rank.rank) for rank in ranks if rank.killed]
    note = f"; rank {', '.join(missing)} had not noticed: see the end of its log" if first.status == Exit.HANG and missing else ""
    return first.failure(attempt, note)


@dataclass(frozen=True)
class Ended:
    """How one rank ended, as far as it said so itself (rank_<r>.json) and as far as its parent saw it (ranks.json)."""

    rank: int
    status: int | None  # negative: the signal
    error: dict | None
    time: float
    killed: bool  # by its parent, after another rank had failed
    spoke: bool  # wrote its own exit status

    @classmethod
    def read(cls, attempt: Path, rank: int, seen: dict) -> Ended:
        said = read_json(attempt / f"rank_{rank}.json") or {}
        error = said.get("error")
        if said.get("exit_status") in STOPPED:
            error = None
        status = said.get("exit_status", seen.get("exit_status"))
        return cls(rank, status, error, error["time"] if error else seen.get("ended", 0.0), bool(seen.get("killed")), "exit_status" in said)

    @property
    def silent(self) -> bool:
        return not self.spoke and not self.killed and self.status is not None and self.status not in STOPPED

    def failure(self, attempt: Path, note: str = "") -> Failure:
        """This rank as the one to blame."""
        log = attempt / f"rank_{self.rank}.log"
        if not log.exists():  # it died before it could open its log: an import error, a wrong interpreter
            log = max(attempt.glob(f"submitit/*_{self.rank}_log.err"), key=lambda file: file.stat().st_size, default=log)
        text = last_lines(log)
        if self.error:
            if not self.error["traceback"]:
                return Failure(self.rank, self.status, f"rank {self.rank}: {self.error['message']}{note}")
            line = f"rank {self.rank}: {self.error['type']}: {_first_line(self.error['message'])}{note}"
            return Failure(self.rank, self.status, line, "\n".join(self.error["traceback"].rstrip().splitlines()[-30:]), log)
        if self.status < 0:
            hint = " (somebody's, or the kernel's when the machine ran out of memory)" if self.status == -signal.SIGKILL else ""
            line = f"rank {self.rank} was killed by signal {-self.status}{hint}"
        else:
            line = f"rank {self.rank} ended with status {self.status} and without a word"
        status = Exit.BUG
        if self.status == -signal.SIGABRT and re.search("collective operation timeout", text):
            status, line = Exit.HANG, f"rank {self.rank}: NCCL's watchdog ended it: a collective timed out"
        return Failure(self.rank, status, line + note, text, log)


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else ""
