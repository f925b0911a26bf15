"""Test the thread beside the training: heartbeats, signals that a blocked main thread cannot handle, and ranks that are
stuck.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from titan_hydra.core import data
from titan_hydra.core.base.errors import Stopped
from titan_hydra.core.job.run.failure import Kind, guilty
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train import worker
from titan_hydra.core.train.observe import flight, watchdog
from titan_hydra.core.train.observe.watchdog import Watchdog
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job

STUCK = """
import ctypes, json, signal, sys, time
from pathlib import Path
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import watchdog
watchdog.TICK, watchdog.BLOCKED, watchdog.MARGIN = 0.1, 0.5, 0
folder = Path(sys.argv[1])
(folder / "rank_0.json").write_text('{"host": "node0"}')
signal.signal(signal.SIGTERM, lambda *_: None)
job = compose_job("debug=tiny", "comm.init_timeout_seconds=100", "comm.train_timeout_seconds=1", "cluster.stop_seconds=2")
with watchdog.Watchdog(job, Run(folder, folder, 0, 0, 2)) as watch:
    watch.at("forward, backward", 7)
    if "late" not in sys.argv:
        watch.settle(1)
    time.sleep(0.5)
    print("ready", flush=True)
    lock, mutex = getattr(ctypes, sys.argv[2])(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)  # a deadlock, which no signal interrupts
"""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TICK", 0.05)
    with Watchdog(compose_job("debug=tiny"), Run(tmp_path, tmp_path)) as watch:
        yield watch


@pytest.fixture
def stuck(tmp_path):
    """Return `stuck(library, *more)`, which starts a rank whose main thread blocks in C. A CDLL lets other threads run,
    a PyDLL does not.
    """

    def start(*arguments):
        command = [sys.executable, "-c", STUCK, str(tmp_path), *arguments]
        with (tmp_path / "rank_0.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        with process.stdout:
            assert process.stdout.readline() == "ready\n"
        return process

    return start


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_says_where_the_rank_is_at_most_once_a_second(watch, tmp_path):
    writes = set()
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        watch.at("data", len(watch.steps) + 1)
        watch.at("optimizer")
        if (tmp_path / "beat_0.json").exists():
            writes.add((tmp_path / "beat_0.json").read_text())
        time.sleep(0.001)
    assert 1 <= len(writes) <= 2
    watch.at("checkpoint", 400)
    wait_for(lambda: json.loads((tmp_path / "beat_0.json").read_text())["step"] == 400)
    assert json.loads((tmp_path / "beat_0.json").read_text())["phase"] == "checkpoint"
    wait_for(lambda: json.loads((tmp_path / "status.json").read_text())["step"] == 400)
    watch.at("data", 401)
    wait_for(lambda: json.loads((tmp_path / "status.json").read_text())["phase"] == "data")
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 400  # done: it is not counted as begun


def test_every_local_batch_is_progress(watch, on_ranks):
    """Collectives alone do not show progress: replicas have none before the last local batch of a step, and none before
    the end of a validation.
    """
    watch.at("forward, backward", 2)
    before = watch.where
    watch.moves()
    assert watch.where == replace(before, count=before.count + 1)
    wait_for(lambda: watch.seen and watch.seen[0] == watch.where.count)

    def task(rank):
        job = compose_job("debug=tiny", "data.global_batch=6", "data.local_batch=2")
        trainer, loader, moves = build(job, torch.device("cpu")), data.build(job, 0, 1), []
        trainer.progress = lambda: moves.append(1)
        trainer.forward_backward(loader.next())
        trainer.validate(loader, 2)
        loader.close()
        assert len(moves) == 3 + 2 * 3

    on_ranks(1, task)


def test_a_signal_shows_where_it_is(watch, tmp_path):
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        os.kill(os.getpid(), number)
        wait_for((tmp_path / "flight_0.json").exists)
        content = json.loads((tmp_path / "flight_0.json").read_text())
        assert signal.Signals(number).name in content["why"] and any(
            "wait_for" in line for line in content["stacks"]["MainThread"]
        )
        (tmp_path / "flight_0.json").unlink()


def test_signals_of_forked_children_are_not_ours(watch):
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    time.sleep(0.2)
    assert watch.asked == 0
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: watch.asked)
    first = watch.asked
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert watch.asked == first  # two signals count as one
    signal.signal(signal.SIGTERM, before)


def test_an_error_is_told_where_it_was(tmp_path):
    with (
        pytest.raises(ValueError, match="mine") as caught,
        Watchdog(compose_job("debug=tiny"), Run(tmp_path, tmp_path)) as watch,
    ):
        watch.at("data", 3)
        raise ValueError("mine")
    assert caught.value.facts == {"step": 3, "phase": "data"}
    assert "ValueError: mine" in json.loads((tmp_path / "flight_0.json").read_text())["why"]


def test_a_stop_before_the_ranks_can_agree_is_no_mark(tmp_path):
    """Before the trainer handles signals, a signal may be the result of another rank's failure, so no mark is written.
    The batch script must ask whether this is so.
    """
    before = signal.signal(signal.SIGTERM, worker._stop_before_training)
    try:
        with pytest.raises(Stopped), Watchdog(compose_job("debug=tiny"), Run(tmp_path, tmp_path)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("library", "status", "says"),
    [
        ("CDLL", 77, "step 7, forward, backward: no progress for 1 s"),
        ("PyDLL", 1, "was stuck, and its watchdog ended it"),
    ],
)
def test_a_rank_that_is_stuck_in_c_dies_in_time(stuck, tmp_path, library, status, says):
    assert stuck(library).wait(10) == status
    if library == "PyDLL":  # no thread could write that it ended; the parent process saw it
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": [{"exit_status": status, "ended": 1.0}]}))
    failure = guilty(tmp_path)
    assert (failure.kind, failure.status, failure.host) == (Kind.HANG, 77, "node0") and says in failure.line
    assert 'File "<string>", line 19 in <module>' in (tmp_path / "rank_0.log").read_text()


def test_a_rank_that_is_stuck_stops_within_its_grace(stuck, tmp_path):
    process = stuck("CDLL", "late")
    for number in (signal.SIGTERM, signal.SIGTERM):
        time.sleep(0.3)
        process.send_signal(number)
    asked = time.monotonic()
    assert process.wait(10) == 75
    assert 0.8 < time.monotonic() - asked < 2.5
    assert "step 7 was not over 2 s after the run was asked to stop" in (tmp_path / "rank_0.json").read_text()
    assert (tmp_path / "stopped").read_text() == "blocked\n" and guilty(tmp_path) is None  # interrupted, not failed


def test_each_run_of_a_process_has_the_trace_of_nccl_in_its_own_folder(monkeypatch, tmp_path):
    """With cluster=inline several runs follow each other in one process."""
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    monkeypatch.setattr(flight, "_set", {})
    for name in ("first", "second"):
        flight.configure(Run(tmp_path, tmp_path / name))
        for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            assert os.environ[variable] == str(tmp_path / name / "nccl_trace_")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7", "the user's"
