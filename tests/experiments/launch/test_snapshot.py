"""Test the copies of the code that jobs run: each state of a checkout is copied once, and a damaged copy is replaced."""

import errno
import os
import subprocess
from types import SimpleNamespace

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run import code, layout
from titan_hydra.experiments.launch.executors.local import Inline, Processes


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Create a git repository with a package of its own, in place of this project's code."""
    root = tmp_path / "code"
    (root / "titan_hydra").mkdir(parents=True)
    (root / "titan_hydra" / "a.py").write_text("a = 1\n")
    (root / "titan_hydra" / "link").symlink_to(".")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(code, "ROOT", root)
    return root


def test_a_snapshot_is_the_code_as_it_is_now(checkout):
    runs = checkout / "runs"
    first = code.take_snapshot(runs, {})
    assert code.take_snapshot(runs, {}) == first, "its own copies belong to the code"
    (checkout / "titan_hydra" / "a.py").write_text("a = 2\n")  # not committed
    (checkout / "titan_hydra" / "new.py").write_text("")  # not even tracked
    second = code.take_snapshot(runs, {})
    assert (
        second != first
        and (second / "titan_hydra/a.py").read_text() == "a = 2\n"
        and (second / "titan_hydra/new.py").exists()
    )
    assert (first / "titan_hydra/a.py").read_text() == "a = 1\n"
    for folder in (first, second):
        (folder / "titan_hydra/__pycache__").mkdir()
        (folder / "titan_hydra/__pycache__/a.pyc").touch()
        (folder / "titan_hydra/.a.py.swp").touch()
        assert code.digest_of_code(code.code_in(folder)) == folder.name
    (second / "titan_hydra/a.py").write_text("a = 3\n")
    assert code.digest_of_code(code.code_in(second)) != second.name


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
        copy = code.take_snapshot(checkout / "runs", {})
    finally:
        os.umask(before)
    for name, mode in modes.items():
        made = (copy / "titan_hydra" / name).stat()
        assert made.st_mode & 0o777 == 0o660 and made.st_mtime > 1
        (checkout / "titan_hydra" / name).chmod(mode ^ 0o111)
    assert (copy / "titan_hydra/link").is_symlink()
    assert code.take_snapshot(checkout / "runs", {}) == copy, "names and contents alone make the digest"


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: (copy / "titan_hydra/a.py").unlink(),
        lambda copy: (copy / "titan_hydra/b.py").touch(),
        lambda copy: (copy / "titan_hydra/link").unlink(),
    ],
)
def test_a_damaged_copy_is_replaced(checkout, damage):
    """A purge of old files has removed some files of the copy, or somebody has changed them. The damaged copy is kept
    for the jobs that run it.
    """
    runs = checkout / "runs"
    copy = code.take_snapshot(runs, {})
    damage(copy)
    assert code.take_snapshot(runs, {}) == copy and code.digest_of_code(code.code_in(copy)) == copy.name
    assert (copy / "titan_hydra/a.py").read_text() == "a = 1\n"


def test_a_checkout_with_any_names_is_copied(checkout):
    """Submodules, names that are no UTF-8, pipes and hidden files of editors do not stop a copy, and git is not asked."""
    package = checkout / "titan_hydra"
    os.mkfifo(package / "pipe")
    (package / os.fsdecode(b"caf\xe9.py")).touch()
    (package / ".hidden").touch()
    copy = code.take_snapshot(checkout / "runs", {})
    assert {os.fsencode(name) for name in code.code_in(copy / "titan_hydra")} == {b"a.py", b"link", b"caf\xe9.py"}
    assert layout.CODE_STATE.read(copy.parent, copy.name)["git_untracked"] == [
        "titan_hydra/.hidden",
        "titan_hydra/caf?.py",
    ]


def commit(root):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"], cwd=root, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_description_does_not_depend_on_settings_of_git(checkout, monkeypatch, tmp_path):
    """A user's colours and diff programs, and another repository named by a hook, change nothing in the description."""
    sha = commit(checkout)
    (checkout / "titan_hydra/a.py").write_text('WANDB_API_KEY = "0123456789abcdef0123456789abcdef01234567"\nb = 1\n')
    plain = code.describe_code()
    assert plain["git_sha"] == sha and "0123456789" not in plain["git_diff"] and "+b = 1" in plain["git_diff"]
    settings = (
        "[color]\nui = always\n[diff]\nexternal = false\nnoprefix = true\nmnemonicPrefix = true\nsubmodule = log\n"
    )
    (tmp_path / "gitconfig").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert code.describe_code() == plain


def test_a_large_diff_is_kept_as_its_digest(checkout):
    (checkout / "titan_hydra/b.txt").write_text("")
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    commit(checkout)
    (checkout / "titan_hydra/a.py").write_text("word\n" * code.MOST_DIFF)
    (checkout / "titan_hydra/b.txt").write_text("word\n")
    first = code.describe_code()["git_diff"]
    assert len(first) < code.MOST_DIFF + 1000 and "diff --git a/titan_hydra/b.txt" in first
    (checkout / "titan_hydra/b.txt").write_text("other\n")
    assert code.describe_code()["git_diff"] != first


def test_cells_in_one_process_are_refused_after_an_edit(checkout):
    inline, cells = Inline(), [SimpleNamespace(job=job_of())]
    assert inline.owner(cells) == inline.owner(cells) == {}
    (checkout / "titan_hydra/a.py").write_text("a = 2\n")
    with pytest.raises(ConfigError, match="edited while"):
        inline.owner(cells)


def test_a_search_goes_on_with_the_code_of_its_first_trial(checkout, tmp_path, capsys):
    """A later driver uses the copy of the first trial's code, and refuses to go on if that copy is lost."""
    runs = checkout / "runs"
    first = code.take_snapshot(runs, {})
    (runs / "one").mkdir()
    layout.ENV.write(runs / "one", {"code": first.name})
    driver_module = pytest.importorskip("titan_hydra.instruments.search.driver")
    driver = object.__new__(driver_module.Driver)
    driver.search = SimpleNamespace(seed=1)
    driver.plan = SimpleNamespace(folder=runs / "s", runs=runs, base=SimpleNamespace(job=job_of()))
    driver.journal = SimpleNamespace(trials=lambda: [SimpleNamespace(runs={1: "one"})])
    driver.kind, driver.executor = SimpleNamespace(single=False), Processes()
    driver.keep_code()
    assert driver.executor.code is None, "the code has not changed"
    (checkout / "titan_hydra/a.py").write_text("a = 2\n")
    driver.keep_code()
    assert driver.executor.code == first and "titan_hydra/a.py" in capsys.readouterr().out
    (first / "titan_hydra/a.py").unlink()
    with pytest.raises(ConfigError, match="begin a new search"):
        driver.keep_code()


def job_of():
    return SimpleNamespace(train=SimpleNamespace(imports=[]), cluster=SimpleNamespace(name="inline"))


def test_a_copy_that_is_there_is_used_where_nothing_can_be_written(checkout, monkeypatch):
    runs = checkout.with_name("runs")
    copy = code.take_snapshot(runs, {})

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(layout.Entry, "write", read_only)
    assert code.take_snapshot(runs, {}) == copy
    (checkout / "titan_hydra/a.py").write_text("a = 2\n")
    with pytest.raises(ConfigError, match=f"^paths.runs={runs}: {copy.parent}, .* cannot be written"):
        code.take_snapshot(runs, {})
