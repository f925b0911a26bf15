"""Runs of somebody else: commands that only read import nothing of theirs, open only plain files of a bounded size, and
print no escape sequence. docs/installation.md promises this.
"""

import json
import os
import shutil
import sys

import pytest

from titan_hydra import cli
from titan_hydra.core.job.config.user_code import digest
from titan_hydra.core.job.run import layout

from .test_damage import OOM, PROCESS, RESULT, healthy, rows  # noqa: F401  (healthy is a fixture)

READING = [
    ("status",),
    ("status", "--json"),
    ("status", "--all"),
    ("status", "-f"),
    ("logs", "RUN"),
    ("logs", "RUN", "--guilty"),
    ("logs", "RUN", "--hang"),
    ("report", "runs", "--allow", "seed"),
    ("report", "runs", "--md", "--allow", "seed"),
    ("report", "runs", "--row"),
    ("report", "runs", "--predicted", "--allow", "seed"),
    ("report", "RUN"),
    ("compare", "RUN", "fine"),
    ("checkpoint", "ls", "RUN"),
]
FILES = (
    "config.json",
    "env.json",
    "result.json",
    "metrics.jsonl",
    "events.jsonl",
    "overrides.txt",
    "attempts/1/attempt.json",
    "attempts/1/ranks.json",
    "attempts/1/rank_0.json",
    "attempts/1/rank_0.log",
    "attempts/1/beat_0.json",
    "attempts/1/flight_0.json",
    "attempts/1/status.json",
    "attempts/1/cancelled",
)


@pytest.fixture
def others(healthy, tmp_path, monkeypatch):  # noqa: F811
    """Return the directories of a run that is done and of one that failed, in a copy of the sound folder of runs."""
    made, places = healthy
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / places["done"], tmp_path / "runs" / places["failed"]


def read_all(run, capsys):
    """Run every command that only reads; return what they have printed."""
    printed = ""
    for command in READING:
        status = cli.main([run.name if word == "RUN" else word for word in command])
        out, err = capsys.readouterr()
        assert status in (0, 2), (command, status, err)
        printed += out + err
    return printed


@pytest.mark.parametrize("kind", ["pipe", "endless", "loop", "socket", "sparse"])
def test_only_plain_files_of_a_bounded_size_are_opened(others, kind, capsys):
    """A log is a stream, which `titan logs` prints at any size."""
    for run in others:
        for name in FILES:
            path = run / name
            path.unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "socket":
                os.mknod(path, 0o140644)
            elif kind == "sparse":
                path.touch()
                os.truncate(path, 1 << 36 if path.suffix != ".log" else 0)
            else:
                path.symlink_to("/dev/zero" if kind == "endless" else path.name)
        read_all(run, capsys)


@pytest.mark.parametrize("digested", [False, True])
def test_nothing_of_theirs_is_imported(others, digested, capsys, tmp_path, monkeypatch):
    (tmp_path / "evil_mod.py").write_text("open('pwned', 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for run in others:
        config = json.loads((run / "config.json").read_text())
        config["train"] |= {"imports": ["evil_mod"], "sources": digest(["evil_mod"]) if digested else None}
        (run / "config.json").write_text(json.dumps(config))
        (run / "attempts/1/attempt.json").write_text(
            json.dumps(PROCESS | {"started": 10.0, "overrides": [], "executor": "evil"})
        )
        (run / "result.json").unlink(missing_ok=True)
        if digested:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        read_all(run, capsys)
    assert not (tmp_path / "pwned").exists() and "evil_mod" not in sys.modules


def test_no_escape_sequence_is_printed(others, capsys):
    bad = "\x1b[2J\x1b]0;title\x07\x9b31m\x08\r\u202e\u2028"
    for run in others:
        (run / "result.json").write_text(json.dumps(RESULT | {"device": bad, "git_sha": bad}))
        (run / "overrides.txt").write_text(f"name={bad}\n")
        events = [{"event": "tasks", "step": 12, "task": bad, "acc": 0.5, "acc_norm": 0.5}]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (run / "metrics.jsonl").write_bytes(rows(lambda row: row | {bad: 1}))
        (run / "attempts/1/rank_0.log").write_text(f"step {bad}\n")
        (run / "env.json").write_text(
            json.dumps({"git_sha": bad, "git_diff": bad, "git_untracked": [bad], "versions": {bad: bad}})
        )
    failed = others[1]
    (failed / "result.json").unlink()
    process = PROCESS | {"host": f"node{bad}"}
    error = OOM | {"type": bad, "message": bad, "traceback": bad, "host": bad}
    (failed / "attempts/1/rank_0.json").write_text(json.dumps(process | {"exit_status": 76, "error": error}))
    printed = read_all(failed, capsys) + read_all(others[0], capsys)
    assert not [character for character in printed if not character.isprintable() and character not in "\n\t"]


def test_a_number_in_a_name_is_bounded(others):
    """Readers count from rank 0 to the largest one."""
    for name in ("rank_99999999999999999999.json", "rank_1000000.json", "rank_007.json"):
        (others[1] / "attempts/1" / name).write_text(json.dumps(PROCESS))
    assert list(layout.RANK.all(others[1] / "attempts/1")) == [0]
