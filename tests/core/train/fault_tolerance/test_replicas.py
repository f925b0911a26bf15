"""Run replica groups under launch.py as real processes. When a group is killed, the other groups continue; when it
returns, it gets their weights.
"""

import json
import os
import signal

import pytest
import torch

from tests.core.checkpoint.steps import tensors
from titan_hydra.core.job.run.checkpoints import step_folder


def slow_steps(seconds, at_start=""):
    """Return code that makes steps slow until the test has seen what it waits for. The code `at_start` runs before the
    first step.
    """
    return f"""
import time
{at_start}update = trainer.Trainer.update
def slowly(self, *given):
    if not os.path.exists("seen"):
        time.sleep({seconds})
    update(self, *given)
trainer.Trainer.update = slowly
"""


# The start of a killed group takes longer than the others wait for it.
SLOWLY = slow_steps(
    0.4,
    """if os.path.exists("killed"):
    time.sleep(8)
""",
)
# The kill is inside an exchange of gradients of one group, so the ranks of the other groups are at different points of
# this exchange.
AMID = """
from titan_hydra.core.train.fault_tolerance.per_step import PerStep
add_up = PerStep.add_up
def disturbed(self, tensors):
    for number, tensor in enumerate(tensors):
        if number == 2 and self.run.rank == 0 and self.run.replica == {group} and os.path.exists("now"):
            os.rename("now", "killed")
            {action}
        yield tensor
PerStep.add_up = lambda self, tensors: add_up(self, disturbed(self, tensors))
"""
KILLED = AMID.format(group=0, action="os.kill(os.getpid(), 9)")
FAILS = """
def fails(*_):
    del channel.allreduce
    raise RuntimeError("planted")
""" + AMID.format(group=1, action="global channel; channel = self.channel; channel.allreduce = fails")
LOSES = """
from titan_hydra.core.train.fault_tolerance.per_step import Handover
receive = Handover.recv_checkpoint
def losing(self, *arguments, **named):
    received = receive(self, *arguments, **named)
    if rank == 1 and not os.path.exists("lost"):
        open("lost", "w").close()
        raise RuntimeError("planted")
    return received
Handover.recv_checkpoint = losing
from torchft.manager import Manager
agree = Manager.start_quorum
def late(self, *arguments, **named):
    if rank == 0 and os.path.exists("lost"):
        time.sleep(0.1)  # torchft takes the step of the rank that asks last for that of all
    agree(self, *arguments, **named)
Manager.start_quorum = late
"""
COMMON = ("debug=tiny", "precision=fp32", "steps=100", "fault_tolerance.timeout_seconds=4", "checkpoint.interval=0")
GROUPS = (*COMMON, "fault_tolerance=diloco", "fault_tolerance.sync_every=2")
TORCHFT = (*COMMON, "fault_tolerance=torchft")


def meetings(directory, event="meeting"):
    rows = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def home(launcher, group):
    """Return the folder with a group's files."""
    return launcher.run_directory / "replicas" / str(group) if group else launcher.run_directory


def quorums(launcher, group):
    """Return the number of groups at each change of this number."""
    return [row["groups"] for row in meetings(home(launcher, group), "quorum")]


def steps(launcher, group):
    """Return the steps that a group has made."""
    return [json.loads(line)["step"] for line in (home(launcher, group) / "metrics.jsonl").read_text().splitlines()]


def restarts(launcher):
    """Return the number of restarts of every group."""
    return [rank.get("restarts", 0) for rank in json.loads((launcher.attempt() / "ranks.json").read_text())["ranks"]]


def assert_equal_weights(launcher, groups, step=100):
    """Check that weights and outer state are equal in the groups' checkpoints."""
    first, *others = (state(home(launcher, group), step) for group in range(groups))
    assert first
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def finish(launcher, process):
    """Let the run continue to its end, after the test has seen what it waited for."""
    (launcher.folder / "seen").touch()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err


def state(directory, step):
    """Return weights and outer state of a group's checkpoint."""
    return tensors(step_folder(directory / "checkpoints", step), ("model.", "outer."))


def test_the_others_go_on_and_a_killed_group_rejoins_with_equal_weights(launcher):
    launcher.sabotage(SLOWLY)
    process = launcher.start(*GROUPS, "fault_tolerance.replicas=4")
    launcher.wait(lambda: meetings(launcher.run_directory)[-1]["step"] >= 4, 120)
    (launcher.folder / "killed").touch()
    os.kill(launcher.rank(2)["pid"], signal.SIGKILL)
    launcher.wait(lambda: meetings(launcher.run_directory)[-1]["groups"] == 3)
    launcher.wait(lambda: meetings(launcher.run_directory)[-1]["joined"] == 1)
    finish(launcher, process)
    assert meetings(launcher.run_directory)[-1]["groups"] == 4
    assert "outer.rank_0.0.momentum" in state(launcher.run_directory, 100)
    assert_equal_weights(launcher, 4)
    assert restarts(launcher) == [0, 0, 1, 0]


@pytest.mark.slow
def test_per_step_the_others_go_on_and_a_killed_group_takes_their_state(launcher):
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    launcher.sabotage(SLOWLY + KILLED)
    process = launcher.start(*TORCHFT, "fault_tolerance.replicas=3")
    launcher.wait(lambda: len(steps(launcher, 0)) > 3)
    (launcher.folder / "now").touch()
    launcher.wait(lambda: quorums(launcher, 1)[-1] == 2)
    launcher.wait(lambda: quorums(launcher, 1)[-1] == 3)
    finish(launcher, process)
    assert_equal_weights(launcher, 3)
    assert restarts(launcher) == [1, 0, 0]
    assert steps(launcher, 1) == list(range(1, 101))
    # the first attempt of the killed group saved no checkpoint, but the rows that it wrote are kept
    rejoined = meetings(launcher.run_directory, "quorum")[-1]
    made = [step for step in steps(launcher, 0) if step <= rejoined["step"]]
    assert 3 < len(made) == made[-1] < rejoined["step"] == rejoined["caught_up"]
    assert steps(launcher, 0) == [*made, *range(rejoined["step"] + 1, 101)]


def test_per_step_an_exchange_that_fails_in_one_group_is_made_again_by_all_at_once(launcher):
    """The other group must not wait for this group until the exchange times out."""
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    launcher.sabotage(FAILS)
    (launcher.folder / "now").touch()
    result = launcher.run(*TORCHFT, "steps=6", "comm.init_timeout_seconds=600", "comm.train_timeout_seconds=600")
    assert result.returncode == 0, result.stderr
    logs = [(launcher.attempt() / f"rank_{rank}.log").read_text() for rank in range(2)]
    again = "step 1 is repeated: "
    assert again + "planted" in logs[1]
    assert again in logs[0]
    assert_equal_weights(launcher, 2, 6)
    assert steps(launcher, 0) == steps(launcher, 1) == list(range(1, 7))


@pytest.mark.slow
def test_per_step_the_others_state_is_taken_by_all_ranks_of_a_group_or_by_none(launcher):
    """Rank 1 of the returning group fails once to receive the state."""
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    launcher.sabotage(SLOWLY + KILLED + LOSES)
    process = launcher.start(*TORCHFT, "gpus=2")
    launcher.wait(lambda: len(steps(launcher, 0)) > 3)
    (launcher.folder / "now").touch()
    launcher.wait(lambda: (launcher.folder / "lost").exists(), 120)
    launcher.wait(lambda: quorums(launcher, 0)[-1] == 2)
    finish(launcher, process)
    assert_equal_weights(launcher, 2)
    assert steps(launcher, 1) == list(range(1, 101))


@pytest.mark.slow
def test_a_run_outlives_its_first_group(launcher):
    launcher.sabotage(SLOWLY)
    process = launcher.start(*GROUPS, "fault_tolerance.max_restarts=0", "steps=30")
    launcher.wait(lambda: meetings(launcher.run_directory)[-1]["step"] >= 2, 120)
    os.kill(launcher.rank(0)["pid"], signal.SIGKILL)
    finish(launcher, process)
    assert json.loads((launcher.run_directory / "result.json").read_text())["steps"] == 30
    assert meetings(launcher.run_directory / "replicas" / "1")[-1]["groups"] == 1


@pytest.mark.slow
def test_per_step_a_group_that_freezes_is_left_out_and_takes_the_others_state_when_it_thaws(launcher):
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    launcher.sabotage(SLOWLY)
    process = launcher.start(*TORCHFT, "fault_tolerance.replicas=3", "comm.train_timeout_seconds=10")
    launcher.wait(lambda: len(steps(launcher, 0)) > 3)
    os.kill(launcher.rank(1)["pid"], signal.SIGSTOP)
    launcher.wait(lambda: quorums(launcher, 0)[-1] == 2)
    os.kill(launcher.rank(1)["pid"], signal.SIGCONT)
    launcher.wait(lambda: quorums(launcher, 0)[-1] == 3)
    finish(launcher, process)
    assert_equal_weights(launcher, 3)
    assert restarts(launcher) == [0, 0, 0]
    assert steps(launcher, 0) == list(range(1, 101))
