"""Ranks and launchers are asked to stop, whenever in their start the request comes."""

import os
import signal
import subprocess
import threading
import time

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import process
from titan_hydra.experiments.launch.attach import Interrupts, attach
from titan_hydra.experiments.runs import rundir


def test_an_attached_launcher_asks_ranks_that_start_after_the_request(tmp_path):
    """The attempt is another launcher's, whose ranks are not there yet."""
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    other, rank = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    layout.CLAIM.write(attempt, {**process(other.pid), "started": time.time()})
    interrupts = Interrupts()
    interrupts.received.append(signal.SIGTERM)
    watching = threading.Thread(target=attach, args=(tmp_path, attempt, 10, interrupts))
    watching.start()
    time.sleep(0.5)
    layout.RANK.write(attempt, {**process(rank.pid), "started": time.time()}, 0)
    assert rank.wait(30) == -signal.SIGTERM
    rundir.end_attempt(attempt)
    other.kill()
    other.wait()
    watching.join(30)
    assert not watching.is_alive()


def test_a_mark_of_titan_cancel_is_a_request(tmp_path):
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    parent = subprocess.Popen(["sleep", "600"], start_new_session=True)
    layout.CLAIM.write(attempt, {**process(os.getpid()), "started": time.time()})
    rundir.mark_cancelled(attempt)
    attach(tmp_path, attempt, 10, Interrupts(), parent)
    assert parent.returncode == -signal.SIGKILL
