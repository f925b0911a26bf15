"""Watch a running attempt from a terminal: print rank 0's log lines and a progress line, and handle Ctrl-C.

The first Ctrl-C (or SIGTERM to launch.py) asks every rank to save and stop. A second Ctrl-C kills the ranks. They are
also killed if they take longer than STOP_LIMIT to stop. The run does not depend on this process: a new launch.py can
attach to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from titan_hydra.core.base.errors import LAST_WORDS
from titan_hydra.core.base.plain import NotPlain, open_plain
from titan_hydra.core.base.text import printable
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.records import alive
from titan_hydra.experiments.runs import rundir

# seconds that the ranks may take to stop after a request; the limit does not apply while a checkpoint is being written
STOP_LIMIT = 30
POLL = 0.1  # seconds between two reads of the attempt's files
BACKLOG = 4096  # number of bytes that are shown of an existing log, from its end


class Interrupts:
    """Counts Ctrl-C and SIGTERM signals, so that they do not end this process."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[Interrupts]:
        """Count signals while the block runs, then restore the previous handlers."""
        before = {
            number: signal.signal(number, lambda got, frame: self.received.append(got))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status that a shell reports for a program ended by the first received signal: 128 + its number."""
        return 128 + self.received[0]


def attach(
    directory: Path,
    attempt: Path,
    steps: int,
    interrupts: Interrupts,
    parent: subprocess.Popen[Any] | None = None,
    label: str = "",
) -> None:
    """Watch until all ranks of the attempt have ended.

    `parent` is the ranks' parent process if this launcher started it; `label` is printed before the progress, for
    example "cell 2 of 8".
    """
    asked = killed = None
    with contextlib.ExitStack() as stack:
        show: _Lines = stack.enter_context(
            _terminal(steps, label) if sys.stdout.isatty() else contextlib.nullcontext(_Lines())
        )
        echo = Echo(layout.LOG.of(attempt), show.line)
        while _running(attempt, parent):
            echo.more()
            show.progress(directory, attempt)
            now = time.monotonic()
            # `titan cancel` cannot signal ranks that have not started, so it relies on its mark in the attempt
            wanted = interrupts.received or layout.CANCELLED.of(attempt).exists()
            if wanted and asked is None and (ranks := stop(attempt, parent)):
                asked = now
                show.line(f"asking {ranks} to save and stop at the end of this step; Ctrl-C again kills")
            too_long = asked is not None and now - asked > STOP_LIMIT and not saving(directory)
            if len(interrupts.received) > 1 or too_long:
                if killed is None:
                    killed = now
                    show.line("killing all ranks" + (f": they did not stop within {STOP_LIMIT} s" if too_long else ""))
                kill(
                    attempt, parent
                )  # again and again, as ranks of another launcher's attempt may not have started yet
            time.sleep(POLL)
        echo.more()
    kill(attempt, parent)  # if the parent itself was killed, some of its processes may remain; this call ends them


def _running(attempt: Path, parent: subprocess.Popen[Any] | None) -> bool:
    """Whether the ranks' parent process is alive or, if `parent` is None, whether any rank is alive. A parent that is a
    child of this process must be polled, or it remains a zombie.
    """
    if parent is not None:
        return parent.poll() is None
    return rundir.host_of_running(attempt) is not None


def stop(attempt: Path, parent: subprocess.Popen[Any] | None = None) -> str:
    """Send SIGTERM to every rank, through the ranks' parent process if there is one. Return which ranks got the signal,
    such as "all 8 ranks"; "" if another launcher has not started any rank yet, so that there is nothing to signal.
    """
    owner = layout.RANKS.read(attempt)
    ranks = rundir.running_ranks(attempt)
    if alive(owner):
        os.kill(owner["pid"], signal.SIGTERM)
    elif ranks:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank["pid"], signal.SIGTERM)
    elif parent is None:
        return ""
    else:  # the parent has not started any rank yet
        kill(attempt, parent)
    count = len(owner.get("ranks", ranks))
    return f"all {count} ranks" if count > 1 else "the rank"


def saving(directory: Path) -> bool:
    """Whether the ranks of any replica group are writing a checkpoint."""
    homes = (directory, *layout.REPLICA.all(directory).values())
    return any(any(layout.CHECKPOINTS.of(home).glob(f"*{checkpoints.WRITING}")) for home in homes)


def kill(attempt: Path, parent: subprocess.Popen[Any] | None = None) -> None:
    """Send SIGKILL to the parent's process group (the ranks and their helpers), and to ranks outside that group."""
    owner = layout.RANKS.read(attempt)
    group = parent.pid if parent is not None else owner["pid"] if alive(owner) else None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group is not None:
            os.killpg(group, signal.SIGKILL)
    for rank in rundir.running_ranks(attempt):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank["pid"], signal.SIGKILL)


class Echo:
    """Prints new lines of rank 0's log. The traceback at the end of this log is left out, as the launcher later prints
    the traceback of the rank that failed first.

    If the run was started earlier and its log is already long, only the end of the log is printed.
    """

    def __init__(self, path: Path, line: Callable[[str], None]) -> None:
        self.path, self.line = path, line
        self.file: BinaryIO | None = None
        self.rest, self.over = b"", False

    def more(self) -> None:
        """Print the lines that were completed since the last call."""
        if self.file is None:
            try:
                self.file = open_plain(self.path)
            except (OSError, NotPlain):
                return
            if os.fstat(self.file.fileno()).st_size > BACKLOG:
                self.file.seek(-BACKLOG, os.SEEK_END)
                self.file.readline()
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        for line in lines:
            self.over = self.over or line.startswith(LAST_WORDS.encode())
            if not self.over:
                self.line(printable(line.decode(errors="replace")))


class _Lines:
    """Prints plain lines and no progress; this is used without a terminal (a pipe, a CI log)."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, directory: Path, attempt: Path) -> None:
        pass


@contextlib.contextmanager
def _terminal(steps: int, label: str) -> Iterator[_Terminal]:
    """Show a progress line below the log while the block runs."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.fields[label]}{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
    )
    with progress.Progress(*columns, transient=True) as bar:
        yield _Terminal(bar, bar.add_task("starting", total=steps, numbers="", label=label and f"{label}: "))


class _Terminal(_Lines):
    """Prints lines above a progress bar."""

    def __init__(self, bar: Any, task: int) -> None:
        self.bar, self.task, self.next = bar, task, 0.0

    def line(self, text: str) -> None:
        self.bar.console.out(text, highlight=False)

    def progress(self, directory: Path, attempt: Path) -> None:
        """Update the step, loss, rate and remaining time from the trainer's files, at most twice a second."""
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + 0.5
        status, row = layout.STATUS.read(attempt), layout.METRICS.last(directory)
        if not status or not row:
            return
        total = self.bar.tasks[0].total
        minutes, seconds = divmod(int((total - status["step"]) * row["step_seconds"]), 60)
        loss = row.get("loss_mean", row["loss"])
        shown = "-" if loss is None else f"{loss:.4f}"
        numbers = f"loss {shown}  {row['tokens_per_second']:,.0f} tokens/s  {minutes}:{seconds:02d} left"
        self.bar.update(self.task, completed=status["step"], description="training", numbers=numbers)
