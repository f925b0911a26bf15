"""Replica groups are separate jobs. One group is killed, alone or with its node; the others continue, and the killed
group returns when SLURM requeues it.
"""

import json

import pytest
import torch

from tests.core.train.fault_tolerance.test_replicas import slow_steps, state

SLOWLY = slow_steps(0.5)
STEPS, GROUPS = 300, 4
# Each group has a node of its own. The groups are smaller than nodes, and would share one otherwise.
LINE = (
    "gpus=1",
    f"steps={STEPS}",
    "checkpoint.interval=0",
    "+cluster.sbatch.exclusive=true",
    f"fault_tolerance.replicas={GROUPS}",
    "fault_tolerance.timeout_seconds=5",
)


def start(submit, *kind):
    """Submit four groups and wait until they train together. Return their run folders, and the job of each."""
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    submit.sabotage(SLOWLY)
    submit.submit(*LINE, *kind)
    (run,) = submit.cells()
    homes = [run, *(run / "replicas" / str(group) for group in range(1, GROUPS))]
    submit.wait(lambda: all(len(steps(home)) > 3 and quorums(home)[-1] == GROUPS for home in homes), 240)
    return homes, [submit.job_id(home) for home in homes]


def rows(home, name):
    return [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()]


def steps(home):
    """Return the steps that a group has made, in the order in which it has written them."""
    return [row["step"] for row in rows(home, "metrics")]


def quorums(home):
    """Return the number of groups at each change of this number, or at each meeting."""
    return [row["groups"] for row in rows(home, "events") if row["event"] in ("quorum", "meeting")]


def again(home):
    """Return how many steps a group had to repeat."""
    return sum(log.read_text().count("is repeated") for log in home.glob("attempts/*/rank_0.log"))


def finish(submit, homes):
    """Let the run continue to its end, and check that all groups have the same bits."""
    (submit.folder / "seen").touch()
    submit.settle()
    assert submit.done(homes[0]), submit.story()
    first, *others = (state(home, STEPS) for home in homes)
    assert first
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.slow  # takes more than a minute, because SLURM needs half a minute to notice that a node is gone
@pytest.mark.parametrize("victim", [2, 0], ids=["another node", "the lighthouse's node"])
def test_a_group_is_killed_with_its_node_and_the_others_go_on(submit, victim):
    homes, jobs = start(submit, "fault_tolerance=torchft")
    node = submit.cluster.jobs()[jobs[victim]]["NodeList"]
    assert len({submit.cluster.jobs()[job]["NodeList"] for job in jobs}) == GROUPS
    submit.cluster.manage("crash", node)
    others = [home for home in homes if home != homes[victim]]
    submit.wait(lambda: all(quorums(home)[-1] == GROUPS - 1 for home in others), 60)
    left = {home: len(steps(home)) for home in others}
    submit.wait(lambda: submit.status()[homes[0]]["groups"][victim]["state"] == "queued")
    cell = submit.status()[homes[0]]
    assert cell["state"] == "running" and "3 of 4 replica groups run" in submit.titan("status", "runs").stdout, cell
    submit.cluster.manage("boot", node)
    submit.wait(lambda: all(quorums(home)[-1] == GROUPS for home in homes), 240)
    alone = min(len(steps(home)) - left[home] for home in others)
    finish(submit, homes)

    assert alone > 5, "the others waited for it"
    for home in others:
        assert steps(home) == list(range(1, STEPS + 1)), submit.story()
        assert again(home) <= 1 and submit.attempts(home) == [1]
    assert submit.attempts(homes[victim]) == [1, 2]
    assert [int(submit.cluster.jobs()[job]["Restarts"]) for job in jobs] == [
        int(group == victim) for group in range(GROUPS)
    ]
    caught_up = [
        row["caught_up"] for row in rows(homes[victim], "events") if row["event"] == "quorum" and row["caught_up"]
    ]
    print(
        f"the others made {alone} steps without it; made again: {[again(home) for home in others]}; it caught up {caught_up}"
    )
    assert sum(caught_up) > alone
    numbers = sorted(path.name for path in homes[0].glob("meetings/*/lighthouse_*.json"))
    assert len(numbers) == (2 if victim == 0 else 1), numbers


@pytest.mark.slow
def test_one_is_preempted_and_one_rank_is_killed_and_all_are_cancelled_and_retried(submit):
    """Disturbances of a single group end when its job has been requeued."""
    homes, jobs = start(submit, "fault_tolerance=torchft")
    submit.cluster.signal_job(jobs[1], "USR2")
    submit.wait(lambda: quorums(homes[0])[-2:] == [GROUPS - 1, GROUPS], 240)
    assert submit.attempts(homes[1]) == [1, 2] and (homes[1] / "attempts" / "1" / "exit").read_text() == "75\n"
    submit.cluster.call("scancel", "--signal=KILL", f"{jobs[3]}.0")
    submit.wait(lambda: quorums(homes[0])[-4:] == [GROUPS - 1, GROUPS] * 2, 240)
    assert submit.attempts(homes[3]) == [1, 2] and (homes[3] / "attempts" / "1" / "exit").read_text() == "137\n"
    log = submit.titan("logs", homes[0].name, "--rank", "3")
    assert log.returncode == 0 and (homes[3] / "attempts" / "2" / "rank_0.log").read_text().startswith(
        log.stdout or "nothing"
    ), log

    cancelled = submit.titan("stop", homes[0].name, "--yes")
    assert cancelled.returncode == 0 and "cancelled 1 cell" in cancelled.stdout, cancelled.stdout + cancelled.stderr
    submit.settle(60)
    cell = submit.status()[homes[0]]
    assert cell["state"] == "interrupted" and {group["state"] for group in cell["groups"]} == {"interrupted"}, cell
    made = [steps(home)[-1] for home in homes]
    assert max(made) - min(made) <= 1, made
    assert [submit.attempts(home)[-1] for home in homes] == [1, 2, 1, 2]
    retried = submit.titan("resume", "--only", "interrupted")
    assert retried.returncode == 0 and "1 queued" in retried.stdout, retried.stdout + retried.stderr
    finish(submit, homes)
    assert [submit.attempts(home)[-1] for home in homes] == [2, 3, 2, 3]


@pytest.mark.slow
def test_groups_that_meet_through_files_go_on_without_the_first(submit):
    """DiLoCo has no lighthouse; the groups find each other in a folder of the run."""
    homes, jobs = start(submit, "fault_tolerance=diloco", "fault_tolerance.sync_every=2")
    node = submit.cluster.jobs()[jobs[0]]["NodeList"]
    submit.cluster.manage("crash", node)
    submit.wait(lambda: all(quorums(home)[-1] == GROUPS - 1 for home in homes[1:]), 60)
    submit.cluster.manage("boot", node)
    submit.wait(lambda: all(quorums(home)[-1] == GROUPS for home in homes), 240)
    finish(submit, homes)
    for home in homes[1:]:
        assert steps(home) == list(range(1, STEPS + 1)) and submit.attempts(home) == [1]
    assert GROUPS - 1 in quorums(homes[1]) and submit.attempts(homes[0]) == [1, 2]
