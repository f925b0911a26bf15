"""The watchdog thread. It writes heartbeats with the rank's position, handles signals even while the main thread is
blocked, and ends a stuck rank.

The main thread only records its phase (`at`). Signals reach the watchdog thread through Python's wakeup descriptor, to
which the interpreter's C handler writes immediately. A Python handler would have to run in the main thread, which runs
no Python while a collective blocks it in C.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist

from titan_hydra.core.base.errors import LAST_WORDS, Exit, RunError
from titan_hydra.core.base.threads import thread
from titan_hydra.core.job.config.files import read_json, write_text
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.parallel.mesh import Mesh

from . import flight, memory

TICK = 0.5  # seconds between two checks of this rank's progress
BEATS = 50  # maximum number of heartbeat files that all ranks together write in a second
STOP, DUMP = (signal.SIGTERM, signal.SIGUSR2), (signal.SIGUSR1, signal.SIGQUIT)
# Phases without a time limit: I/O depends on the file system, and a meeting depends on the slowest replica group.
UNLIMITED = ("start", "meeting", "checkpoint", "end")
HELD = ("meeting", "checkpoint")  # those phases in UNLIMITED in which a rank may wait for another rank of its world
# phases that come after the step itself; when they begin, the ranks have already agreed on whether to stop
AFTER = (
    "validation",
    "checkpoint",
    "end",
)
BLOCKED = 30  # seconds after the limit at which faulthandler ends the process, even if this thread is blocked
MARGIN = 5  # minimum seconds between a collective's time-out and the end of a rank that makes no progress


@dataclass(frozen=True)
class Position:
    """The position of the main thread. The whole object is replaced at each change, so that the watchdog's thread never
    reads a half-changed position.
    """

    step: int
    phase: str
    since: float  # time at which the phase began
    count: int  # number of phases begun and of calls of `moves` so far


class Watchdog:
    """Watches one rank while the `with` block runs. If an exception leaves the block, the rank's position is added to
    it as the attribute `facts`.
    """

    def __init__(self, job: Job, run: Run) -> None:
        """Take the time-outs from the job; nothing is watched before the `with` block begins."""
        self.run = run
        self.mesh: Mesh | None = None
        self.timeout, self.first = float(job.comm.init_timeout_seconds), True
        self.grace = job.cluster.stop_seconds - min(30.0, job.cluster.stop_seconds / 4)
        self.interval = max(1.0, run.world_size / BEATS)
        self.where = Position(0, "start", time.time(), 0)
        self.on_phase: Callable[[str, int, float], None] | None = None  # called when a phase begins (profiling=on)
        # for each of the last steps: (step, time at which the step began)
        self.steps: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)
        self.records_memory = True  # False once the profiler records allocations: then only the profiler stops that
        # times (monotonic) of the first request to stop and of the last heartbeat; 0 if there was none
        self.asked = self.beaten = 0.0
        self.neighbour = (run.rank + 1) % run.world_size  # the rank whose heartbeats this rank checks
        self.heard: float | None = None  # time in the neighbour's last heartbeat, by the neighbour's clock
        self.silent = 0.0  # seconds since the neighbour's heartbeat last changed
        self.seen: tuple | None = None
        self.moved, self.dumped = time.monotonic(), False
        self.thread = thread(self.watch, "watchdog")

    def at(self, phase: str, step: int | None = None) -> None:
        """Record the phase that the main thread begins, and the step if it has changed."""
        now, before = time.time(), self.where
        if step is not None and step != before.step:
            self.steps.append((step, now))
        self.where = Position(before.step if step is None else step, phase, now, before.count + 1)
        if self.on_phase is not None:
            self.on_phase(phase, self.where.step, now)

    def moves(self) -> None:
        """Record that the main thread makes progress within a phase. Without such calls, only collectives show
        progress, and a phase may have no collectives.
        """
        self.where = replace(self.where, count=self.where.count + 1)

    def set_mesh(self, mesh: Mesh) -> None:
        """Set the mesh of the model. The flight recorder names process groups by the mesh's dimensions."""
        self.mesh = mesh
        if mesh.pipeline is not None and dist.get_backend(mesh.pipeline) == "gloo":
            flight.record_messages()

    def settle(self, timeout: float) -> None:
        """Set the collectives' time-out in seconds for the steps after the first, and stop the recording of allocations."""
        self.timeout, self.first = timeout, False
        if self.records_memory:
            memory.record(None)

    def __enter__(self) -> Watchdog:
        """Receive signals through a pipe that the watchdog's thread reads, as the main thread may be blocked in a
        collective.
        """
        self.wakeup_reader, self.wakeup_writer = os.pipe()
        for end in (self.wakeup_reader, self.wakeup_writer):
            os.set_blocking(end, False)
        self.before = signal.set_wakeup_fd(self.wakeup_writer, warn_on_full_buffer=False)
        os.register_at_fork(
            before=self.block_signals, after_in_parent=self.unblock_signals, after_in_child=self.detach_child
        )
        # `stacks` is True if the worker had registered SIGQUIT; then __exit__ registers it again.
        self.stacks: Any = faulthandler.unregister(signal.SIGQUIT)  # type: ignore[func-returns-value]
        # A signal reaches the wakeup descriptor only if a Python handler is installed for the signal.
        self.handlers = {number: signal.signal(number, lambda *_: None) for number in DUMP}
        with contextlib.suppress(OSError, ValueError):
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True, chain=True)
        memory.record("state")
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Add the rank's position to an error, write a dump unless the error is an expected one, and restore the
        signals.
        """
        if error is not None:
            cast(Any, error).facts = {
                "step": self.where.step,
                "phase": self.where.phase,
                **memory.facts(),
                **getattr(error, "facts", {}),
            }
            memory.explain_out_of_memory(self.run, error)
            if not isinstance(error, RunError):
                self.dump(f"{type(error).__name__}: {error}", error)
        if error is None:
            self.at("end")
        with contextlib.suppress(OSError):
            self.beat()
        signal.set_wakeup_fd(self.before)
        ended, self.thread = self.thread, None
        os.write(self.wakeup_writer, b"\0")
        ended.join(5)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGQUIT)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.stacks:
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
        for end in (self.wakeup_reader, self.wakeup_writer):
            os.close(end)

    def block_signals(self) -> None:
        """Block the signals STOP and DUMP during fork(), so that the child receives none of them before `detach_child`."""
        if self.thread is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP + DUMP)

    def unblock_signals(self) -> None:
        if self.thread is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP + DUMP)

    def detach_child(self) -> None:
        """Detach a forked child from the wakeup pipe and the thread, as signals to the child do not concern the rank."""
        if self.thread is not None:
            signal.set_wakeup_fd(-1)
            self.unblock_signals()
            self.thread = None

    def watch(self) -> None:
        """Handle signals, write heartbeats and check progress until the `with` block ends. Runs in the thread."""
        while self.thread is not None:
            ready, _, _ = select.select([self.wakeup_reader], [], [], TICK)
            with contextlib.suppress(OSError):  # the watchdog continues on a full or slow disk
                for number in os.read(self.wakeup_reader, 64) if ready else b"":
                    self.handle(number)
                if time.monotonic() - self.beaten > self.interval:
                    self.beat()
                    self.check_neighbour()
                    # If a newer attempt has begun, all ranks stop as after any other SIGTERM, but they save nothing.
                    if self.run.rank == 0 and self.run.newer_attempt:
                        os.kill(os.getpid(), signal.SIGTERM)
            self.check_progress()

    def handle(self, number: int) -> None:
        """Handle a signal: a request to stop (several count as one), or a request to dump the flight recorder."""
        if number in STOP:
            self.asked = self.asked or time.monotonic()
            self.beat()  # write the heartbeat immediately: from it, the launcher learns which ranks were asked to stop
        elif number in DUMP:
            self.dump(f"asked by {signal.Signals(number).name}")

    def beat(self) -> None:
        """Write beat_<rank>.json and, on rank 0, status.json with the number of completed steps."""
        where = self.where
        content = {**vars(where), "asked": self.asked, "time": time.time()}
        write_text(layout.BEAT.of(self.run.attempt, self.run.rank), json.dumps(content), durable=False)
        if self.run.rank == 0:
            done = where.step if where.phase in AFTER else max(where.step - 1, 0)
            # `time` is the time at which the phase began
            status = {"step": done, "phase": where.phase, "time": where.since}
            write_text(layout.STATUS.of(self.run.attempt), json.dumps(status), durable=False)
        self.beaten = time.monotonic()

    @property
    def limit(self) -> float:
        """The seconds without progress after which a rank is ended: 1.25 times the time-out of a collective, but at
        least MARGIN seconds more than it. In the first step the limit is three times the time-out, as compiling may
        take long without a collective.
        """
        return 3 * self.timeout if self.first else self.timeout + max(MARGIN, self.timeout / 4)

    def check_neighbour(self) -> None:
        """In a phase without a time limit, end this rank if the next rank writes no heartbeats: that rank or its host
        is frozen. This is called after each heartbeat of this rank, so the time in which the file system blocks both
        ranks does not count.
        """
        phase = self.where.phase
        if phase not in HELD or self.run.world_size == 1:
            self.heard, self.silent = None, 0.0
            return
        beat = layout.BEAT.read(self.run.attempt, self.neighbour)  # empty if that rank froze before its first heartbeat
        if beat.get("phase") == "end" or beat.get("time") != self.heard:
            self.heard, self.silent = beat.get("time"), 0.0
            return
        self.silent += self.interval
        if self.silent > self.limit:
            silent = f"rank {self.neighbour} has written no heartbeat for {self.silent:.0f} s"
            self.end(Exit.HANG, f"step {self.where.step}, {phase}: {silent}; it or its host is frozen")

    def check_progress(self) -> None:
        """End the rank if it has made no progress for longer than its limit: no phase has begun, and no collective has
        begun or ended.
        """
        now, where = time.monotonic(), self.where
        seen = where.count, flight.progress()
        if seen != self.seen:
            self.seen, self.moved, self.dumped = seen, now, False
        step, phase, still, limit = where.step, where.phase, now - self.moved, self.limit
        if still > 0.7 * self.timeout and not self.dumped:
            self.dumped = True
            self.dump(f"no progress for {still:.0f} s")
        if self.asked and phase not in AFTER and now - self.asked > self.grace:
            self.mark_stopped("blocked")
            self.end(
                Exit.REQUEUED,
                f"step {step} was not over {self.grace:.0f} s after the run was asked to stop; nothing more is saved",
            )
        if self.run.world_size > 1 and phase not in UNLIMITED:
            if still > limit:
                self.end(Exit.HANG, f"step {step}, {phase}: no progress for {still:.0f} s")
            # faulthandler ends the process even if this thread cannot run because the main thread holds the GIL.
            faulthandler.dump_traceback_later(limit + BLOCKED, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def dump(self, why: str, error: BaseException | None = None) -> None:
        """Write flight_<rank>.json. Errors are suppressed, as the rank may already be ending."""
        where = {**vars(self.where), "steps": list(self.steps), "timeout": self.timeout}
        with contextlib.suppress(Exception):
            flight.dump(self.run, where, self.mesh, why, error)

    def mark_stopped(self, how: str = "agreed") -> None:
        """Write a file from which the batch script learns that this attempt ends because it was asked to stop. `agreed`
        means that all ranks agreed on the stop; then their exit statuses do not matter. `blocked` means that this rank
        could not agree; another rank may have failed.
        """
        with contextlib.suppress(OSError):  # if the disk is full, the exit status still carries this information
            layout.STOPPED.of(self.run.attempt).write_text(f"{how}\n")

    def end(self, status: Exit, message: str) -> None:
        """End this process, whose main thread is stuck. Write the stacks to the log and the reason to rank_<rank>.json."""
        self.dump(message)
        file = self.run.record_of(self.run.rank)
        record = read_json(file) or {}
        error: dict[str, Any] = {
            "type": "Stuck",
            "message": message,
            "traceback": "",
            "time": time.time(),
            "secondary": True,
        }
        error |= {"step": self.where.step, "phase": self.where.phase}
        write_text(
            file,
            json.dumps({**record, "ended": time.time(), "exit_status": int(status), "error": error}, indent=2) + "\n",
        )
        print(f"{LAST_WORDS} {int(status)}\n{message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(status)
