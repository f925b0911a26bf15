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
from titan_hydra.experiments.launch.executors.supervisor import GRACE, Supervisor, ended_silently
from titan_hydra.experiments.runs import rundir

from .keys import KubernetesCluster
from .manifest import NAME, PodShape

POLL = 0.5  # seconds between two checks of the attempt
MARGIN = 5.0  # seconds before the end of the pod's grace period at which ranks that have not stopped are killed
LOST = 3  # maximum number of successive attempts that end before their first step; after one more, the Job fails
GONE = 30  # seconds without a heartbeat after which a rank of another pod counts as gone


class Node:
    """A pod and its ranks."""

    def __init__(self, directory: Path, first: int, token: str, job: str) -> None:
        self.directory, self.first, self.token, self.job = directory, first, token, job
        self.pod, self.index = os.environ["POD_NAME"], int(os.environ["JOB_COMPLETION_INDEX"])
        self.asked = 0.0  # the time (by time.monotonic) at which the pod was asked to stop
        self.record: dict[str, Any] = {**this_process(), "name": self.pod, "node": os.environ.get("NODE_NAME", "")}

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Record that the pod is asked to stop."""
        self.asked = self.asked or time.monotonic()

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
        """
        while not self.asked and layout.RESULT.read(self.directory).get("status") != "done":
            attempt = layout.ATTEMPT.of(self.directory, newest_attempt(self.directory))
            if layout.CLAIM.read(attempt).get("token") != self.token:
                raise ConfigError(f"{attempt} is not that of Job {self.job}; nothing is started")
            announced = layout.NODE.read_all(attempt)  # listing the folder makes an NFS client see new files
            listed = layout.NODES.read(attempt).get("names")
            if listed is None:
                self.announce(attempt, announced)
            elif self.pod in listed:
                return attempt
            else:  # this pod has come in place of a listed one
                layout.REPLACED.of(attempt).touch()
                if self.index == 0:
                    self.begin_next(attempt)
            time.sleep(POLL)
        return None

    def announce(self, attempt: Path, announced: dict[int, dict[str, Any]]) -> None:
        """Write this pod's record into an attempt. If all pods have done so, the pod of index 0 lists them."""
        if announced.get(self.index, {}).get("name") != self.pod:
            self.write(attempt)
        elif self.index == 0 and len(announced) == self.shape.pods:
            layout.NODES.write(attempt, {"names": [announced[index]["name"] for index in range(self.shape.pods)]})

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
        attempts = (layout.ATTEMPT.of(self.directory, earlier) for earlier in range(number, self.first - 1, -1))
        if len(list(itertools.takewhile(in_vain, attempts))) > LOST:
            raise Unhealthy(f"pods were lost in {LOST + 1} attempts in a row, before the first step of each")
        owner = layout.CLAIM.read(attempt)
        rundir.claim_next(self.directory, number + 1, owner | {"job_id": self.job})

    def train(self, attempt: Path) -> int:
        """Run the ranks of this pod to their end, and return the exit status of the pod: that of a rank that failed by
        itself, else REQUEUED if the ranks were asked to stop or have lost a rank of another pod.
        """
        size, first = self.shape.ranks_per_pod, self.index * self.shape.ranks_per_pod
        # the namespace's Service gives the pod of rank 0 this name
        arguments = (self.job, f"{self.job}-0.{NAME}")
        ranks = Supervisor(attempt, range(first, first + size), size * self.shape.pods, arguments)
        looked = 0.0
        for _ in ranks.watch():
            now = time.monotonic()
            if self.asked:
                ranks.ask()
                ranks.end_within(self.asked + max(self.cluster.stop_seconds - MARGIN, GRACE) - now)
            if now - looked > 4 * POLL:
                looked = now
                if layout.REPLACED.name in os.listdir(attempt):
                    ranks.end_within(0)
        self.write(attempt, ranks={str(number): record for number, record in ranks.records.items()})
        ended = layout.RANK.read_all(attempt)
        if not any(
            end["exit_status"] or ended_silently(ended.get(number, {})) for number, end in ranks.records.items()
        ):
            return Exit.DONE
        return own_failure(attempt) or Exit.REQUEUED


def own_failure(attempt: Path) -> int:
    """Return the exit status of a rank, in any pod, that failed by itself; 0 if there is no such rank. A rank did not
    fail by itself if it was asked to stop, if all ranks agreed to stop and saved, if it only lost its connection to
    another rank, or if it waited in vain for a rank that is gone.
    """
    if layout.STOPPED.of(attempt).exists() and layout.STOPPED.of(attempt).read_text().strip() == "agreed":
        return Exit.DONE
    records, nodes = layout.RANK.read_all(attempt), layout.NODE.read_all(attempt).values()
    ends = {int(number): end for node in nodes for number, end in node.get("ranks", {}).items()}
    for record in records.values():
        error, status = record.get("error"), record.get("exit_status")
        hung = status == Exit.HANG and not peer_is_gone(attempt, records, ends)
        if error and (hung or (not error["secondary"] and status not in (*STOPPED, Exit.HANG))):
            return status
    for number, end in ends.items():
        status = end["exit_status"]
        if ended_silently(records.get(number, {})) and not end.get("killed") and status not in STOPPED:
            return status if status and status in set(Exit) else Exit.BUG
    return Exit.DONE


def in_vain(attempt: Path) -> bool:
    """Whether an attempt ended before its first step although none of its pods and ranks was asked to stop."""
    asked = any(node.get("asked") for node in layout.NODE.read_all(attempt).values())
    return not (asked or layout.STOPPED.of(attempt).exists() or layout.STATUS.read(attempt))


def peer_is_gone(attempt: Path, records: dict[int, dict[str, Any]], ends: dict[int, dict[str, Any]]) -> bool:
    """Whether a rank has not recorded its end, and has written no heartbeat for GONE seconds. `ends` has the ranks whose
    end their pods know.
    """
    now = rundir.file_time(attempt)
    waiting = (number for number in records if number not in ends and ended_silently(records[number]))
    beats = (layout.BEAT.of(attempt, number) for number in waiting)
    return any(beat.exists() and now - beat.stat().st_mtime > GONE for beat in beats)


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
