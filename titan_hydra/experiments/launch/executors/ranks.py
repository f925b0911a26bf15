"""The ranks of a run on this machine: `start` starts their parent process, `LocalRanks`, which supervises them.

The parent process has its own session and outlives launch.py: if the terminal is closed or launch.py is killed, the
ranks continue, and the same command line attaches to them again. It records how each rank ends in ranks.json. When a
rank fails, it ends all other ranks; with replica groups (`fault_tolerance`), it ends the other ranks of the same group
and restarts the group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.user_code import folders
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import ROOT, USER
from titan_hydra.core.job.run.records import this_process
from titan_hydra.core.job.run.run import folders_of

from .leases import Lease, runs_beside, sign
from .supervisor import Group, Supervisor

# How many seconds before the time limit the ranks are asked to save and stop; a tenth of the limit if that is less.
LAST_MINUTE = 60
LOOK_BESIDE = 2.0  # seconds between two looks at which other runs use this machine


def start(
    directory: Path, attempt: Path, job: Job, lease: Lease | None = None, threads: int | None = None
) -> subprocess.Popen[Any]:
    """Start all ranks of an attempt, which import the copy of the code that the attempt names. Return their parent
    process, which ends when all ranks have ended. The ranks see the leased devices only, and each computes with
    `threads` threads, unless the user has set OMP_NUM_THREADS.
    """
    if name := layout.CLAIM.read(attempt).get("code"):
        code = layout.CODE.of(layout.runs_of(job)) / name
        paths = [code, code / USER] if job.train.imports else [code]
    else:  # the attempt was claimed by an executor of the user's own, without a copy
        paths = [ROOT, *folders(job.train.imports)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RUST_LOG": os.environ.get("RUST_LOG", "error"),  # without this, torchft writes many lines in each step
        "PYTHONSAFEPATH": "1",  # ranks import the same files as launch.py, never modules in the current folder
    }
    if threads:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if lease and lease.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(lease.devices)
    files = lease.files if lease else []
    command = [sys.executable, "-m", __name__, str(directory), attempt.name, str(processes(job)), *map(str, files)]
    with layout.PARENT_LOG.of(attempt).open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=files,
            start_new_session=True,
        )


class LocalRanks:
    """The parent process of all ranks of an attempt on this machine. The ranks inherit the files of the lease: if only
    this process is killed, their devices stay taken.
    """

    lighthouse: subprocess.Popen[Any] | None = None  # torchft's, if the ranks need one on this machine
    next_look = 0.0  # time (by time.monotonic) of the next look at other runs

    def __init__(self, directory: Path, attempt: Path, ranks: int, leases: list[int]) -> None:
        """Prepare the ranks. `limit` is the time at which cluster.time_minutes ends, `warning` the time to ask the
        ranks to save.
        """
        self.directory, self.attempt, self.leases = directory, attempt, leases
        config = layout.CONFIG.read(directory)
        self.tolerance = config.get("fault_tolerance", {"name": "off", "replicas": 1})
        minutes = config.get("cluster", {}).get("time_minutes")
        self.limit = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.warning = self.limit - min(LAST_MINUTE, 6 * minutes) if minutes else self.limit
        self.asked = False  # whether the ranks were asked to stop
        self.beside: set[str] = set()  # other runs that have used this machine at the same time
        self.ranks = Supervisor(attempt, range(ranks), ranks, groups=self.tolerance["replicas"], files=leases)
        for file in leases:
            sign(file, directory.name)

    def ask(self, number: int, frame: object) -> None:
        """Handle a request to stop: the ranks are asked, again if they were asked before."""
        self.asked = True
        self.ranks.asked_ranks.clear()

    def run(self) -> None:
        """Run the ranks to their end."""
        for changed in self.ranks.watch():
            now = time.monotonic()
            if self.look_beside(now) or changed:
                self.record()
            self.keep_lighthouse()
            if self.asked or now > self.warning:
                self.asked = True
                self.ranks.ask()
            if now > self.limit:
                self.ranks.end_within(0)
            for replica, group in enumerate(self.ranks.groups):
                if self.begins_again(group):
                    self.restart(group, replica)

    def look_beside(self, now: float) -> bool:
        """Whether other runs have begun to use this machine: their speed and this one's are not those of runs alone."""
        if not self.leases or now < self.next_look:
            return False
        self.next_look = now + LOOK_BESIDE
        known = len(self.beside)
        self.beside |= runs_beside(self.directory.name)
        return len(self.beside) > known

    def keep_lighthouse(self) -> None:
        """Start torchft's lighthouse if the ranks need one on this machine and none runs."""
        needed = self.tolerance["name"] == "torchft" and not self.tolerance.get("lighthouse")
        if needed and (self.lighthouse is None or self.lighthouse.poll() is not None):
            self.lighthouse = start_local_lighthouse(self.attempt, self.tolerance["timeout_seconds"])

    def begins_again(self, group: Group) -> bool:
        """Whether a replica group is to be started again. This is so if all its ranks have ended, at least one of them
        with an error, and the reason was neither a request to stop nor a wrong configuration.
        """
        if self.asked or self.tolerance["name"] == "off" or self.ranks.running(group):
            return False
        ended = {self.ranks.records[number]["exit_status"] for number in group.ranks}
        failed = any(ended) and not {Exit.REQUEUED, Exit.CONFIG} & ended
        return failed and group.restarts < self.tolerance["max_restarts"]

    def restart(self, group: Group, replica: int) -> None:
        """Start a replica group again. It takes the weights of the other groups at the next exchange."""
        folder = folders_of(replica, self.directory, self.attempt)[1]
        # the old file has the address of the group's previous start
        layout.RENDEZVOUS.of(folder).unlink(missing_ok=True)
        self.ranks.restart(group)
        self.record()

    def record(self) -> None:
        """Write ranks.json."""
        record = {**this_process(), "ranks": list(self.ranks.records.values())}
        with contextlib.suppress(OSError):  # a full disk need not end the ranks
            layout.RANKS.write(self.attempt, record | ({"beside": sorted(self.beside)} if self.beside else {}))


def start_local_lighthouse(attempt: Path, silent: int) -> subprocess.Popen[Any]:
    """Start torchft's lighthouse for the replica groups of one machine. The lighthouse drops a group that has sent no
    heartbeat for `silent` seconds, and it ends when this process ends.
    """
    module, address = "titan_hydra.core.train.fault_tolerance.lighthouse", layout.MEETINGS.of(attempt) / "lighthouse"
    return subprocess.Popen([sys.executable, "-m", module, str(address), str(silent)], stdin=subprocess.PIPE)


def main(arguments: list[str]) -> None:
    """Run the ranks' parent process. At the end, kill all processes that are left in this process group, such as compile
    workers and data loaders.
    """
    try:
        directory, number, ranks, *leases = arguments
        attempt = layout.ATTEMPT.of(Path(directory), int(number))
        local = LocalRanks(Path(directory), attempt, int(ranks), list(map(int, leases)))
        signal.signal(signal.SIGTERM, local.ask)
        local.run()
    except Exception:
        traceback.print_exc()  # goes to parent.log
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
