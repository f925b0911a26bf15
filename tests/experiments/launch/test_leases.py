"""Devices that runs of any user hold are seen as taken until the last of the run's processes has ended, however it ends."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from titan_hydra.experiments.launch.executors import leases


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The temporary folder of a machine of this test's own, with four devices."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leases, "DRIVER", tmp_path / "driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return tmp_path


HOLDER = """
import os, subprocess, sys, tempfile
from titan_hydra.experiments.launch.executors import leases
tempfile.tempdir = sys.argv[1]
lease = leases.take_devices(2, "theirs-1234", ["0", "1"])
child = subprocess.Popen(["sleep", "600"], pass_fds=lease.files)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_lease_ends_with_the_last_process_that_holds_it(folder):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(holder.stdout.readline())
    try:
        assert leases.take_devices(3, "mine", ["0", "1", "2", "3"]) is None
        free = leases.take_devices(2, "mine", ["0", "1", "2", "3"])
        assert free.devices == ["2", "3"], "what was taken for nothing is free again"
        free.close()
        assert f"devices 0, 1: run theirs-1234 ({leases._user()}, pid {holder.pid})" == leases.who_holds()
        assert leases.runs_beside("mine") == {"theirs-1234"}
        holder.kill()  # as `kill -9` of a launcher: its ranks go on
        holder.wait()
        assert leases.take_devices(1, "mine", ["0"]) is None
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
    for _ in range(100):
        if (lease := leases.take_devices(2, "mine", ["0", "1"])) is not None:
            break
        time.sleep(0.05)
    assert lease.devices == ["0", "1"], "nothing is stale, and nobody has to remove a file"
    lease.close()


def test_one_process_holds_a_device_once():
    first, second = (leases.take_devices(1, name, ["0", "1"]) for name in "ab")
    assert (first.devices, second.devices) == (["0"], ["1"])
    assert leases.take_devices(1, "c", ["0", "1"]) is None
    first.close()
    assert leases.take_devices(1, "c", ["0", "1"]).devices == ["0"]


def test_too_few_devices_are_the_ranks_to_report():
    assert leases.take_devices(5, "a", ["0", "1"]) == leases.Lease()


def test_places_on_cpus_never_run_out():
    held = [leases.take_devices(8, name, []) for name in "abc"]
    assert all(lease.devices == [] and len(lease.files) == 1 for lease in held)
    assert leases.runs_beside("a") == {"b", "c"}


@pytest.mark.parametrize("plant", ["link", "hard link", "pipe", "folder"])
def test_what_somebody_has_planted_is_neither_followed_nor_written(folder, plant, capsys):
    victim = folder / "victim"
    victim.write_text("precious")
    path = folder / f"{leases.PREFIX}0.{os.geteuid()}"
    match plant:
        case "link":
            path.symlink_to(victim)
        case "hard link":
            path.hardlink_to(victim)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    lease = leases.take_devices(1, "mine", ["0"])
    assert (lease.devices, lease.files) == (["0"], []), "the run goes on without a lease"
    assert "cannot see" in capsys.readouterr().err
    assert victim.read_text() == "precious"


OTHER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600 if sys.argv[3] == "closed" else 0o644)
os.write(file, eval(sys.argv[2]))
if sys.argv[3] != "unlocked":
    fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("content", "how", "taken", "shown"),
    [
        (b'{"run": "x-1", "user": "eve", "pid": 7}', "locked", True, "device 0: run x-1 (eve, pid 7)"),
        (b'{"run": "x\\u001b[2J\\ny", "user": {}, "pid": null}', "locked", True, "device 0: run x y ({}, pid None)"),
        (b"\xff[[[", "locked", True, "device 0: run unknown (unknown, pid unknown)"),
        (b'{"run": "x-1", "user": "eve", "pid": 1}', "unlocked", False, ""),
    ],
)
def test_another_users_lease_is_respected_while_it_is_locked(folder, content, how, taken, shown):
    folder.chmod(0o1777)
    path = folder / f"{leases.PREFIX}0.65534"
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path), repr(content), how],
        user=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        other.stdout.readline()
        os.chown(path, 65534, 65534)
        assert leases.who_holds() == shown
        assert (leases.take_devices(1, "mine", ["0"]) is None) == taken
    finally:
        other.kill()
        other.wait()


def test_a_file_in_another_users_name_holds_nothing(folder):
    """Only the user whose id the name has can hold a device by it."""
    with (folder / f"{leases.PREFIX}0.12345").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert leases.take_devices(1, "mine", ["0"]).devices == ["0"]


def test_a_file_system_without_locks_keeps_no_lease(monkeypatch, capsys):
    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(leases.fcntl, "flock", flock)
    assert leases.take_devices(1, "mine", ["0"]) == leases.Lease(["0"], [])
    assert "Function not implemented" in capsys.readouterr().err


def test_a_device_has_one_name_however_it_is_given(folder):
    for number, bus in enumerate(("0000:17:00.0", "0000:65:00.0")):
        (folder / "driver" / bus).mkdir(parents=True)
        (folder / "driver" / bus / "information").write_text(f"Model: H100\nGPU UUID: \t GPU-{number}abc-def\n")
    assert leases.physical("1") == leases.physical("GPU-1abc-def") == leases.physical("GPU-1a") == "GPU-1abc-def"
    assert leases.physical("7") == "7"
    assert leases.physical("MIG-GPU-1abc/1/0") == "MIG-GPU-1abc_1_0"
    held = leases.take_devices(1, "mine", ["1"])
    assert leases.take_devices(1, "other", ["GPU-1abc-def"]) is None
    held.close()


def test_the_content_of_a_lease_is_what_its_holder_wrote_last(folder):
    lease = leases.take_devices(1, "a-rather-long-name", ["0"])
    leases.sign(lease.files[0], "b")
    content = json.loads((folder / f"{leases.PREFIX}0.{os.geteuid()}").read_text())
    assert content["run"] == "b" and content["pid"] == os.getpid()
