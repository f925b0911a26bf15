"""The supervisor of a node's ranks, with shells in the place of ranks: who ends whom, and how each end is recorded."""

import os
import signal
import threading
import time

import pytest

from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch.executors import supervisor
from titan_hydra.experiments.launch.executors.ranks import LocalRanks
from titan_hydra.experiments.launch.executors.supervisor import Supervisor

LASTING = "sleep 100 & trap 'kill $!; exit 75' TERM; wait"
WITH_RECORD = """echo '{"pid": 1, "host": "h", "born": null, "exit_status": 0}' >rank_$TITAN_RANK.json"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Return `supervise(*scripts, groups)`, which makes the supervisor of ranks that run these scripts."""
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    monkeypatch.chdir(attempt)

    def make(*scripts, groups=1, first=0):
        ranks = Supervisor(attempt, range(first, first + len(scripts)), first + len(scripts), groups=groups)
        cases = "".join(f"{number}) {script};;\n" for number, script in enumerate(scripts))
        ranks.command = ["bash", "-c", f"case $TITAN_LOCAL_RANK in\n{cases}esac"]
        return ranks

    return make


def ends(ranks):
    """Run the ranks to their end, and return by rank the exit status and whether the supervisor killed it."""
    changes = list(ranks.watch())
    assert changes[0] and changes[-1]
    return {number: (end["exit_status"], end.get("killed", False)) for number, end in ranks.records.items()}


def test_ranks_that_end_well_leave_the_others_alone(supervise):
    assert ends(supervise(WITH_RECORD, f"sleep 1; {WITH_RECORD}")) == {0: (0, False), 1: (0, False)}


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", -9)],
    ids=["fails", "leaves no record", "is killed"],
)
def test_the_others_end_soon_after_a_failure(supervise, script, status):
    assert ends(supervise(LASTING, script, first=4)) == {4: (-signal.SIGKILL, True), 5: (status, False)}


def test_a_rank_that_ignores_all_signals_is_killed(supervise):
    assert ends(supervise("trap '' QUIT TERM; sleep 100", "exit 3")) == {0: (-9, True), 1: (3, False)}


def test_ranks_have_longer_after_a_stop(supervise):
    """They may be writing their checkpoint."""
    assert ends(supervise(f"sleep 1; {WITH_RECORD}", "exit 75")) == {0: (0, False), 1: (75, False)}


def test_a_group_ends_alone_and_starts_again(supervise):
    ranks = supervise("sleep 1; exit 75", "sleep 1; exit 75", "sleep 100", "exit 1", groups=2)
    for _ in ranks.watch():
        if not ranks.running(ranks.groups[1]) and not ranks.groups[1].restarts:
            first = {number: ranks.records[number]["exit_status"] for number in (2, 3)}
            ranks.restart(ranks.groups[1])
    assert first == {2: -signal.SIGKILL, 3: 1}
    assert [record["exit_status"] for record in ranks.records.values()] == [75, 75, -signal.SIGKILL, 1]
    assert [record.get("restarts") for record in ranks.records.values()] == [None, None, 1, 1]


def test_ranks_end_within_the_time_that_is_left(supervise):
    ranks = supervise(LASTING, LASTING)
    began = time.monotonic()
    for _ in ranks.watch():
        ranks.end_within(0.5)
        ranks.end_within(100)
    assert time.monotonic() - began < 30 and all(record["killed"] for record in ranks.records.values())


def test_each_request_is_passed_on_once(tmp_path):
    """Both while a rank starts and later; the parent process waits for the ranks, which end as they want."""
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    local = LocalRanks(tmp_path, attempt, 1, [])
    counts = "n=0; trap 'n=$((n + 1)); echo $n >>asked; [ $n = 2 ] && exit 75' TERM; echo >ready; while :; do sleep 0.05; done"
    local.ranks.command = ["bash", "-c", f"cd {attempt}; {counts}"]
    thread = threading.Thread(target=local.run)
    thread.start()
    wait_for(attempt / "ready")
    local.ask(signal.SIGTERM, None)
    wait_for(attempt / "asked")
    time.sleep(4 * supervisor.LOOK)
    assert (attempt / "asked").read_text() == "1\n"
    local.ask(signal.SIGTERM, None)
    thread.join(30)
    (rank,) = layout.RANKS.read(attempt)["ranks"]
    assert rank["exit_status"] == 75 and rank["host"] == os.uname().nodename and not thread.is_alive()


def wait_for(file):
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
