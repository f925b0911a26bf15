"""The lines of a search's journal, each with a checksum over itself and all lines before it, and the lock of the folder.

Optuna replays the lines: one digit of a line decides which trial wins, so that a changed or a lost line must be seen.
Lines that Optuna's own file has written, without a checksum, are read too, if no line before them has one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.plain import MOST_ROWS, NotPlain, read_plain
from titan_hydra.core.job.config.files import read_json
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import alive, this_process
from titan_hydra.experiments.runs.rundir import SILENCE, file_time

if TYPE_CHECKING:
    from titan_hydra.experiments.report.table import Section

CHECK = "crc32"
# what `flock` reports on file systems without locks: Lustre mounted without -o flock, NFS without a lock daemon
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
BEAT = 20.0  # seconds between two signs of life of a driver that holds a lease


class JournalDamaged(ConfigError):
    """A journal that was changed by something else than its driver."""


class JournalFile:
    """The file of a journal, in the form of Optuna's journal backends."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the lines from a number on. Raises JournalDamaged."""
        try:
            logs, _, reason = intact_lines(self.content())
        except NotPlain as error:
            raise JournalDamaged(str(error)) from error
        if reason:
            raise JournalDamaged(f"{self.file}: {reason}")
        yield from logs[log_number_from:]

    def content(self) -> bytes:
        """Return the content; empty if there is no file yet. Raises NotPlain."""
        try:
            return read_plain(self.file, MOST_ROWS)
        except FileNotFoundError:
            return b""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines to the end of the file, durably."""
        _, sum_before, _ = intact_lines(self.content())
        with self.file.open("ab") as file:
            for log in logs:
                sum_before = zlib.crc32(_bytes(log), sum_before)
                file.write(_bytes({**log, CHECK: f"{sum_before:08x}"}) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def intact_lines(content: bytes) -> tuple[list[dict[str, Any]], int, str]:
    """Return the intact lines of a journal before the first damaged one, the checksum of the last of them, and what is
    wrong with the damaged one ("": nothing). A last line without its end is left out: it is being written.
    """
    logs: list[dict[str, Any]] = []
    total, seen = 0, False
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            log = json.loads(line)
            recorded = log.pop(CHECK, None)
        except (ValueError, RecursionError, AttributeError, TypeError):
            return logs, total, f"line {number} is not a JSON object"
        checksum = zlib.crc32(_bytes(log), total)
        if recorded != f"{checksum:08x}" and (seen or recorded is not None):
            return logs, total, f"line {number} or a line before it was changed, or is lost"
        total, seen = checksum, recorded is not None
        logs.append(log)
    return logs, total, ""


def set_aside(file: Path, whole: bool) -> str:
    """Keep a damaged journal as optuna.journal.damaged, and begin it anew with its intact lines or, if `whole`, with none.
    Return the name of the file that was kept.
    """
    try:
        logs = [] if whole else intact_lines(JournalFile(file).content())[0]
    except NotPlain:
        logs = []
    names = (f"{file.name}.damaged{number or ''}" for number in itertools.count())
    new_name = next(name for name in names if not file.with_name(name).exists())
    file.replace(file.with_name(new_name))
    if logs:
        JournalFile(file).append_logs(logs)
    return new_name


def _bytes(log: dict[str, Any]) -> bytes:
    return json.dumps(log, separators=(",", ":")).encode()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder of a search while the block runs. The lock ends with this process, however it ends. Raises
    ConfigError if another driver holds it.
    """
    with layout.DRIVER.of(folder).open("a+") as file:
        lease: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"{folder.name}: another process drives this search already ({file.read().strip()})"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            lease = leased(layout.LEASE.of(folder))
        with lease:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            whole_lines(layout.JOURNAL.of(folder))
            yield


@contextlib.contextmanager
def leased(file: Path) -> Iterator[None]:
    """Hold a file that only one process can create, where the file system has no locks. The file of a process that has
    ended, or on another host has given no sign of life for SILENCE seconds, is removed. Raises ConfigError.
    """
    mine = file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}")
    mine.write_text(json.dumps(this_process()), encoding="utf-8")
    try:
        while True:
            try:
                os.link(mine, file)
                break
            except FileExistsError:
                _remove_stale(file)
        over = threading.Event()
        beat = threading.Thread(target=_beat, args=(file, over), daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()
            file.unlink(missing_ok=True)
    finally:
        mine.unlink(missing_ok=True)


def _remove_stale(file: Path) -> None:
    """Remove the lease of a driver that has ended. Raises ConfigError if the driver lives."""
    with contextlib.suppress(FileNotFoundError):
        owner, before = read_json(file) or {}, file.stat()
        here = owner.get("host") == this_process()["host"]
        silent = file_time(file.parent) - before.st_mtime > SILENCE
        if alive(owner) or (not here and not silent):
            who = f"process {owner.get('pid')} on {owner.get('host')}"
            raise ConfigError(f"{file.parent.name}: another process drives this search already ({who})")
        # two drivers may do this at once: only the one whose rename moves this very file may go on
        grave = file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}.old")
        file.rename(grave)
        if grave.stat().st_ino != before.st_ino:
            with contextlib.suppress(FileExistsError):
                os.link(grave, file)
        grave.unlink()


def _beat(file: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(file)


def whole_lines(file: Path) -> None:
    """Remove a last line that a full disk or a power cut has left incomplete."""
    with contextlib.suppress(FileNotFoundError):
        content = file.read_bytes()
        if content and not content.endswith(b"\n"):
            with file.open("r+b") as journal:
                journal.truncate(content.rfind(b"\n") + 1)


def section_of_report(manifest: Path) -> Section | None:
    """Return what `titan report` prints of a search below its table; None if the sweep is no search, or if its journal
    is damaged or lost, which is printed as a warning.
    """
    cells = layout.SWEEP.read(manifest).get("cells", [])
    if not layout.JOURNAL.of(manifest).is_file() and not any("trial" in cell for cell in cells):
        return None
    from .summary import section_of

    try:
        return section_of(manifest)
    except JournalDamaged as error:
        words = "the search's table is left out; the command line of the search makes the journal again from its runs"
        print(f"warning: {error}; {words}", file=sys.stderr)
        return None
