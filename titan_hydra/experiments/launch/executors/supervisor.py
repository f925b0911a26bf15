"""The supervisor of a node's ranks: it starts them, passes requests to stop on to them, ends the others soon after one has
failed, and records how each has ended. The parent process of a local run (ranks.py) and the process of a Job's node
(kubernetes/node.py) each have one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import STOPPED
from titan_hydra.core.job.run.records import process

from .rank import VARIABLES

LOOK = 0.05  # seconds between two looks at the ranks
GRACE = 1.5  # seconds that the other ranks may take to end by themselves after a rank has failed
# the same limit after a rank has stopped on request; it is longer, as the other ranks may be writing their checkpoint
GRACE_STOPPED = 60.0


@dataclass
class Group:
    """Ranks that cannot continue without each other: all ranks of the node, or all ranks of one replica group."""

    ranks: range
    deadline: float = float("inf")  # time (by time.monotonic) at which the remaining ranks of the group are killed
    restarts: int = 0


class Supervisor:
    """The ranks of a node. `records` has for each rank its process and, once it has ended, its exit status, the time, and
    whether this supervisor killed it.
    """

    def __init__(
        self,
        attempt: Path,
        ranks: range,
        of: int,
        arguments: Sequence[str] = (),
        groups: int = 1,
        files: Sequence[int] = (),
    ) -> None:
        """Supervise these ranks of the `of` ranks that work on an attempt. `arguments` follow the run and the attempt in a
        rank's command line; the ranks inherit the open `files`.
        """
        self.attempt, self.ranks, self.of, self.files = attempt, ranks, of, files
        self.command = [
            sys.executable,
            "-u",
            "-m",
            f"{__package__}.rank",
            str(attempt.parents[1]),
            attempt.name,
            *arguments,
        ]
        size = len(ranks) // groups
        self.groups = [Group(ranks[first : first + size]) for first in range(0, len(ranks), size)]
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        self.records: dict[int, dict[str, Any]] = {}
        self.asked_ranks: set[int] = set()  # the ranks that were asked to stop

    def watch(self) -> Iterator[bool]:
        """Start all ranks. Then yield after each look at them whether a record has changed, until all have ended."""
        for number in self.ranks:
            self.start(number)
        changed = True
        while True:
            ended = [number for group in self.groups for number in group.ranks if self.note_end(group, number)]
            yield changed or bool(ended)
            if not any(self.running(group) for group in self.groups):
                return
            for group in self.groups:
                if self.running(group) and time.monotonic() > group.deadline:
                    self.end(group)
            time.sleep(LOOK)
            changed = False

    def start(self, number: int) -> None:
        """Start a rank. What it prints before it opens its own log goes to the job's log."""
        values = (number, self.of, number - self.ranks.start, len(self.ranks))
        environment = {**os.environ, **dict(zip(VARIABLES, map(str, values), strict=True))}
        with layout.JOB_LOG.of(self.attempt).open("ab") as log:
            task = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, pass_fds=self.files)
        self.tasks[number], self.records[number] = task, process(task.pid)

    def note_end(self, group: Group, number: int) -> bool:
        """Record the end of a rank if it has ended since the last look, and return whether it has. If it has failed, which a
        rank has that leaves no record of its end, the others of its group have little time left.
        """
        record, status = self.records[number], self.tasks[number].poll()
        if status is None or "ended" in record:
            return False
        record.update(exit_status=status, ended=time.time())
        if status or ended_silently(layout.RANK.read(self.attempt, number)):
            self.end_within(GRACE_STOPPED if status in STOPPED else GRACE, [group])
        return True

    def running(self, group: Group) -> list[int]:
        """Return the ranks of a group whose end is not recorded."""
        return [number for number in group.ranks if "ended" not in self.records[number]]

    def end_within(self, seconds: float, groups: list[Group] | None = None) -> None:
        """Kill the ranks that still run in so many seconds, or before if that is decided already."""
        for group in self.groups if groups is None else groups:
            group.deadline = min(group.deadline, time.monotonic() + seconds)

    def end(self, group: Group) -> None:
        """Send SIGKILL to a group's running ranks, as a rank inside a collective reacts to no other signal. Before
        that, send SIGQUIT, which makes the ranks log their stacks.
        """
        for signal_number in (signal.SIGQUIT, signal.SIGKILL):
            for number in self.running(group):
                if self.tasks[number].poll() is None:
                    self.records[number]["killed"] = True
                    self.tasks[number].send_signal(signal_number)
            time.sleep(0.3)

    def ask(self) -> None:
        """Ask each rank that runs to save and stop, unless it was asked before."""
        for number, task in self.tasks.items():
            if number not in self.asked_ranks and task.poll() is None:
                self.asked_ranks.add(number)
                task.send_signal(signal.SIGTERM)

    def restart(self, group: Group) -> None:
        """Start all ranks of a group again."""
        group.restarts, group.deadline = group.restarts + 1, float("inf")
        for number in group.ranks:
            self.start(number)
            self.records[number]["restarts"] = group.restarts


def ended_silently(record: dict[str, Any]) -> bool:
    """Whether a rank has not recorded its end. If its process has ended, something outside the trainer has ended it,
    whatever its exit status.
    """
    return "exit_status" not in record
