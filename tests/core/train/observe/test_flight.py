"""Cause hangs: one of several real ranks skips an operation, sleeps or dies. `titan logs --hang` names the rank, the
operation, the mesh and the step.
"""

import json
import re
import shutil
import socket

import pytest

AT_STEP_4 = """
forward_backward, count = trainer.Trainer.forward_backward, []
def sabotaged(self, batch):
    count.append(1)
    if len(count) == 4 and rank == {rank}:
        {action}
    return forward_backward(self, batch)
trainer.Trainer.forward_backward = sabotaged
"""
SKIP_TP = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Skip(TorchDispatchMode):
    "Leaves out the last collective of a step that has the name: the 4th of rank 1."
    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        if str(function).startswith("_c10d_functional.reduce_scatter_tensor") and len(count) == 4:
            seen.append(1)
            if len(seen) == 3:
                return arguments[0].chunk(2)[0].clone()
        return function(*arguments, **(kwargs or {}))
seen = []
"""
SKIP_FSDP = """
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
reduce = FSDPParamGroup.post_backward
def skipping(self, *unused):
    if len(count) == 4 and rank == 1 and not skipped:
        return skipped.append(1)
    return reduce(self, *unused)
skipped = []
FSDPParamGroup.post_backward = skipping
"""
SKIP_PP = """
from torch.distributed.pipelining import schedules
exchange = schedules._batch_p2p
def skipping(operations, desc=None):
    import torch.distributed as dist
    if len(count) == 4 and rank == 0 and operations and operations[0].op is dist.isend and not sent:
        sent.append(1)
        return []
    return exchange(operations, desc)
sent = []
schedules._batch_p2p = skipping
"""
HERE = socket.gethostname()
FSDP_TP = ("gpus=4", "parallelism=fsdp_tp", "parallelism.tp=2")
AT_WORK = AT_STEP_4.format(rank=-1, action="pass")  # counts steps


@pytest.fixture
def drill(launcher):
    """Return `drill(code, *overrides)`, which runs a job to its end and returns launch.py's exit status and error, and
    the output of `titan logs --hang`.
    """

    def run(code, *overrides):
        launcher.sabotage(code)
        failed = launcher.run(*launcher.TINY, "steps=10", "comm.train_timeout_seconds=5", *overrides)
        assert launcher.processes() == []
        launcher.env["PYTHONPATH"] = str(launcher.ROOT)
        said = launcher.python("-m", "titan_hydra.cli", "logs", str(launcher.run_directory), "--hang")
        return failed.returncode, failed.stderr, said.stdout

    return run


def test_a_rank_that_sleeps(drill):
    status, error, said = drill(AT_STEP_4.format(rank=1, action="import time; time.sleep(1000)"), *FSDP_TP)
    assert (
        status == 77
        and "failed (77): rank 1 was late at step 4, forward, backward: it has not begun all_reduce" in error
    )
    assert f"Rank 1 on {HERE} is late: at step 4, forward, backward, since " in said
    # Both of the rank's process groups wait for it; the message names the one that began to wait first.
    assert (
        re.search(r"of (dp_shard \(ranks 1, 3\)|tp \(ranks 0, 1\))\. It is called in ", said) and "trainer.py:" in said
    )
    assert said.rstrip().endswith(" sabotaged")  # the line where the rank sleeps


@pytest.mark.parametrize(
    ("code", "layout", "rank", "operation"),
    [
        pytest.param(
            SKIP_TP + AT_STEP_4.format(rank=1, action="Skip().__enter__()"),
            FSDP_TP,
            1,
            "all_reduce number {} of tp (ranks 0, 1)",
            marks=pytest.mark.slow,
        ),
        # with gloo, which reduce-scatters with sums
        pytest.param(
            AT_WORK + SKIP_FSDP, FSDP_TP, 1, "all_reduce number {} of dp_shard (ranks 1, 3)", marks=pytest.mark.slow
        ),
        (
            AT_WORK + SKIP_PP,
            ("gpus=2", "parallelism=pp", "parallelism.pp=2"),
            0,
            "send to rank 1 number {} of pp (ranks 0, 1)",
        ),
    ],
    ids=["tp", "fsdp", "pp"],
)
def test_a_rank_that_skips_an_operation(drill, code, layout, rank, operation):
    status, error, said = drill(code, *layout)
    assert status == 77, error
    kind, _, mesh = operation.partition(" number {} of ")
    assert re.search(
        rf"Rank {rank} on {HERE} left out {kind} number \d+ \[.*\] of {re.escape(mesh)} in step 4, and went on", said
    ), said
    assert f"failed (77): rank {rank} was late at step 4, forward, backward: it left out {kind}" in error


FREEZE = """pid, seen = os.getpid(), False
        if os.fork() == 0:  # as srun does, which sends SIGCONT before SIGTERM once another rank has given up
            os.kill(pid, 19)
            while not seen:
                time.sleep(0.02)
                seen = any("exit_status" in file.read_text() for file in pathlib.Path("runs").glob("*/attempts/1/rank_0.json"))
            os.kill(pid, 18)
            os._exit(0)
        time.sleep(1)"""


def test_a_rank_that_freezes_and_goes_on_too_late(drill, launcher):
    """The rank reaches the operation that the others have given up. What it did after their time-out does not count."""
    status, error, said = drill("import pathlib, time\n" + AT_STEP_4.format(rank=1, action=FREEZE), "gpus=2")
    assert status == 77 and "failed (77): rank 1 was late at step 4, " in error, error
    assert re.match(
        rf"Rank 1 on {HERE} (came late: at step 4, .* s after rank 0, .* had given up|is gone: it left no dump)", said
    ), said


def test_a_rank_that_dies_is_a_death_and_no_hang(drill, launcher):
    status, error, said = drill(AT_STEP_4.format(rank=1, action="os.kill(os.getpid(), 9)"), "gpus=2")
    assert status == 1 and "rank 1 was killed by signal 9" in error
    assert (
        f"Rank 1 on {HERE} is gone: it left no dump. At step 4, forward, backward, the others wait for it in all_"
        in said
    )
    dump = json.loads((launcher.attempt() / "flight_0.json").read_text())
    earlier = {**dump, "rank": 1, "step": 2, "time": dump["time"] - 60, "collectives": dump["collectives"][:3]}
    (launcher.attempt() / "flight_1.json").write_text(json.dumps(earlier))
    assert launcher.python("-m", "titan_hydra.cli", "logs", str(launcher.run_directory), "--hang").stdout == said
    other = launcher.run_directory / "replicas/1/attempts/1"  # as for a replica group that is a separate SLURM job
    shutil.copytree(launcher.attempt(), other)
    both = launcher.python("-m", "titan_hydra.cli", "logs", str(launcher.run_directory), "--hang").stdout
    assert both == f"group 0: {said}group 1: {said}"
