"""How the pods of a Job agree on an attempt, and when they begin the next one. Their run directory is a plain folder."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_hydra.core.base.errors import ConfigError, Exit, Unhealthy
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import this_process
from titan_hydra.experiments.launch.executors.kubernetes import node
from titan_hydra.experiments.launch.executors.kubernetes.manifest import PodShape
from titan_hydra.experiments.launch.executors.kubernetes.node import Node
from titan_hydra.experiments.runs import rundir

OWNER = {
    **this_process(),
    "started": 1.0,
    "executor": "kubernetes",
    "token": "t",
    "job_id": None,
    "user": "me",
    "ended": 2.0,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run directory with one attempt."""
    monkeypatch.setattr(node, "POLL", 0.02)
    attempt(tmp_path, 1)
    return tmp_path


def attempt(run: Path, number: int, asked: bool | None = None, step: int = 0) -> Path:
    folder = layout.ATTEMPT.of(run, number)
    folder.mkdir(parents=True)
    layout.CLAIM.write(folder, OWNER)
    if asked is not None:
        layout.NODE.write(folder, {"name": f"old-{number}", "asked": asked})
    if step:
        layout.STATUS.write(folder, {"step": step})
    return folder


def pod(run: Path, name: str, index: int, pods: int = 2, max_requeues: int = 100) -> Node:
    os.environ.update(POD_NAME=name, JOB_COMPLETION_INDEX=str(index), NODE_NAME=f"n{index}")
    one = Node(run, 1, "t", "job")
    one.cluster, one.shape = SimpleNamespace(max_requeues=max_requeues, stop_seconds=30), PodShape(pods, 1)
    return one


def joined(*pods: Node) -> list[Path | None]:
    """Let pods join at the same time, and return the attempt of each."""
    found: dict[str, Path | None] = {}
    threads = [threading.Thread(target=lambda one=one: found.setdefault(one.pod, one.join())) for one in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[one.pod] for one in pods]


def test_pods_start_together_and_a_replaced_one_begins_the_next_attempt(run):
    first, second = pod(run, "a0", 0), pod(run, "a1", 1)
    assert [path.name for path in joined(second, first)] == ["1", "1"]
    assert layout.NODES.read(layout.ATTEMPT.of(run, 1))["names"] == ["a0", "a1"]
    # pod 1 was lost, then pod 0 has ended: both come again under other names
    assert [path.name for path in joined(pod(run, "b1", 1), pod(run, "b0", 0))] == ["2", "2"]
    assert layout.REPLACED.of(layout.ATTEMPT.of(run, 1)).exists()
    owner = layout.CLAIM.read(layout.ATTEMPT.of(run, 2))
    assert (owner["token"], owner["job_id"], "ended" in owner) == ("t", "job", False)


def test_a_pod_that_is_replaced_before_the_start_costs_no_attempt(run):
    lost = pod(run, "a1", 1)
    lost.write(layout.ATTEMPT.of(run, 1))
    assert [path.name for path in joined(pod(run, "b1", 1), pod(run, "a0", 0))] == ["1", "1"]
    assert layout.NODES.read(layout.ATTEMPT.of(run, 1))["names"][0] == "a0"
    assert sorted(layout.ATTEMPT.all(run)) in ([1], [1, 2])  # 2 if pod 0 was faster and listed the lost one


def test_a_pod_waits_until_it_is_asked_to_stop(run):
    one = pod(run, "a1", 1)
    thread = threading.Timer(0.3, one.ask, (15, None))
    thread.start()
    assert one.join() is None


def test_nothing_starts_if_another_submission_owns_the_run_or_it_is_done(run):
    layout.CLAIM.write(attempt(run, 2), OWNER | {"token": "other"})
    with pytest.raises(ConfigError, match="is not that of Job job; nothing is started"):
        pod(run, "a0", 0).join()
    layout.RESULT.write(run, {"status": "done"})
    assert pod(run, "a0", 0).join() is None


def rank(folder: Path, number: int, status: int | None, secondary: bool = False, beat: float | None = None) -> None:
    """Write the records of a rank. `beat` is the age of its heartbeat in seconds."""
    error = {"type": "E", "message": "m", "traceback": "", "time": 1.0, "secondary": secondary} if status else None
    ended = {} if status is None else {"exit_status": status, "error": error}
    layout.RANK.write(folder, {**this_process(), "started": 1.0, **ended}, number)
    if beat is not None:
        layout.BEAT.write(folder, {"step": 1, "phase": "step", "count": 1, "since": 1.0, "time": 1.0}, number)
        then = time.time() - beat
        os.utime(layout.BEAT.of(folder, number), (then, then))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(0, 0), (1, 0)], 0),
        ([(0, 75), (1, 75)], 0),
        ([(0, 1, True), (1, None)], 0),  # rank 0 lost its connection to rank 1, which is gone
        ([(0, 1, True), (1, 1)], 1),
        ([(0, 1, True), (1, 76)], 76),
        ([(0, 2), (1, 75)], 2),
        ([(0, 77, True), (1, None, False, 5)], 77),  # rank 1 is alive and hangs
        ([(0, 77, True), (1, None, False, 300)], 0),  # rank 1 is gone, and rank 0 waited in vain
    ],
)
def test_what_is_a_failure_of_the_run(run, ranks, expected):
    folder = layout.ATTEMPT.of(run, 1)
    for one in ranks:
        rank(folder, *one)
    assert node.own_failure(folder) == expected


def test_a_rank_that_was_killed_is_a_failure_unless_its_pod_did_it(run):
    folder = layout.ATTEMPT.of(run, 1)
    rank(folder, 0, None)
    layout.NODE.write(folder, {"name": "a0", "ranks": {"0": {"exit_status": -9, "ended": 1.0, "killed": True}}})
    assert node.own_failure(folder) == 0
    layout.NODE.write(folder, {"name": "a0", "ranks": {"0": {"exit_status": -9, "ended": 1.0}}})
    assert node.own_failure(folder) == Exit.BUG
    layout.STOPPED.of(folder).write_text("agreed\n")
    assert node.own_failure(folder) == 0


def test_requeues_have_a_limit(run):
    last = attempt(run, 2, asked=True)
    with pytest.raises(SystemExit) as ended:
        pod(run, "b0", 0, max_requeues=1).begin_next(last)
    assert ended.value.code == Exit.BUG and layout.SPENT.of(last).exists()
    pod(run, "b0", 0, max_requeues=2).begin_next(last)
    assert rundir.newest_attempt(run) == 3


def test_a_failed_run_does_not_go_on(run):
    rank(layout.ATTEMPT.of(run, 1), 1, int(Exit.NOT_FINITE))
    with pytest.raises(SystemExit) as ended:
        pod(run, "b0", 0).begin_next(layout.ATTEMPT.of(run, 1))
    assert ended.value.code == Exit.NOT_FINITE and rundir.newest_attempt(run) == 1


def test_pods_that_lose_each_other_before_the_first_step_give_up(run):
    """Attempts that made a step, or were asked to stop, do not count: a long run may lose any number of nodes."""
    last = [attempt(run, number, asked=False) for number in (2, 3, 4)][-1]
    with pytest.raises(Unhealthy, match="lost in 4 attempts in a row"):
        pod(run, "b0", 0).begin_next(last)
    layout.STATUS.write(layout.ATTEMPT.of(run, 2), {"step": 7})
    pod(run, "b0", 0).begin_next(last)
    assert rundir.newest_attempt(run) == 5
