"""Test the titan commands on real local runs: a sweep with a cell that is done and one that failed, and a sweep that is
running.
"""

import json
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from titan_hydra import cli
from titan_hydra.core.base.text import table
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.experiments.report import command_compare as compare
from titan_hydra.experiments.runs import view

BUG = 'if self.job.seed == 2: raise ValueError("unlucky rank")'
MEMORY = 'import torch; raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")'


@pytest.fixture(scope="module")
def swept(launcher_of_module):
    """Return a folder with two runs of two ranks: seed 1 is done, seed 2 failed by a bug on rank 1."""
    launcher_of_module.sabotage_step_3(1, BUG)
    assert launcher_of_module.run("-m", *launcher_of_module.TINY, "gpus=2", "seed=1,2").returncode == 1
    return launcher_of_module


@pytest.fixture
def titan(swept, monkeypatch, capsys):
    """Run a command in the swept folder. Return exit status, stdout and stderr."""
    monkeypatch.chdir(swept.folder)

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return int(status), *capsys.readouterr()

    return run


def hash_of(swept, seed):
    (found,) = [
        file.parent.name.rpartition("-")[2]
        for file in swept.folder.glob("runs/*/config.json")
        if json.loads(file.read_text())["seed"] == seed
    ]
    return found


def run_of(swept, seed):
    """Return name and hash of the run of a seed."""
    (name,) = [
        file.parent.name
        for file in swept.folder.glob("runs/*/config.json")
        if json.loads(file.read_text())["seed"] == seed
    ]
    return name, name.rpartition("-")[2]


def test_status_tells_how_cells_stand_and_what_to_type(swept, titan):
    status, out, err = titan("status")
    assert (status, err) == (0, "")
    done, failed = (
        next(line.split() for line in out.splitlines() if run_of(swept, seed)[1] in line) for seed in (1, 2)
    )
    assert done[:4] == ["seed=1", run_of(swept, 1)[1], "done", "5/5"]
    assert failed[:4] == ["seed=2", run_of(swept, 2)[1], "failed", "3/5"] and failed[-1] == "bug"
    assert "bug: rank 1: ValueError: unlucky rank" in out
    assert "2 cells: 1 done, 1 failed (bug)" in out
    assert f"titan logs {run_of(swept, 2)[1]} --guilty" in out


def test_status_for_scripts(swept, titan):
    done, failed = json.loads(titan("status", "--json")[1])["cells"]
    result = json.loads((swept.folder / "runs" / run_of(swept, 1)[0] / "result.json").read_text())
    assert (done["state"], done["step"], done["steps"], done["loss"]) == ("done", 5, 5, result["final_loss"])
    assert failed["state"] == "failed" and failed["failure"]["kind"] == "bug" and failed["failure"]["rank"] == 1
    assert [cell["hash"] for cell in json.loads(titan("status", run_of(swept, 2)[1][:6], "--json")[1])["cells"]] == [
        run_of(swept, 2)[1]
    ]


def test_logs_are_those_of_the_rank_that_was_asked_for(swept, titan):
    (name, one), (_, two) = run_of(swept, 1), run_of(swept, 2)
    assert "step 5/5" in titan("logs", one)[1]
    assert titan("logs", one, "-n", 1)[1].count("\n") == 1
    log = titan("logs", two, "--rank", 1)[1]
    assert "ValueError: unlucky rank" in log and "step 2/5" not in log
    words = titan("logs", two, "--guilty")[1]
    assert words.startswith("bug: rank 1: ValueError: unlucky rank") and "Traceback" in words and "rank_1.log" in words
    assert titan("logs", one, "--guilty")[::2] == (2, f"{name}: done, and no rank is at fault\n")
    assert titan("logs", one, "--rank", 9)[::2] == (2, f"--rank=9: attempt 1 of {name} has ranks 0 to 1\n")
    assert titan("logs", one, "--attempt", 4)[::2] == (2, f"--attempt=4: {name} has only attempt 1\n")
    _, out, err = titan("logs", one, "-f")
    assert "step 5/5" in out and err.endswith("done\n")


def test_compare_shows_what_differs_and_nothing_else(swept, titan):
    _, out, _ = titan("compare", run_of(swept, 1)[1], run_of(swept, 2)[1])
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "1", "2", "learning"] in rows and ["state", "done", "failed"] in rows
    assert "optimizer.lr" not in out and "no difference in code and versions" in out
    assert "loss: other bits from step 1: " in out and "modules: A and B traced no activations" in out
    assert "no difference in configuration" in titan("compare", run_of(swept, 1)[1], run_of(swept, 1)[1])[1]


def test_status_of_all_send_and_completion(swept, titan):
    (line,) = titan("status", "--all")[1].splitlines()[1:]
    assert line.startswith("seed-") and "1 done, 1 failed" in line  # the runs of a sweep have no lines of their own
    assert "nothing to send" in titan("report", "--send")[1]
    assert titan(f"--completion-words=logs {run_of(swept, 1)[1][:6]}")[1].split() == [run_of(swept, 1)[1]]
    assert titan("--completion-words=logs --g")[1].split() == ["--guilty"]
    assert titan("--completion-words=sto")[1].split() == ["stop"]
    assert titan("--completion-words=resume --only o")[1].split() == ["oom"]


def test_what_nobody_can_mean_is_one_line(swept, titan):
    status, out, err = titan("status", "zzz")
    assert (status, out, err.count("\n")) == (2, "", 1) and "zzz: no such run or sweep" in err
    status, out, err = titan("logs", "runs")
    assert status == 2 and "2 runs, and one is needed" in err
    status, _, err = titan("status", "runs", "--all")
    assert status == 2 and err.startswith("--all runs: lists everything in --runs=runs") and err.count("\n") == 1
    status, _, err = titan("status", "--runs", "nowhere")
    assert status == 2 and err == "--runs=nowhere: no such folder; start a run first, or say where the runs are\n"


def test_retry_runs_what_can_help_and_only_that(swept, titan):
    assert "nothing to run again" in titan("resume", "--only", "node", "--only", "interrupted")[1]
    swept.sabotage_step_3(1, MEMORY)
    done = subprocess.run(
        [sys.executable, "-m", "titan_hydra.cli", "resume"],
        cwd=swept.folder,
        env=environment(swept),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 76, done.stdout + done.stderr
    cells = json.loads(titan("status", "--json")[1])["cells"]
    assert [(cell["state"], cell["attempt"]) for cell in cells] == [("done", 1), ("failed", 2)]
    assert "ValueError" in titan("logs", run_of(swept, 2)[1], "--attempt", 1, "--rank", 1)[1]
    status, out, _ = titan("resume", "--only", "oom")
    assert status == 0 and "it would fail again" in out and f"gpus=2 seed=2 {cells[1]['failure']['hint']}" in out
    # the retry made no sweep of its own
    assert "nothing to run again" in out and len(titan("status", "--all")[1].splitlines()) == 2


@pytest.mark.parametrize(
    ("phase", "still", "unheard", "step_seconds", "silent"),
    [
        ("forward, backward", 50, 0, 1.0, None),
        ("forward, backward", 70, 0, 1.0, 70),
        ("data", 70, 0, 8.0, None),
        ("data", 90, 0, 8.0, 90),
        ("data", 200, 0, None, None),
        ("data", 400, 0, None, 400),  # a longer time is allowed, as the first step compiles
        ("checkpoint", 500, 0, 1.0, None),
        ("checkpoint", 500, 90, 1.0, 90),
        ("start", 500, 0, None, None),
    ],
)
def test_a_run_is_silent_when_it_does_not_move_for_longer_than_it_may(phase, still, unheard, step_seconds, silent):
    beat = {"phase": phase, "since": 1000.0, "time": 1000.0 + still - unheard}
    assert view.silence(beat, 1000.0 + still, step_seconds) == silent


def environment(swept):
    """Return an environment whose Python path has this checkout and the launcher's sabotage."""
    return swept.env | {"PYTHONPATH": f"{swept.env.get('PYTHONPATH', '')}:{swept.ROOT}"}


def test_cancel_stops_a_running_cell_as_ctrl_c_would(launcher, monkeypatch, capsys):
    process = launcher.start("-m", *launcher.ENDLESS, "gpus=2", "seed=1,2")
    launcher.wait_for_step()
    monkeypatch.chdir(launcher.folder)
    assert cli.main(["stop"]) == 2  # there is no terminal for the question
    assert "--yes" in capsys.readouterr().err
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "1 running" in out and "to go" in out and "titan stop" in out
    follower = subprocess.Popen(
        [sys.executable, "-m", "titan_hydra.cli", "logs", "seed=1", "-f"],
        cwd=launcher.folder,
        env=environment(launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "running, attempt 1" in follower.stderr.readline()
    assert cli.main(["stop", "--yes"]) == 0
    assert "asked its launcher to save and stop" in capsys.readouterr().out
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143 and "asking all 2 ranks" in out, err
    out, err = follower.communicate(timeout=300)
    assert "its checkpoint is written" in out and "interrupted" in err
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "cancelled by" in out and "1 interrupted, 1 new" in out  # the second cell had not started


def test_tables_fit_into_the_terminal(monkeypatch):
    rows = [["a cell with a long name", "running", "1/10", "silent for 4 min"], ["b", "done", "10/10", ""]]
    arguments = (["cell", "state", "step", ""], rows, {"step"}, ("cell", ""), [{"state": "cyan"}, {"state": "green"}])
    assert table(*arguments)[1] == "a cell with a long name  running   1/10  silent for 4 min"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setenv("NO_COLOR", "1")
    cut = [
        "cell          state     step",
        "a cell with…  running   1/10  silent for 4 m…",
        "b             done     10/10",
    ]
    assert table(*arguments) == cut
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[36mrunning\x1b[0m" in table(*arguments)[1]


def test_copies_beside_attempts_and_ranks_are_no_attempts_and_no_ranks(swept, titan):
    attempt = max((swept.folder / "runs" / run_of(swept, 2)[0] / "attempts").iterdir())
    before = titan("status", "--json")[1], titan("logs", run_of(swept, 2)[1], "--guilty")[1]
    copies = [
        attempt.with_name(f"{attempt.name}.bak"),
        *(attempt / name for name in ("rank_1 (copy).json", "rank_1.old.json", "flight_1.bak.json")),
    ]
    shutil.copytree(attempt, copies[0])
    for copy in copies[1:]:
        shutil.copy(attempt / "rank_1.json", copy)
    try:
        assert (titan("status", "--json")[1], titan("logs", run_of(swept, 2)[1], "--guilty")[1]) == before
        assert titan("logs", run_of(swept, 2)[1], "--rank", 9)[0] == 2 and titan("logs", run_of(swept, 2)[1], "--hang")[
            0
        ] in (0, 2)
        again = swept.run("-m", *swept.TINY, "gpus=2", "seed=1,2")
        assert again.returncode in (1, 76) and again.stderr.endswith("launch.retry=failed runs it again\n"), (
            again.stderr
        )
    finally:
        shutil.rmtree(copies[0])
        for copy in copies[1:]:
            copy.unlink()


def test_commands_that_are_suggested_can_be_pasted(swept, titan, tmp_path):
    runs = tmp_path / "a $(touch pwned) b"
    shutil.copytree(swept.folder / "runs", runs)
    lines = [line.strip() for line in titan("status", "--runs", runs)[1].splitlines()]
    suggested = [shlex.split(line.partition("   ")[0]) for line in lines if line.startswith("titan ")]
    assert {words[1] for words in suggested} >= {"logs", "resume"} and all(str(runs) in words for words in suggested), (
        lines
    )


def test_send_takes_all_runs_and_ends_when_nobody_answers(tmp_path, monkeypatch, capsys):
    """A sweep of other cells was started last; two runs that do not belong to it have files to send."""
    runs = tmp_path / "runs"
    for name in ("swept-11111111", "alone-22222222", "other-33333333"):
        (runs / name / "attempts").mkdir(parents=True)
        (runs / name / "config.json").write_text("{}")
    manifest = runs / "_sweeps/swept-1/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(
        json.dumps(
            {
                "name": "swept",
                "command": [],
                "baseline": None,
                "cells": [{"name": "cell", "directory": "swept-11111111", "overrides": []}],
            }
        )
    )
    waiting = [runs / name / "wandb/offline-run-1" for name in ("alone-22222222", "other-33333333")]
    for folder in waiting:
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "--send", "--dry"]) == 0
    assert sorted(capsys.readouterr().out.split()) == [str(folder) for folder in waiting]
    assert cli.main(["report", "swept", "--send", "--dry"]) == 0 and "nothing to send" in capsys.readouterr().out
    with socket.socket() as silent:  # accepts the connection and sends nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setattr("titan_hydra.experiments.runs.copies.LIMIT", 0.2)
        assert cli.main(["report", "--send"]) == 1
    assert capsys.readouterr().err == f"wandb cannot be reached: {address}: timed out; nothing was sent\n"


@pytest.mark.parametrize(("change", "shown"), [(0.1234, "+12.3%"), (-0.0004, "-0.04%"), (-1e-9, "-1e-07%"), (None, "")])
def test_a_small_difference_is_not_zero(change, shown):
    assert compare.signed(change) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["+sweeps=x", "sweep.cell='DDP 2, TP 2'"],
        ["a=$(touch pwned)", "b='$HOME'"],
        ["c=[1,2]", "d=a b", ""],
        ["e=\"'`!\\"],
    ],
)
def test_a_line_that_is_shown_can_be_pasted(words):
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {quoted(words)}"], capture_output=True, text=True, check=True
    )
    assert shell.stdout.split("\n")[:-1] == words
