"""Start ranks on this machine by submitit's local executor, with `Ranks` as the parent process of the ranks.

submitit's own parent process is not used: it shares the terminal's process group (Ctrl-C would kill the ranks within a
second), hides GPUs, drops exit codes, and lets ranks continue after one has died. `Ranks` has its own session, keeps
the user's visible devices, and records every exit code in ranks.json. When a rank fails, `Ranks` ends all other ranks;
with replica groups (`fault_tolerance`), it ends the other ranks of the same group and restarts the group. `Ranks`
outlives launch.py: if the terminal is closed or launch.py is killed, the ranks continue, and the same command line
attaches to them again.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.local.local import Controller, LocalExecutor, LocalJob

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.base.private import process_of
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.user_code import folders
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import ROOT, USER
from titan_hydra.core.job.run.records import process, this_process
from titan_hydra.core.job.run.run import folders_of
from titan_hydra.core.train import worker

from .leases import Lease, runs_beside, sign

GRACE = 1.5  # seconds that the other ranks may take to end by themselves after a rank has failed
# the same limit after a rank has stopped on request; it is longer, as the other ranks may be writing their checkpoint
GRACE_STOPPED = 60.0
# How many seconds before the time limit the ranks are asked to save and stop; a tenth of the limit if that is less.
LAST_MINUTE = 60
VARIABLES = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")
LEASES = "TITAN_HYDRA_LEASES"  # the variable that gives `Ranks` the descriptors of its lease's files
LOOK = 2.0  # seconds between two looks at which other runs use this machine
YEAR = 365 * 24 * 60  # the time limit in minutes that submitit is given for a job that has none


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
    share = {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in os.environ else {}
    if lease and lease.devices:
        share["CUDA_VISIBLE_DEVICES"] = ",".join(lease.devices)
    executor = RanksExecutor(layout.SUBMITIT.of(attempt), list(map(str, paths)), share, lease.files if lease else [])
    executor.update_parameters(tasks_per_node=processes(job), timeout_min=job.cluster.time_minutes or YEAR)
    job_of_ranks: Any = executor.submit(run_here, str(directory), int(attempt.name))
    return process_of(job_of_ranks)


def run_here(directory: str, attempt: int) -> None:
    """Run one rank in this process, which submitit has started."""
    worker.run_rank(directory, attempt, worker.Place.of(VARIABLES))


class RanksExecutor(LocalExecutor):
    """submitit's local executor, except that `Ranks`, in its own session, is the parent process of the ranks. The ranks
    look for modules first in the folders `paths`; `share` has further environment variables, and the ranks hold the
    files of a lease.
    """

    def __init__(self, folder: Path, paths: list[str], share: dict[str, str], leases: list[int]) -> None:
        super().__init__(folder)
        self.paths, self.share, self.leases = paths, share, leases

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks, seconds = self.parameters["tasks_per_node"], 60 * self.parameters["timeout_min"]
        environment = {
            **os.environ,
            **self.share,
            LEASES: ",".join(map(str, self.leases)),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(seconds),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(min(LAST_MINUTE, seconds // 10)),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "PYTHONPATH": os.pathsep.join([*self.paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RUST_LOG": os.environ.get("RUST_LOG", "error"),  # without this, torchft writes many lines in each step
            "PYTHONSAFEPATH": "1",  # ranks import the same files as launch.py, never modules in the current folder
        }
        with open(Path(self.folder) / "parent.log", "ab") as log:
            parent = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self.leases,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(parent.pid), process=parent, tasks=list(range(ranks)))


@dataclass
class Group:
    """Ranks that cannot continue without each other: all ranks of the job, or all ranks of one replica group."""

    ranks: range
    deadline: float = float("inf")  # time (by time.monotonic) at which the remaining ranks of the group are killed
    restarts: int = 0


class Ranks(Controller):
    """The parent process of all ranks. It waits for the ranks, records how they end, and ends all ranks of a group when
    one of them fails.
    """

    asked = False  # whether the ranks were asked to stop
    lighthouse: subprocess.Popen[Any] | None = None  # torchft's, if the ranks need one on this machine
    next_look = 0.0  # time (by time.monotonic) of the next look at other runs

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.told: set[int] = set()  # processes that were asked to stop after they had begun to listen
        self.leases = [int(file) for file in os.environ.pop(LEASES, "").split(",") if file]
        self.run_name = folder.parents[2].name
        self.beside: set[str] = set()  # other runs that have used this machine at the same time
        for file in self.leases:
            sign(file, self.run_name)

    def start_tasks(self) -> None:
        """Start all ranks. Other than submitit's ranks, they inherit the files of the lease: if only this process is
        killed, their devices stay taken.
        """
        self.folder.mkdir(exist_ok=True)
        paths = [JobPaths(self.folder, self.pid, number) for number in range(self.ntasks)]
        self.stdouts = [path.stdout.open("a") for path in paths]
        self.stderrs = [path.stderr.open("a") for path in paths]
        for number in range(self.ntasks):
            self.tasks.append(self.begin(number))

    def begin(self, number: int) -> subprocess.Popen[Any]:
        """Start a rank."""
        environment = {
            **os.environ,
            "SUBMITIT_LOCAL_LOCALID": str(number),
            "SUBMITIT_LOCAL_GLOBALID": str(number),
            "SUBMITIT_LOCAL_JOB_ID": self.pid,
        }
        out, err = self.stdouts[number], self.stderrs[number]
        return subprocess.Popen(self.command, env=environment, stdout=out, stderr=err, pass_fds=self.leases)

    def look_beside(self, now: float) -> None:
        """Record which other runs use this machine: their speed and this one's are not those of runs alone."""
        if self.leases and now >= self.next_look:
            self.next_look = now + LOOK
            if others := runs_beside(self.run_name) - self.beside:
                self.beside |= others
                self.record()

    def wait(self, freq: int = 20) -> list[int]:
        """Wait for all ranks and return their exit codes. submitit's `run` calls this once the ranks are started."""
        self.ranks = [process(task.pid) for task in self.tasks]
        self.record()
        config = layout.CONFIG.read(self.folder.parents[2]).get("fault_tolerance", {"name": "off", "replicas": 1})
        size = self.ntasks // config["replicas"]
        groups = [Group(range(first, first + size)) for first in range(0, self.ntasks, size)]
        lights = config["name"] == "torchft" and not config.get("lighthouse")
        started = time.monotonic()
        while any(task.poll() is None for task in self.tasks) or any("ended" not in rank for rank in self.ranks):
            now = time.monotonic()
            self.look_beside(now)
            if lights and (self.lighthouse is None or self.lighthouse.poll() is not None):
                self.lighthouse = start_local_lighthouse(self.folder.parent, config["timeout_seconds"])
            for group in groups:
                self.note_ends(group, now)
            if self.asked or now > started + self.timeout_s - self.signal_delay_s:
                self.ask()
            for group in groups:
                if now > min(group.deadline, started + self.timeout_s):
                    self.end_others(group)
                if config["name"] != "off" and group.restarts < config["max_restarts"] and self.has_died(group):
                    self.restart(group, groups.index(group))
            time.sleep(1 / freq)
        return [task.returncode for task in self.tasks]

    def note_ends(self, group: Group, now: float) -> None:
        """Record the ranks that have ended since the last call. A failed rank sets a deadline for the other ranks."""
        for number in group.ranks:
            rank, task = self.ranks[number], self.tasks[number]
            if "ended" not in rank and task.poll() is not None:
                rank.update(exit_status=task.returncode, ended=time.time())
                self.record()
                if task.returncode:
                    group.deadline = min(
                        group.deadline, now + (GRACE_STOPPED if task.returncode == Exit.REQUEUED else GRACE)
                    )

    def end_others(self, group: Group) -> None:
        """Send SIGKILL to a group's running ranks, as a rank inside a collective reacts to no other signal. Before
        that, send SIGQUIT, which makes the ranks log their stacks.
        """
        running = [number for number in group.ranks if self.tasks[number].poll() is None]
        for signal_number in (signal.SIGQUIT, signal.SIGKILL) if running else ():
            for number in running:
                if self.tasks[number].poll() is None:
                    self.ranks[number]["killed"] = True
                    self.tasks[number].send_signal(signal_number)
            time.sleep(0.3)

    def has_died(self, group: Group) -> bool:
        """Whether a group is to be started again. This is so if all its ranks have ended, at least one of them with an
        error, and the reason was neither a request to stop nor a wrong configuration.
        """
        ended = [self.ranks[number].get("exit_status") for number in group.ranks]
        return None not in ended and any(ended) and not self.asked and not {Exit.REQUEUED, Exit.CONFIG} & set(ended)

    def restart(self, group: Group, replica: int) -> None:
        """Start a replica group again. It takes the weights of the other groups at the next exchange."""
        folder = folders_of(replica, self.folder.parents[2], self.folder.parent)[1]
        # the old file has the address of the group's previous start
        layout.RENDEZVOUS.of(folder).unlink(missing_ok=True)
        group.restarts, group.deadline = group.restarts + 1, float("inf")
        for number in group.ranks:
            self.tasks[number] = self.begin(number)
            self.ranks[number] = {**process(self.tasks[number].pid), "restarts": group.restarts}
        self.record()

    def ask(self) -> None:
        """Ask each rank once to save and stop, as soon as the rank listens. While a rank starts, submitit's handler ignores
        the signal; a rank has its own handler when its record exists.
        """
        self.asked = True
        records = layout.RANK.read_all(self.folder.parent)
        for number, task in enumerate(self.tasks):
            listens = records.get(number, {}).get("pid") == task.pid
            if listens and task.pid not in self.told and task.poll() is None:
                self.told.add(task.pid)
                task.send_signal(signal.SIGTERM)

    def _forward_signal(self, signum: signal.Signals, *_: object) -> None:
        self.asked = True
        super()._forward_signal(signum)

    def record(self) -> None:
        with contextlib.suppress(OSError):  # a full disk need not end the ranks
            record = {**this_process(), "ranks": self.ranks}
            layout.RANKS.write(self.folder.parent, record | ({"beside": sorted(self.beside)} if self.beside else {}))


def start_local_lighthouse(attempt: Path, silent: int) -> subprocess.Popen[Any]:
    """Start torchft's lighthouse for the replica groups of one machine. The lighthouse drops a group that has sent no
    heartbeat for `silent` seconds, and it ends when this process ends.
    """
    command = [
        sys.executable,
        "-m",
        "titan_hydra.core.train.fault_tolerance.lighthouse",
        str(layout.MEETINGS.of(attempt) / "lighthouse"),
        str(silent),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def main() -> None:
    """Run the ranks' parent process. At the end, kill all processes that are left in this process group, such as compile
    workers and data loaders.
    """
    try:
        Ranks(Path(sys.argv[1])).run()
    except Exception:
        traceback.print_exc()  # goes to parent.log
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
