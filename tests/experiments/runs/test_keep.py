"""`titan runs`: runs are removed, archived, restored and moved whole or not at all, whatever happens meanwhile."""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

from titan_hydra import cli
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import this_process
from titan_hydra.experiments.runs import find, packing
from titan_hydra.experiments.runs.packing import Member

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def made(launcher_of_module):
    """Return a folder of runs: a sweep of two, its snapshot of code, and a run that names a checkpoint of the first."""
    words = ("-m", *launcher_of_module.TINY, "steps=3", "cluster=inline", "name=tiny", "seed=1,2", "sweep.name=study")
    done = launcher_of_module.run(*words)
    assert done.returncode == 0, done.stderr
    runs = launcher_of_module.folder / "runs"
    first = find.sweep(find.sweeps(runs)[0]).cells[0].directory
    shutil.copytree(first, child := runs / "child-00000001")
    change(child / "config.json", lambda found: found["checkpoint"].update(initial_load_path=str(first)))
    (layout.CODE.of(runs) / "0123456789abcdef").mkdir(parents=True)
    (layout.CODE.of(runs) / "0123456789abcdef" / "lines.py").write_text("pass\n")
    change(child / "env.json", lambda found: found.update(code="0123456789abcdef"))
    return runs


@pytest.fixture
def kept(made, tmp_path, monkeypatch):
    """Return a copy of the folder of runs in an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "runs", symlinks=True)
    return Kept(tmp_path / "runs")


@pytest.fixture
def other_disk(kept):
    """Return a folder on another file system."""
    if not SHM.is_dir() or SHM.stat().st_dev == kept.runs.stat().st_dev:
        pytest.skip("there is no second file system")
    folder = SHM / f"keep-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Kept:
    """A folder of runs, and what is in it."""

    def __init__(self, runs):
        self.runs, self.cells = runs, find.sweep(find.sweeps(runs)[0]).cells
        self.sweep, self.first, self.second = find.sweeps(runs)[0], *(cell.directory for cell in self.cells)
        first = self.first
        change(
            runs / "child-00000001/config.json", lambda found: found["checkpoint"].update(initial_load_path=str(first))
        )
        self.sums = {run.name: sums(run) for run in find.all_runs(runs)}


def sums(run):
    return packing.sums_of(Member(run, ""))


def change(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def titan(capsys):
    """Run a command; return its status, stdout, and the lines of stderr."""

    def run(*words):
        status = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(status), out, err.splitlines()

    return run


def refused(found, *named):
    """Assert that a command ended with status 2 and one line, in which these words stand."""
    status, out, lines = found
    assert status == 2 and out == "" and len(lines) == 1 and all(str(word) in lines[0] for word in named), found


def test_what_others_need_goes_only_with_force(kept, titan):
    status, _, lines = titan("runs", "remove", kept.first.name, "--yes")
    assert status == 2 and len(lines) == 2 and all("--force" in line for line in lines)
    assert "child-00000001" in lines[0] and "initial_load_path" in lines[0] and kept.sweep.name in lines[1]
    refused(titan("runs", "move", kept.sweep.name, "--to", "there"), "child-00000001")
    refused(titan("runs", "archive", kept.sweep.name, "--to", "a.tar"), "child-00000001")
    assert {run.name: sums(run) for run in find.all_runs(kept.runs)} == kept.sums
    assert titan("runs", "remove", kept.first.name, "--force", "--dry")[0] == 0 and kept.first.is_dir()
    assert titan("runs", "remove", kept.first.name, "--force", "--yes")[0] == 0 and not kept.first.exists()


@pytest.mark.parametrize("key", ["data.path", "tokenizer.path", "files"])
def test_a_run_needs_whatever_its_keys_name_in_another(kept, titan, key):
    inside = f"{kept.second}/export/model.safetensors"
    child = kept.runs / "child-00000001"
    if key == "files":
        change(child / "env.json", lambda found: found.update(files={"data.path": facts(inside)}))
    else:
        section, name = key.split(".")
        change(child / "config.json", lambda found: found[section].update({name: os.path.relpath(inside, kept.runs)}))
        change(child / "env.json", lambda found: found.update(folder=str(kept.runs)))
    refused(
        titan("runs", "remove", kept.second.name, "--yes"),
        kept.second.name,
        "child-00000001",
        "data.path" if key == "files" else key,
    )


def facts(path):
    return {"word": "data", "path": path, "count": 1, "bytes": 1, "digest": "00", "sampled": False}


def test_a_trial_of_a_search_is_needed_and_a_driven_search_is_refused(kept, titan):
    layout.JOURNAL.of(kept.sweep).write_text("")
    refused(titan("runs", "remove", kept.second.name, "--yes"), kept.sweep.name, "search")
    layout.LEASE.of(kept.sweep).write_text(json.dumps(this_process()))
    refused(titan("runs", "remove", kept.sweep.name, "--force", "--yes"), kept.sweep.name, "titan stop")


def test_a_run_that_is_active_is_refused_with_the_line_that_stops_it(kept, titan):
    attempt = layout.ATTEMPT.of(kept.second, 2)
    attempt.mkdir()
    layout.CLAIM.write(attempt, {**this_process(), "started": time.time(), "executor": "local", "here": True})
    for words in (("remove", "--yes"), ("archive", "--to", "a.tar"), ("move", "--to", "there")):
        refused(
            titan("runs", words[0], kept.second.name, "--force", *words[1:]),
            "running",
            f"titan stop {kept.second.name}",
        )


def test_a_removed_cell_is_shown_as_removed(kept, titan):
    assert titan("runs", "remove", kept.second.name, "--yes")[0] == 0
    cells = json.loads(titan("status", "--json")[1])["cells"]
    assert [cell["state"] for cell in cells] == ["done", "removed"] and "1 removed" in titan("status")[1]
    assert "removed" in titan("report")[1] and titan("status", "--all")[0] == 0
    assert titan("resume")[:2] == (0, "study: nothing to run again\n")
    refused(titan("runs", "remove", "seed=2", "--yes"), "removed by")
    assert titan("runs", "remove", kept.sweep.name, "--force", "--yes")[0] == 0
    assert sorted(os.listdir(kept.runs)) == ["_code", "_sweeps", "child-00000001"]
    assert os.listdir(kept.runs / "_sweeps") == []


@pytest.mark.parametrize("name", ["all.tar", "all.tar.gz", "all.tgz", "all.tar.zst", "l\u00e4uf\u00e9 \u96ea.tar.gz"])
def test_an_archive_brings_all_back(kept, titan, name):
    (kept.second / "caf\u00e9 \u96ea").write_text("x")
    (kept.second / "link").symlink_to("/etc/hostname")
    (kept.second / "empty").mkdir()
    os.utime(kept.second / "attempts", (1e9, 1e9))
    before = sums(kept.second)
    report = titan("report", "--csv")[1]
    status, out, _ = titan("runs", "archive", kept.runs, "--to", name, "--json")
    assert status == 0 and len(json.loads(out)["runs"]) == 3 and find.all_runs(kept.runs) == []
    refused(titan("runs", "restore", name, "--runs", name), name)
    assert titan("runs", "restore", name)[0] == 0
    kept.sums[kept.second.name] = before
    assert {run.name: sums(run) for run in find.all_runs(kept.runs)} == kept.sums
    assert titan("report", "--csv")[1] == report and kept.sweep.is_dir()
    assert (kept.second / "attempts").stat().st_mtime == 1e9 and os.readlink(kept.second / "link") == "/etc/hostname"
    assert titan("runs", "restore", name, "--runs", "elsewhere")[0] == 0
    assert (Path("elsewhere") / "_code/0123456789abcdef/lines.py").is_file()


@pytest.mark.parametrize("kept_steps", ["last", "none"])
def test_an_archive_may_leave_checkpoints_out(kept, titan, kept_steps):
    (step,) = (kept.second / "checkpoints").iterdir()
    earlier = step.with_name("step-00000001")
    shutil.copytree(step, earlier)
    assert titan("runs", "archive", kept.second.name, "--to", "a.tar", "--checkpoints", kept_steps)[0] == 0
    assert titan("runs", "restore", "a.tar")[0] == 0 and not earlier.exists()
    assert step.is_dir() == (kept_steps == "last") and "seed=2" in titan("report")[1]


def test_a_damaged_last_checkpoint_is_not_the_one_that_is_kept(kept, titan):
    (step,) = (kept.second / "checkpoints").iterdir()
    next(step.glob("*.distcp")).write_bytes(b"")
    refused(titan("runs", "archive", kept.second.name, "--to", "a.tar", "--checkpoints", "last"), step, "damaged")


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst"])
def test_a_damaged_archive_restores_nothing(kept, titan, name, where):
    assert titan("runs", "archive", kept.second.name, "--to", name, "--keep")[0] == 0
    content = bytearray(Path(name).read_bytes())
    place = int(len(content) * where)
    for damaged in (bytes(content[:place]), bytes([*content[:place], content[place] ^ 64, *content[place + 1 :]])):
        Path(name).write_bytes(damaged)
        if titan("runs", "restore", name, "--runs", "new")[0] == 0:  # a byte of padding, or of a time
            assert sums(Path("new") / kept.second.name) == kept.sums[kept.second.name]
            shutil.rmtree("new")
        assert not Path("new").exists() or os.listdir("new") == []


def test_an_archive_cannot_write_outside_of_the_folder(kept, titan):
    for name, kind in (
        ("../out", tarfile.REGTYPE),
        ("/tmp/out", tarfile.REGTYPE),
        ("a/b", tarfile.REGTYPE),
        ("c", tarfile.LNKTYPE),
    ):
        with tarfile.open("evil.tar", "w") as tar:
            link = tarfile.TarInfo("a")
            link.type, link.linkname = tarfile.SYMTYPE, ".."
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/hostname"
            tar.addfile(link)
            tar.addfile(info)
        refused(titan("runs", "restore", "evil.tar"), "outside")
    assert not Path("out").exists() and not Path("b").exists()


def test_bad_targets_are_one_line(kept, titan):
    Path("a.tar").write_text("mine")
    refused(titan("runs", "archive", kept.second.name, "--to", "a.tar"), "a.tar", "exists")
    refused(titan("runs", "archive", kept.second.name, "--to", "a.zip"), "a.zip.tar.zst")
    refused(titan("runs", "archive", kept.second.name, "--to", "no/a.tar"), "no/a.tar")
    refused(titan("runs", "archive", kept.second.name, "--to", kept.second / "a.tar"), kept.second.name)
    refused(titan("runs", "move", kept.second.name, "--to", "runs"), "runs")
    refused(titan("runs", "move", kept.second.name, "--to", kept.second / "x"), "inside")
    refused(titan("runs", "move", kept.second.name, "--to", "a.tar"), "a.tar")
    refused(titan("runs", "remove"), "--unused")
    refused(titan("runs", "restore", "none.tar"), "none.tar")
    (Path("there") / kept.second.name / "attempts/1").mkdir(parents=True)
    refused(titan("runs", "move", kept.second.name, "--to", "there"), "exists")
    Path("model").mkdir()
    (Path("model") / "config.json").write_text("{}")
    refused(titan("runs", "remove", "model", "--yes"), "no run")
    Path("link-00000002").symlink_to(kept.second)
    refused(titan("runs", "remove", "link-00000002", "--yes"), "link", kept.second)
    os.mkfifo(kept.second / "pipe")
    refused(titan("runs", "archive", kept.second.name, "--to", "b.tar"), "pipe")
    assert not list(Path().glob("*b.tar*")) and kept.second.is_dir()


def test_a_moved_sweep_is_whole_there(kept, titan):
    report = titan("report", "--csv")[1]
    assert titan("runs", "remove", kept.second.name, "--yes")[0] == 0
    assert titan("runs", "move", kept.runs, "--to", "there/runs")[0] == 0
    assert [cell["state"] for cell in json.loads(titan("status", "--runs", "there/runs", "--json")[1])["cells"]] == [
        "done",
        "removed",
    ]
    assert titan("report", "--runs", "there/runs", "--csv")[1].splitlines()[:2] == report.splitlines()[:2]
    assert (Path("there/runs") / "_code/0123456789abcdef/lines.py").is_file() and find.all_runs(kept.runs) == []


def test_a_move_to_another_disk_is_compared_and_a_full_one_loses_nothing(kept, titan, other_disk):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        found = titan("runs", "move", kept.second.name, "--to", other_disk)
        packed = titan("runs", "archive", kept.second.name, "--to", "a.tar")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert found[0] == packed[0] == 1 and len(found[2]) == len(packed[2]) == 1 and os.listdir(other_disk) == []
    assert not list(Path().glob("*a.tar")) and sums(kept.second) == kept.sums[kept.second.name]
    assert titan("runs", "move", kept.second.name, "--to", other_disk)[0] == 0
    assert sums(other_disk / kept.second.name) == kept.sums[kept.second.name] and not kept.second.exists()
    assert json.loads(titan("status", "--json")[1])["cells"][1]["refused"].startswith(f"moved to {other_disk}")


def test_unused_things_go_after_a_day(kept, titan):
    code = layout.CODE.of(kept.runs)
    for name in ("0123456789abcdef", "fedcba9876543210"):
        (code / f"{name}.json").write_text("{}")
    (code / "fedcba9876543210").mkdir()
    assert "nothing is unused" in titan("runs", "remove", "--unused")[1]
    for path in (*code.iterdir(), *kept.runs.iterdir()):
        os.utime(path, (1e9, 1e9))
    assert len(json.loads(titan("runs", "remove", "--unused", "--dry", "--json")[1])["unused"]) == 2
    assert titan("runs", "remove", "--unused")[0] == 0
    assert sorted(os.listdir(code)) == ["0123456789abcdef", "0123456789abcdef.json"]
    assert {run.name: sums(run) for run in find.all_runs(kept.runs)} == kept.sums


def killed_at(number, words):
    """Run a command in a fork that is killed at its n-th call of the file system."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    calls = iter(range(number))

    def count(event, arguments):
        if event.startswith(("os.", "shutil.", "open")) and event != "os.kill" and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.addaudithook(count)
        cli.main(words)
    finally:
        os._exit(0)


def drill(kept, titan, words, there, number):
    """Kill a command once, check that every run is whole, then let the command end, and bring back what it took away."""
    killed_at(number, [*words])
    for home in (kept.runs, there):
        for run in find.all_runs(home):
            assert sums(run) == kept.sums[run.name], (words, number)
    left = {run.name for home in (kept.runs, there) for run in find.all_runs(home)}
    missing = kept.sums.keys() - left
    if words[1] == "move":
        assert not missing, number
    if words[1] == "archive" and missing:
        assert {*packing.read_archive(Path("a.tar"))["runs"]} == kept.sums.keys()
    assert titan("status", "--all", "--runs", kept.runs)[0] == 0 and titan("status", "--runs", kept.runs)[0] == 0
    if find.all_runs(kept.runs):
        again = titan(*words)
        assert again[0] == 0, (number, again)
    assert find.all_runs(kept.runs) == []
    if words[1] == "archive":
        assert titan("runs", "restore", "a.tar")[0] == 0
        assert {run.name: sums(run) for run in find.all_runs(kept.runs)} == kept.sums


def drills(kept, titan, words, there, numbers, made):
    for number in numbers:
        for path in (kept.runs, there):
            shutil.rmtree(path, ignore_errors=True)
        Path("a.tar").unlink(missing_ok=True)
        shutil.copytree(made, kept.runs, symlinks=True)
        kept.__init__(kept.runs)
        drill(kept, titan, words, there, number)


WORDS = {
    "remove": ("runs", "remove", "runs", "--yes"),
    "archive": ("runs", "archive", "runs", "--to", "a.tar"),
    "move": ("runs", "move", "runs", "--to", "there"),
    "to another disk": ("runs", "move", "runs", "--to"),
}


def moments(seed, count):
    """Return numbers of calls: the renames and deletions stand between the 250th and the 700th."""
    return [random.Random(f"{seed}{index}").randrange(20 if index % 4 == 3 else 250, 700) for index in range(count)]


@pytest.mark.parametrize("verb", WORDS)
def test_a_kill_leaves_whole_runs(kept, titan, verb, made, request):
    there = request.getfixturevalue("other_disk") if verb == "to another disk" else Path("there").absolute()
    words = (*WORDS[verb], *([str(there)] if verb == "to another disk" else []))
    drills(kept, titan, words, there, moments(verb, 2), made)


@pytest.mark.parametrize("verb", WORDS)
def test_kills_at_random_moments_leave_whole_runs(kept, titan, verb, made, request):
    there = request.getfixturevalue("other_disk") if verb == "to another disk" else Path("there").absolute()
    words = (*WORDS[verb], *([str(there)] if verb == "to another disk" else []))
    drills(kept, titan, words, there, moments(f"long {verb}", 25), made)


def test_the_second_run_of_a_baseline_goes_with_its_sweep(kept, titan):
    repeat = kept.sweep / kept.first.name
    shutil.copytree(kept.first, repeat)
    row = {"name": "again", "overrides": [], "directory": os.path.relpath(repeat, kept.runs), "repeat": True}
    change(kept.sweep / "manifest.json", lambda found: found["cells"].append(row))
    assert titan("runs", "archive", kept.sweep.name, "--to", "a.tar", "--force")[0] == 0 and not repeat.exists()
    assert titan("runs", "restore", "a.tar")[0] == 0 and sums(repeat) == sums(kept.first)
