"""Test the copies of the code that jobs run: each state of a checkout is copied once, and a damaged copy is replaced."""

import os
import subprocess

import pytest

from titan_hydra.launch import dispatch, snapshot
from titan_hydra.runs import rundir

from .test_submit import cell


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Create a git repository with a package of its own, in place of this project's code."""
    root = tmp_path / "code"
    (root / "titan_hydra").mkdir(parents=True)
    (root / "titan_hydra" / "a.py").write_text("a = 1\n")
    (root / "link").symlink_to("titan_hydra")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(snapshot, "ROOT", root)
    return root


def test_a_snapshot_is_the_code_as_it_is_now(checkout):
    runs = checkout / "runs"
    first = snapshot.take(runs, {})
    assert snapshot.take(runs, {}) == first, "its own copies belong to the code"
    (checkout / "titan_hydra" / "a.py").write_text("a = 2\n")  # not committed
    (checkout / "titan_hydra" / "new.py").write_text("")  # not even tracked
    second = snapshot.take(runs, {})
    assert (
        second != first
        and (second / "titan_hydra/a.py").read_text() == "a = 2\n"
        and (second / "titan_hydra/new.py").exists()
    )
    assert (first / "titan_hydra/a.py").read_text() == "a = 1\n"
    for folder in (first, second):
        (folder / "titan_hydra/__pycache__").mkdir()
        (folder / "titan_hydra/__pycache__/a.pyc").touch()
        assert snapshot.digest_of_code(snapshot.copied(folder)) == folder.name
    (second / "titan_hydra/a.py").write_text("a = 3\n")
    assert snapshot.digest_of_code(snapshot.copied(second)) != second.name


def test_a_copy_has_the_modes_and_the_time_of_its_making(checkout):
    """The copy obeys the umask, and does not keep the checkout's modes. Its files have the time of the copy, so that a
    purge of old files keeps them.
    """
    modes = {"a.py": 0o600, "open.py": 0o666, "run.py": 0o755}
    for name, mode in modes.items():
        (checkout / "titan_hydra" / name).write_text("a = 1\n")
        (checkout / "titan_hydra" / name).chmod(mode)
        os.utime(checkout / "titan_hydra" / name, (1, 1))
    before = os.umask(0o007)
    try:
        copy = snapshot.take(checkout / "runs", {})
    finally:
        os.umask(before)
    for name, mode in modes.items():
        made = (copy / "titan_hydra" / name).stat()
        assert made.st_mode & 0o777 == 0o660 and made.st_mtime > 1
        (checkout / "titan_hydra" / name).chmod(mode ^ 0o111)
    assert (copy / "link").is_symlink()
    assert snapshot.take(checkout / "runs", {}) == copy, "names and contents alone make the digest"


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: (copy / "titan_hydra/a.py").unlink(),
        lambda copy: (copy / "titan_hydra/b.py").touch(),
        lambda copy: (copy / "link").unlink(),
    ],
)
def test_a_damaged_copy_is_replaced(checkout, damage):
    """A purge of old files has removed some files of the copy, or somebody has changed them. The damaged copy is kept
    for the jobs that run it.
    """
    runs = checkout / "runs"
    copy = snapshot.take(runs, {})
    damage(copy)
    assert snapshot.take(runs, {}) == copy and snapshot.digest_of_code(snapshot.copied(copy)) == copy.name
    assert (copy / "titan_hydra/a.py").read_text() == "a = 1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a checkout to somebody else")
def test_a_checkout_that_git_refuses_is_one_line(checkout, tmp_path, monkeypatch):
    """A folder of code that several people share belongs to one of them. For the others, git lists its files only if it
    is told that the folder is safe.
    """
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sbatch").touch(mode=0o755)
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    cells = [cell(tmp_path)]
    (fault,) = dispatch.faults_of_the_place(cells, [rundir.State("new")])
    assert str(fault).startswith(f"cluster.executor=slurm: {checkout}: git: ") and "dubious ownership" in str(fault)
    assert "\n" not in str(fault) and "safe.directory" in str(fault) and not cells[0].runs.exists()
