"""A file that belongs to another user and may not be read or written gives one line with its owner and mode, never a
traceback.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.experiments.launch.conftest import ROOT
from tests.kits import forked

COLLEAGUE = 12345  # a user that does not exist
DROP = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # root, but without the right to read all files
ALICE = f"belongs to {COLLEAGUE}:{COLLEAGUE}"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can give files away"
)


def run(folder, *words):
    """Run a command without root's rights; return (status, stdout, stderr)."""
    program = [str(ROOT / "launch.py")] if words[0] == "launch.py" else ["-m", "titan_hydra.cli", words[0]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*DROP, sys.executable, *program, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def give(path, mode):
    """Give a file or folder to the other user."""
    path.chmod(mode)
    os.chown(path, COLLEAGUE, COLLEAGUE)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Return a folder with two single runs, `mine` and `theirs`, and a sweep of two runs."""
    folder = tmp_path_factory.mktemp("lab")
    for words in (["name=mine"], ["name=theirs"], ["-m", "name=swept", "seed=1,2"]):
        line = ("debug=tiny", "steps=2", "checkpoint=off", "gpus=1", "cluster=inline", *words)
        done = forked.run("launch.py", line, folder, os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--all"],
        ["report"],
        ["logs", "mine"],
        ["resume"],
        ["resume", "mine", "steps=4"],
        ["stop"],
        ["compare", "mine", "theirs"],
        ["launch.py", "debug=tiny", "steps=2", "checkpoint=off", "gpus=1", "name=mine"],
        ["launch.py", "debug=tiny", "launch.mode=dry"],
    ],
)
def test_a_closed_folder_of_runs_is_one_line(lab, words):
    give(lab / "runs", 0o700)
    try:
        status, out, err = run(lab, *words)
    finally:
        os.chown(lab / "runs", 0, 0)
    key = "paths.runs" if words[0] == "launch.py" else "--runs"
    assert (status, out, err.count("\n")) == (2, "", 1), out + err
    assert err.startswith(f"{key}=") and err.endswith(f"Permission denied: {lab}/runs {ALICE}, drwx------\n"), err


def test_a_closed_run_among_others_has_a_line(lab):
    (theirs,), (manifest,) = (lab / "runs").glob("theirs-*"), (lab / "runs/_sweeps").glob("*/manifest.json")
    give(theirs, 0o700)
    give(manifest, 0o600)
    try:
        status, out, err = run(lab, "status", "--all")
        assert status == 0 and f"Permission denied: {theirs} {ALICE}, drwx------" in out and "mine-" in out, out + err
        status, out, err = run(lab, "status")
        assert status == 0 and "4 cells: 3 done, 1 damaged" in out and f"{theirs} {ALICE}" in out, out + err
        assert err == f"{manifest} cannot be read: its sweep is left out\n"
        assert json.loads(run(lab, "status", "--json")[1])["cells"]
        for words in (
            ["report", "theirs"],
            ["logs", "theirs"],
            ["resume", "theirs", "steps=4"],
            ["compare", "mine", "theirs"],
            ["checkpoint", "ls", "theirs"],
            ["launch.py", "debug=tiny", "steps=2", "checkpoint=off", "gpus=1", "name=theirs"],
        ):
            status, out, err = run(lab, *words)
            # the line about the manifest is printed once for each of the two targets
            said = err.replace(f"{manifest} cannot be read: its sweep is left out\n", "")
            assert (status, said.count("\n")) == (2, 1) and f"{theirs} {ALICE}, drwx------" in said, (words, out, err)
    finally:
        os.chown(theirs, 0, 0)
        os.chown(manifest, 0, 0)


def test_runs_that_may_only_be_read_are_not_written(lab):
    (theirs,) = (lab / "runs").glob("theirs-*")
    for path in (theirs, theirs / "attempts"):
        give(path, 0o755)
    try:
        assert run(lab, "status", "theirs")[0] == 0
        status, out, err = run(
            lab, "launch.py", "debug=tiny", "steps=2", "checkpoint=off", "gpus=1", "name=theirs", "launch.force=true"
        )
        assert (status, err.count("\n")) == (2, 1) and f"{ALICE}, drwxr-xr-x" in err, out + err
    finally:
        for path in (theirs, theirs / "attempts"):
            os.chown(path, 0, 0)
