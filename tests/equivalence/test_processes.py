"""Ranks of cases inherit nothing from the process that starts them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_hydra.core.job.config import to_dict
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.processes import spawn_ranks


def note_parent(device, folder, jobs):
    Path(folder, f"parent_of_{os.getpid()}").write_text(str(os.getppid()))


def test_no_rank_is_a_fork_of_its_caller(tmp_path):
    """After the first use of a fork server, Python's default start method is a fork. A fork of a process that has had
    process groups, such as the fake ones of a plan, sums over the wrong ranks.
    """
    job = to_dict(compose_job("debug=tiny", "gpus=2", "parallelism=fsdp"))
    for _ in range(2):
        spawn_ranks(2, note_parent, str(tmp_path), [(job,)])
    parents = [file.read_text() for file in tmp_path.glob("parent_of_*")]
    assert len(parents) == 4 and str(os.getpid()) not in parents


def sleep(device, folder, jobs):
    Path(folder, f"rank_{os.getpid()}").touch()
    time.sleep(300)


def verify_in(folder: str) -> None:
    spawn_ranks(2, sleep, folder, [(to_dict(compose_job("debug=tiny", "gpus=2", "parallelism=fsdp")),)])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGKILL, signal.SIGHUP))]
)
def test_a_signal_that_ends_the_caller_ends_its_ranks_and_their_fork_server(tmp_path, number):
    code = f"from {__name__} import verify_in; verify_in({str(tmp_path)!r})"
    root = Path(__file__).parents[2]
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=root, start_new_session=True)
    until(lambda: len(list(tmp_path.glob("rank_*"))) == 2, 120)
    assert len(members(caller.pid)) >= 4, "caller, fork server, two ranks"
    caller.send_signal(number)
    caller.wait()
    until(lambda: not members(caller.pid), 20)


def until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def members(session: int) -> list[str]:
    """Return the command lines of all processes of a session, without those that have ended."""
    found = subprocess.run(["ps", "-o", "stat=,args=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if not line.startswith("Z")]
