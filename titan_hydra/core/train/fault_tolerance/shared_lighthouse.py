"""torchft's lighthouse for replica groups that are SLURM jobs. The job of the first group runs the lighthouse; if this
job is gone, another job does.

    python -m titan_hydra.core.train.fault_tolerance.shared_lighthouse FOLDER SILENT_SECONDS WAIT_SECONDS

Rank 0 of each group starts this process, which ends with the rank. The process that serves as the lighthouse writes its
address and a counter to FOLDER/lighthouse_<n>.json every second. If the counter has not changed for SILENT_SECONDS (or
no file appears for WAIT_SECONDS), another process takes over as number n + 1: link(2) lets only one process create the
file with that number. The new lighthouse forms no quorum for another SILENT_SECONDS. By then the old lighthouse has
stopped, so that two lighthouses never form quorums at the same time.

torchft's manager keeps one address for its whole life. So it is given a loopback port of this process, which forwards
the manager's connections to the newest lighthouse. Requests wait while there is no lighthouse.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from torchft.coordination import LighthouseClient, LighthouseServer

from titan_hydra.core.base.errors import RunError
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.run.layout import Entry

from .lighthouse import serve_lighthouse
from .quorum import once

LIGHTHOUSE = Entry(
    "lighthouse_<n>.json", "a rank 0", "host and port of the n-th lighthouse, and a counter that shows that it is alive"
)
POLL = 1.0  # seconds between two reads of the files
# signals that SLURM sends not only to a rank, but to all processes that the rank has started
ASKED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def start_shared_lighthouse(folder: Path, silent: float, wait: float) -> tuple[subprocess.Popen, str]:
    """Start the lighthouse process of a rank whose replica group is a SLURM job. Return the process and the address for
    torchft's manager. The rank must keep a reference to the process.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(silent), str(wait)]
    # the new process never receives these signals: it is needed until its rank has ended
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    address = process.stdout.readline().strip()
    if not address:
        raise RunError("the process for torchft's lighthouse did not start: its errors are in this log")
    return process, address


class Lighthouse:
    """The newest lighthouse that this process knows, which this process itself may run, and the manager's connections
    to that lighthouse.
    """

    def __init__(self, folder: Path, silent: float, wait: float) -> None:
        self.folder, self.silent = folder, silent
        self.number, self.content = 0, {}  # number and content of the newest lighthouse's file
        self.deadline = time.monotonic() + wait  # time after which the newest lighthouse counts as gone
        self.server: LighthouseServer | None = None  # the lighthouse that this process runs, if any
        self.written = 0.0  # time at which the counter of `server` was last written
        self.connections: set[asyncio.Task] = set()

    async def watch(self) -> None:
        """Follow the files, and take over if the lighthouse is gone."""
        while True:
            with contextlib.suppress(OSError):  # on a full disk the counter cannot be written, which counts as silence
                self.look()
            await asyncio.sleep(POLL)

    def look(self) -> None:
        """Read the newest lighthouse file. Depending on its content, continue to serve, stop serving, or take over."""
        files = LIGHTHOUSE.all(self.folder)
        number = max(files, default=0)
        content = LIGHTHOUSE.read(self.folder, number)
        now = time.monotonic()
        if self.server is not None and (number != self.number or now > self.written + self.silent):
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.server.shutdown()
            self.server = None
        if content and (number, content) != (self.number, self.content):
            if number != self.number:
                self.disconnect()
            self.number, self.content, self.deadline = number, content, now + self.silent
        if self.server is not None:
            self.content = {**self.content, "counter": self.content["counter"] + 1}
            write_text(files[number], json.dumps(self.content), durable=False)
            self.wrote(now)
        elif now > self.deadline:
            self.take_over(number + 1)

    def take_over(self, number: int) -> None:
        """Become the lighthouse with this number, unless another process was faster."""
        server = serve_lighthouse("[::]:0", self.silent)
        mine = {"host": socket.gethostname(), "port": int(server.address().rpartition(":")[2]), "counter": 0}
        # The groups arrive at different times, so the first quorum must be delayed. A heartbeat is sent for a group
        # that does not exist, and the quorum waits until that heartbeat is too old.
        if number > 1:
            LighthouseClient(f"http://127.0.0.1:{mine['port']}", timedelta(seconds=5)).heartbeat("nobody")
        began = time.monotonic()
        once(LIGHTHOUSE.of(self.folder, number), mine)
        if LIGHTHOUSE.read(self.folder, number) != mine:
            server.shutdown()
            return
        self.disconnect()
        self.server, self.number, self.content, self.deadline = server, number, mine, began + self.silent
        self.wrote(began)
        print(f"torchft's lighthouse, number {number}, runs here", file=sys.stderr, flush=True)

    def wrote(self, moment: float) -> None:
        """Record when the counter was last written, and set an alarm: if a file system blocks this process, SIGALRM
        ends it before another process may take over.
        """
        self.written = moment
        signal.setitimer(signal.ITIMER_REAL, 1.5 * self.silent)

    def disconnect(self) -> None:
        """Close the manager's connections to a lighthouse that is no longer the newest; the manager connects again."""
        for task in self.connections:
            task.cancel()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Once there is a lighthouse, forward all bytes between it and the manager, until either side closes."""
        task = asyncio.current_task()
        try:
            far_reader, far_writer = await self.reach()
            self.connections.add(task)
            try:
                await asyncio.wait(
                    [
                        asyncio.ensure_future(passing)
                        for passing in (copy(reader, far_writer), copy(far_reader, writer))
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                far_writer.close()
        except asyncio.CancelledError:
            pass  # by `disconnect`
        finally:
            self.connections.discard(task)
            writer.close()

    async def reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the newest lighthouse, once it answers."""
        while True:
            with contextlib.suppress(OSError):
                number = self.number
                reader, writer = await asyncio.open_connection(self.content["host"], self.content["port"])
                if number == self.number:
                    return reader, writer
                writer.close()
            await asyncio.sleep(POLL / 10)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the sender or the receiver has closed its connection."""
    with contextlib.suppress(OSError):
        while some := await reader.read(1 << 16):
            writer.write(some)
            await writer.drain()


async def serve(folder: Path, silent: float, wait: float) -> None:
    """Print the manager's address once there is a lighthouse, and serve the manager until the parent ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lighthouse = Lighthouse(folder, silent, wait)
    server = await asyncio.start_server(lighthouse.connect, "127.0.0.1", 0)
    parent, watching = (
        asyncio.ensure_future(asyncio.to_thread(sys.stdin.read)),
        asyncio.ensure_future(lighthouse.watch()),
    )
    while not lighthouse.number and not parent.done() and not watching.done():
        await asyncio.sleep(POLL / 10)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.wait([watching, parent], return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()  # raises the exception that has ended the task


if __name__ == "__main__":
    try:
        asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
    finally:
        sys.stderr.flush()
        # do not wait for threads: one may still be reading from the parent's pipe, which the parent never closes
        os._exit(0)
