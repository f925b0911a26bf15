"""The process of a pod. It agrees with the other pods on the attempt, and runs the ranks of its node. From its exit
status, the Job's failure policy decides whether the pod is started again.

    python -m titan_hydra.experiments.launch.executors.kubernetes.node RUN ATTEMPT TOKEN JOB

A Job starts its pods one by one, and starts a pod again after it has failed. So the pods meet in the run directory:
each pod writes node_<index>.json into the newest attempt. Once all pods have done so, the pod of index 0 lists them in
nodes.json, and they start their ranks. If a pod finds that the list does not contain it, it has replaced a pod that is
gone. The listed pods then end their ranks, and the pod of index 0 creates the next attempt, as long as requeues are
left.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

from titan_hydra.core.base.errors import ConfigError, Exit, RunError, Unhealthy, denied
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import STOPPED
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.core.job.run.records import this_process
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.core.train.worker import until_seen
from titan_hydra.experiments.runs import rundir

from .keys import KubernetesCluster
from .manifest import PodShape

POLL = 0.5  # seconds between two checks of the attempt
GRACE = 1.5  # seconds that the other ranks may take to end by themselves after a rank has failed
# seconds that the other ranks may take to end by themselves after a rank has stopped on request; they may still be
# writing their checkpoint
GRACE_STOPPED = 60.0
MARGIN = 5.0  # seconds before the end of the pod's grace period at which ranks that have not stopped are killed
LOST = 3  # maximum number of successive attempts that end before their first step; after one more, the Job fails
GONE = 30  # seconds without a heartbeat after which a rank of another pod counts as gone


class Node:
    """A pod and its ranks."""

    def __init__(self, directory: Path, first: int, token: str, job: str) -> None:
        self.directory, self.first, self.token, self.job = directory, first, token, job
        self.pod, self.index = os.environ["POD_NAME"], int(os.environ["JOB_COMPLETION_INDEX"])
        self.asked = 0.0  # the time (by time.monotonic) at which the pod was asked to stop
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.record: dict[str, Any] = {**this_process(), "name": self.pod, "node": os.environ.get("NODE_NAME", "")}

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Record that the pod is asked to stop, and pass the signal on to the ranks."""
        self.asked = self.asked or time.monotonic()
        for rank in self.ranks.values():
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Take part in one attempt, and return the exit status of the pod."""
        until_seen(layout.CLAIM.of(layout.ATTEMPT.of(self.directory, self.first)))
        job = load_job(self.directory)
        self.cluster, self.shape = cast(KubernetesCluster, job.cluster), PodShape.of(job)
        attempt = self.join()
        if attempt is None:
            return Exit.DONE if layout.RESULT.read(self.directory).get("status") == "done" else Exit.REQUEUED
        status = self.train(attempt)
        self.write(attempt, exit_status=status, asked=bool(self.asked))
        return status

    def write(self, attempt: Path, **known: object) -> None:
        self.record |= known
        layout.NODE.write(attempt, self.record, self.index)

    def join(self) -> Path | None:
        """Wait until the list of the newest attempt's pods contains this pod, and return this attempt. Return None if the
        run is done or this pod is asked to stop.

        Each look at the attempt leads to one action: the pod begins (it is listed), has the attempt replaced (the list
        is without it), announces itself (its record is not there), or writes the list (all records are there).
        """
        while not self.asked and layout.RESULT.read(self.directory).get("status") != "done":
            attempt = layout.ATTEMPT.of(self.directory, newest_attempt(self.directory))
            if layout.CLAIM.read(attempt).get("token") != self.token:
                raise ConfigError(f"{attempt} is not that of Job {self.job}; nothing is started")
            announced = layout.NODE.read_all(attempt)  # listing the folder makes an NFS client see new files
            listed = layout.NODES.read(attempt).get("names", [])
            if self.pod in listed:
                return attempt
            if listed:
                layout.REPLACED.of(attempt).touch()
                if self.index == 0:
                    self.begin_next(attempt)
            elif announced.get(self.index, {}).get("name") != self.pod:
                self.write(attempt)
            elif self.index == 0 and len(announced) == self.shape.pods:
                layout.NODES.write(attempt, {"names": [announced[index]["name"] for index in range(self.shape.pods)]})
            time.sleep(POLL)
        return None

    def begin_next(self, attempt: Path) -> None:
        """Create the next attempt. If a rank of the last attempt has failed by itself, or the pods were started again
        too often, raises an error that fails the Job.
        """
        if status := own_failure(attempt):
            raise SystemExit(status)
        number = int(attempt.name)
        if number - self.first >= self.cluster.max_requeues:
            layout.SPENT.of(attempt).touch()
            raise SystemExit(Exit.BUG)
        attempts = (layout.ATTEMPT.of(self.directory, one) for one in range(number, self.first - 1, -1))
        if len(list(itertools.takewhile(in_vain, attempts))) > LOST:
            raise Unhealthy(f"pods were lost in {LOST + 1} attempts in a row, before the first step of each")
        owner = layout.CLAIM.read(attempt)
        rundir.claim_next(self.directory, number + 1, owner | {"job_id": self.job})

    def train(self, attempt: Path) -> int:
        """Run the ranks of this pod to their end, and return the exit status of the pod."""
        size, first = self.shape.ranks_per_pod, self.index * self.shape.ranks_per_pod
        for number in range(size):
            place = {
                "TITAN_RANK": first + number,
                "TITAN_RANKS": size * self.shape.pods,
                "TITAN_LOCAL_RANK": number,
                "TITAN_LOCAL_RANKS": size,
            }
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            command = [sys.executable, "-u", "-m", f"{__package__}.rank", str(self.directory), attempt.name, self.job]
            with layout.JOB_LOG.of(attempt).open("ab") as log:
                self.ranks[first + number] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        if self.asked:  # the signal may have come between the starts of two ranks
            self.ask(signal.SIGTERM, None)
        ended: dict[int, dict[str, Any]] = {}
        deadline, looked, lost = float("inf"), 0.0, False
        while any(rank.poll() is None for rank in self.ranks.values()):
            now = time.monotonic()
            if self.asked:
                deadline = min(deadline, self.asked + max(self.cluster.stop_seconds - MARGIN, GRACE))
            if now - looked > 4 * POLL:
                looked, lost = now, layout.REPLACED.name in os.listdir(attempt)
            for number, rank in self.ranks.items():
                if number not in ended and rank.poll() is not None:
                    ended[number] = {"exit_status": rank.returncode, "ended": time.time()}
                    if rank.returncode or ended_silently(attempt, number):
                        deadline = min(deadline, now + (GRACE_STOPPED if rank.returncode in STOPPED else GRACE))
            if now > deadline or lost:
                self.kill(ended)
            time.sleep(POLL / 5)
        for number, rank in self.ranks.items():
            ended.setdefault(number, {"exit_status": rank.returncode, "ended": time.time()})
        self.write(attempt, ranks={str(number): end for number, end in ended.items()})
        return self.status(attempt, ended)

    def kill(self, ended: dict[int, dict[str, Any]]) -> None:
        """Let the running ranks log their stacks, then kill them."""
        for number_of_signal in (signal.SIGQUIT, signal.SIGKILL):
            for number, rank in self.ranks.items():
                if rank.poll() is None:
                    rank.send_signal(number_of_signal)
                    ended.setdefault(number, {"ended": time.time(), "killed": True})
            time.sleep(0.3)
        for number, end in ended.items():
            end.setdefault("exit_status", self.ranks[number].wait())

    def status(self, attempt: Path, ended: dict[int, dict[str, Any]]) -> int:
        """Return the exit status of the pod: that of a rank that failed by itself, else REQUEUED if the ranks were asked to
        stop or have lost a rank of another pod.
        """
        if not any(end["exit_status"] or ended_silently(attempt, number) for number, end in ended.items()):
            return Exit.DONE
        return own_failure(attempt) or Exit.REQUEUED


def own_failure(attempt: Path) -> int:
    """Return the exit status of a rank, in any pod, that failed by itself; 0 if there is no such rank. A rank did not
    fail by itself if it was asked to stop, if all ranks agreed to stop and saved, if it only lost its connection to
    another rank, or if it waited in vain for a rank that is gone.
    """
    if layout.STOPPED.of(attempt).exists() and layout.STOPPED.of(attempt).read_text().strip() == "agreed":
        return Exit.DONE
    for record in layout.RANK.read_all(attempt).values():
        error, status = record.get("error"), record.get("exit_status")
        hung = status == Exit.HANG and not peer_is_gone(attempt)
        if error and (hung or (not error["secondary"] and status not in (*STOPPED, Exit.HANG))):
            return status
    for node in layout.NODE.read_all(attempt).values():
        for number, end in node.get("ranks", {}).items():
            status = end["exit_status"]
            if ended_silently(attempt, int(number)) and not end.get("killed") and status not in STOPPED:
                return status if status and status in set(Exit) else Exit.BUG
    return Exit.DONE


def ended_silently(attempt: Path, rank: int) -> bool:
    """Whether a rank has not recorded its end. If its process has ended, something outside the trainer has ended it,
    whatever its exit status.
    """
    return "exit_status" not in layout.RANK.read(attempt, rank)


def in_vain(attempt: Path) -> bool:
    """Whether an attempt ended before its first step although none of its pods and ranks was asked to stop."""
    asked = any(node.get("asked") for node in layout.NODE.read_all(attempt).values())
    return not (asked or layout.STOPPED.of(attempt).exists() or layout.STATUS.read(attempt))


def peer_is_gone(attempt: Path) -> bool:
    """Whether a rank has not recorded its end, and has written no heartbeat for GONE seconds."""
    now = rundir.file_time(attempt)
    ended = {int(number) for node in layout.NODE.read_all(attempt).values() for number in node.get("ranks", {})}
    for number, record in layout.RANK.read_all(attempt).items():
        beat = layout.BEAT.of(attempt, number)
        if number not in ended and "exit_status" not in record and beat.exists() and now - beat.stat().st_mtime > GONE:
            return True
    return False


def main(arguments: list[str]) -> int:
    """Run a pod, and return its exit status. If the pod starts no rank, the last line of its output is the reason."""
    directory, attempt, token, job = arguments
    node = Node(Path(directory), int(attempt), token, job)
    signal.signal(signal.SIGTERM, node.ask)
    try:
        return node.run()
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    except PermissionError as error:
        print(denied(error), file=sys.stderr)
        return Exit.CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
