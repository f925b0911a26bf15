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

from titan_hydra.core.base.amounts import on_a_clock, or_dash
from titan_hydra.core.base.errors import LAST_WORDS
from titan_hydra.core.base.plain import NotPlain, open_plain
from titan_hydra.core.base.text import printable, with_colours
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
            number: signal.signal(number, lambda signal_number, frame: self.received.append(signal_number))
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
    with displays() as display:
        watch = Watch(directory, attempt, parent, display(steps, label and f"{label}: "))
        while watch.running:
            watch.step(len(interrupts.received))
            time.sleep(POLL)
        watch.close()


class Watch:
    """Follows one running attempt, and stops its ranks on request."""

    def __init__(
        self, directory: Path, attempt: Path, parent: subprocess.Popen[Any] | None, display: PlainDisplay
    ) -> None:
        self.directory, self.attempt, self.parent, self.display = directory, attempt, parent, display
        self.echo = Echo(layout.LOG.of(attempt), display.log)
        self.asked = self.killed = float("inf")  # times (by time.monotonic) at which the ranks were asked, and killed

    @property
    def running(self) -> bool:
        """Whether the ranks' parent process is alive or, if there is none, whether any rank is alive. A parent that is a
        child of this process must be polled, or it remains a zombie.
        """
        if self.parent is not None:
            return self.parent.poll() is None
        return rundir.host_of_running(self.attempt) is not None

    def step(self, requests: int) -> None:
        """Show what is new. At the first request ask the ranks to save and stop; kill them at the second, or if they take
        too long.
        """
        self.echo.more()
        self.display.progress(self.directory, self.attempt)
        now = time.monotonic()
        # `titan cancel` cannot signal ranks that have not started, so it relies on its mark in the attempt
        wanted = requests or layout.CANCELLED.of(self.attempt).exists()
        if wanted and self.asked > now and (ranks := stop(self.attempt, self.parent)):
            self.asked = now
            self.display.line(f"asking {ranks} to save and stop at the end of this step; Ctrl-C again kills")
        too_long = now - self.asked > STOP_LIMIT and not saving(self.directory)
        if requests > 1 or too_long:
            if self.killed > now:
                self.killed = now
                reason = f": they did not stop within {STOP_LIMIT} s" if too_long else ""
                self.display.line(f"killing all ranks{reason}")
            # again and again, as ranks of another launcher's attempt may not have started yet
            kill(self.attempt, self.parent)

    def close(self) -> None:
        """Show the rest of the log. If the parent itself was killed, some of its processes may remain; end them."""
        self.echo.more()
        self.display.close()
        kill(self.attempt, self.parent)


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


class PlainDisplay:
    """Prints plain lines and no progress; this is used without a terminal (a pipe, a CI log). If several runs are shown,
    each line begins with the run's label.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label

    def line(self, text: str) -> None:
        """Print a line about the run."""
        print(f"{self.label}{text}", flush=True)

    def log(self, text: str) -> None:
        """Print a line of rank 0's log."""
        self.line(text)

    def progress(self, directory: Path, attempt: Path) -> None:
        """Show how far the run is."""

    def close(self) -> None:
        """Remove what shows the run's progress."""


@contextlib.contextmanager
def displays(several: bool = False) -> Iterator[Callable[[int, str], PlainDisplay]]:
    """Yield a function that returns the display of a run, given its steps and its label. On a terminal, each run has a
    progress line below everything else; with `several` runs their logs are not printed there.
    """
    if not sys.stdout.isatty():
        yield lambda steps, label: PlainDisplay(label if several else "")
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.fields[label]}{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
    )
    with progress.Progress(*columns, transient=True) as bar:
        yield lambda steps, label: _Terminal(bar, steps, label, several)


class _Terminal(PlainDisplay):
    """Prints lines above the progress lines, one of which is this run's."""

    def __init__(self, bar: Any, steps: int, label: str, several: bool) -> None:
        super().__init__(label if several else "")
        self.bar, self.several, self.next = bar, several, 0.0
        self.task = bar.add_task("starting", total=steps, numbers="", label=label)

    def line(self, text: str) -> None:
        self.bar.console.out(f"{self.label}{text}", highlight=False)

    def log(self, text: str) -> None:
        if not self.several:
            from rich.text import Text

            self.bar.console.print(Text.from_ansi(with_colours(f"{self.label}{text}")), soft_wrap=True)

    def progress(self, directory: Path, attempt: Path) -> None:
        """Update the step, loss, rate and remaining time from the trainer's files, at most twice a second."""
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + 0.5
        status, row = layout.STATUS.read(attempt), layout.METRICS.last(directory)
        if not status or not row:
            return
        (total,) = (task.total for task in self.bar.tasks if task.id == self.task)
        left = on_a_clock((total - status["step"]) * row["step_seconds"])
        shown = or_dash(row.get("loss_mean", row["loss"]), ".4f")
        numbers = f"loss {shown}  {row['tokens_per_second']:,.0f} tokens/s  {left} left"
        self.bar.update(self.task, completed=status["step"], description="training", numbers=numbers)

    def close(self) -> None:
        self.bar.remove_task(self.task)
