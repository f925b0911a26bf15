"""Test the state of a run while its ranks write."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from titan_hydra.core.base.errors import Kind
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.run import layout, records
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch import show
from titan_hydra.experiments.launch.executors.slurm import squeue
from titan_hydra.experiments.runs import hints, rundir, view
from titan_hydra.experiments.runs.find import RunCell
from titan_hydra.experiments.runs.queue import Queue, owner_in

SLURM_OWNER = {
    "pid": 1,
    "host": "login",
    "born": None,
    "started": 0.0,
    "executor": "slurm",
    "job_id": "7",
    "token": "abc",
    "user": "me",
}


def test_a_file_that_is_renamed_meanwhile_is_no_error(tmp_path, monkeypatch):
    """`write_json` writes `.beat_0.json.7` and renames it, so a listing may name a file that is gone when its time is
    read.
    """
    gone = [tmp_path / ".beat_0.json.7", tmp_path / "beat_1.json"]
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda folder: iter(gone))
    assert not rundir.written_lately(tmp_path)
    (tmp_path / ".beat_0.json.7").touch()
    assert not rundir.written_lately(tmp_path), "a file in the making may be left by a rank that died"
    (tmp_path / "beat_0.json").touch()
    gone.append(tmp_path / "beat_0.json")
    assert rundir.written_lately(tmp_path)


def test_a_job_that_slurm_does_not_know_runs_while_its_ranks_write(tmp_path):
    """This happens on the login node of another cluster that has the same name."""
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    rank = {"pid": 1, "host": "node", "born": None}
    layout.CLAIM.write(attempt, SLURM_OWNER)
    layout.RANK.write(attempt, rank)
    assert rundir.state(tmp_path, {"slurm": Queue()}).kind == "running" and "ended" not in layout.CLAIM.read(attempt)
    layout.RANK.write(attempt, rank | {"exit_status": 75, "ended": 1.0})
    assert rundir.state(tmp_path, {"slurm": Queue()}).kind == "interrupted"


@pytest.mark.parametrize("damage", ["cut", "executor", "empty", "lost"])
@pytest.mark.parametrize("host", ["node", socket.gethostname()])
def test_an_attempt_with_a_damaged_record_runs_while_its_ranks_write(tmp_path, damage, host):
    """Another attempt would take its place. A damaged name of the executor stops nobody for good."""
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    layout.CONFIG.write(tmp_path, to_dict(compose_job("debug=tiny")))
    file = layout.CLAIM.of(attempt)
    layout.CLAIM.write(attempt, SLURM_OWNER | {"host": socket.gethostname()})
    (attempt / layout.CLAIM.copy).unlink()
    content = file.read_bytes()
    file.write_bytes({"cut": content[:40], "executor": content.replace(b"slurm", b"sl!rm")}.get(damage, b""))
    if damage == "lost":
        file.unlink()
    rank = {"pid": 1, "host": host, "born": None}
    layout.RANK.write(attempt, rank)
    on_node = host == "node"
    assert rundir.inspect(tmp_path).active == on_node and rundir.state(tmp_path).active == on_node
    layout.RANK.write(attempt, rank | {"exit_status": 75, "ended": 1.0})
    assert rundir.state(tmp_path).kind == "interrupted"


@pytest.mark.parametrize("executor", ["slurm", "local", "kubernetes"])
def test_no_changed_byte_of_a_record_hides_its_job(tmp_path, monkeypatch, executor):
    """Otherwise the same command would submit a second job while the first waits."""
    attempt = layout.ATTEMPT.of(tmp_path, 2)
    attempt.mkdir(parents=True)
    layout.CONFIG.write(tmp_path, to_dict(compose_job("debug=tiny")))
    owner = SLURM_OWNER | {"executor": executor, "here": executor == "local", "cluster": ""}
    rundir.note(attempt, **owner)
    monkeypatch.setattr(squeue, "ask_queue", lambda owners: Queue({"7": squeue.SlurmJob("7", "PENDING", name="a-abc")}))
    assert executor != "slurm" or rundir.inspect(tmp_path).kind == "queued"
    for file in (layout.CLAIM.of(attempt), attempt / layout.CLAIM.copy):
        content = file.read_bytes()
        for at in range(len(content)):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 7
            file.write_bytes(flipped)
            assert owner_in(tmp_path, 2).items() >= owner.items(), (file.name, at)
        assert executor != "slurm" or rundir.inspect(tmp_path).kind == "queued"
        file.unlink()
        assert owner_in(tmp_path, 2) == rundir.note(attempt) == owner, file.name
        assert file.read_bytes() == content, "the next note mends both"


def test_the_job_of_a_run_with_a_damaged_result_is_asked_for(tmp_path, monkeypatch):
    """Otherwise the job that mends the run would count as ended while it waits, and another would be submitted."""
    attempt = layout.ATTEMPT.of(tmp_path, 2)
    attempt.mkdir(parents=True)
    layout.CLAIM.write(attempt, SLURM_OWNER | {"host": socket.gethostname()})
    queue = Queue({"7": squeue.SlurmJob("7", "PENDING", name="a-abc")})
    monkeypatch.setattr(squeue, "ask_queue", lambda owners: queue)
    result = {"status": "done", "final_loss": 4.5}
    layout.RESULT.write(tmp_path, result | {layout.CHECKSUM: layout.sum_of(result | {"final_loss": 1.5})})
    assert rundir.state(tmp_path).kind == "queued" and "ended" not in layout.CLAIM.read(attempt)
    layout.RESULT.write(tmp_path, result)
    assert rundir.state(tmp_path).kind == "done"


def test_a_run_whose_recorded_host_is_damaged_runs_here(tmp_path):
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    layout.CLAIM.write(attempt, {**records.this_process(), "host": "other", "started": 0.0, "executor": "local"})
    layout.RANK.write(attempt, records.this_process())
    os.utime(layout.CLAIM.of(attempt), (1, 1)), os.utime(layout.RANK.of(attempt), (1, 1))
    assert rundir.state(tmp_path).host == socket.gethostname()


def test_a_job_is_known_by_its_token_too():
    """One digit of the recorded id would name another job, which `titan stop` would then cancel."""
    mine, other = squeue.SlurmJob("7_1", "RUNNING", name="a-abc"), squeue.SlurmJob("8_1", "RUNNING", name="b-def")
    queue, owner = Queue({job.id: job for job in (mine, other)}), SLURM_OWNER | {"index": 1}
    assert squeue.find_job(queue, owner | {"job_id": "7_1"}) == mine
    assert squeue.find_job(queue, owner | {"job_id": "8_1"}) == mine
    assert squeue.find_job(queue, owner | {"job_id": "9_1"}) == mine
    ended = squeue.SlurmJob("7_1", "COMPLETED")  # sacct is not asked for names
    assert squeue.find_job(Queue({"7_1": ended}), owner | {"job_id": "7_1"}) == ended


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_hosts_clock_may_be_wrong(tmp_path, monkeypatch, ahead):
    """One run is healthy and began 100 s ago on a node whose clock differs from the login node's. The heartbeats of the
    other run ended 90 s ago.
    """
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    there = time.time() + ahead
    process = {"pid": os.getpid(), "host": "node", "born": None}
    layout.CLAIM.write(attempt, process | {"started": time.time() - 110})
    layout.CONFIG.write(tmp_path, {"model": {}, "steps": 10})
    layout.RANK.write(attempt, process | {"started": there - 100})
    os.utime(layout.RANK.of(attempt), (time.time() - 100,) * 2)
    layout.METRICS.of(tmp_path).write_text('{"step": 4, "loss": 1.0, "step_seconds": 2.0}\n')
    layout.STATUS.write(attempt, {"step": 4})
    layout.BEAT.write(attempt, {"step": 5, "phase": "optimizer", "count": 9, "since": there - 1, "time": there})
    monkeypatch.setattr(rundir, "inspect", lambda *given: rundir.State("running", 1))
    row = view.look([RunCell("a", tmp_path, [])])[0][0]
    assert row.silent is None and row.to_go == 12.0 and 95 < row.seconds < 105, row
    os.utime(layout.BEAT.of(attempt), (time.time() - 90,) * 2)
    assert 85 < view.look([RunCell("a", tmp_path, [])])[0][0].silent < 95


def test_a_controller_that_is_down_is_asked_once(monkeypatch):
    """Each query may take half a minute, and a thousand runs ask for the name of this cluster."""
    calls, answers = [], [None, None, "ClusterName  = here\n"]
    monkeypatch.setattr(squeue, "call", lambda *command: calls.append(command) or answers[len(calls) - 1])
    monkeypatch.setattr(squeue, "SETTINGS", [])
    owner = {"cluster": "there"}
    assert {squeue.elsewhere(owner) for _ in range(9)} == {""} and len(calls) == 1
    monkeypatch.setattr(squeue, "LIMIT", -1)
    assert [squeue.elsewhere(owner) for _ in range(9)] == ["", *["there"] * 8] and len(calls) == 3
    assert squeue.elsewhere({"cluster": "here"}) == squeue.elsewhere({}) == ""


def test_a_hint_names_a_checkpoint_only_where_there_is_one(tmp_path, monkeypatch):
    """A run may have no checkpoint, for example if the disk was full at the first save."""
    (tmp_path / "config.json").write_text(json.dumps(to_dict(compose_job("debug=tiny"))))
    failure = SimpleNamespace(attempt=tmp_path / "attempts/1", kind=Kind.DISK)
    assert hints.hint(failure).endswith("then launch.retry=failed starts it from step 1")
    monkeypatch.setattr(hints.checkpoints, "complete", lambda folder: [folder / "step-00000005"])
    assert hints.hint(failure).endswith("then launch.retry=failed goes on from the newest checkpoint")


def test_the_last_word_of_a_run_whose_folder_is_gone(tmp_path):
    assert "was deleted while it ran" in show.last_word(tmp_path / "gone", rundir.State("new"))
    assert "before it could save" in show.last_word(tmp_path, rundir.State("interrupted", 1))


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no `ps` (package procps)")
def test_a_process_is_known_where_there_is_no_proc():
    """On macOS there is no /proc; `ps` is called instead."""
    child = subprocess.Popen(["sleep", "60"])
    born = records._started(child.pid)
    assert born == records._started(child.pid) != ""
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert records._started(child.pid) is None, "a zombie has ended"
    child.wait()
    assert records._started(child.pid) is None
