"""Optuna's journal as the state of a search: what is drawn does not depend on kills, and a broken last line is cut."""

import contextlib
import errno
import json
import os
import random
import re
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import process
from titan_hydra.instruments.search.journal import COMPLETE, FAILED, PRUNED, Journal, mended_journal
from titan_hydra.instruments.search.keys import OptunaSearch
from titan_hydra.instruments.search.lines import JournalDamaged, leased, locked, section_of_report
from titan_hydra.instruments.search.space import space_of
from titan_hydra.instruments.search.summary import summary_of

LINES = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.n_layers=tag(int,interval(1,4))", "ac=none,op")


def space(*lines: str):
    return space_of([OverridesParser.create().parse_override(line) for line in lines])


def drawn(folder, search, count: int, anew: bool) -> list[list[str]]:
    """Draw trials, each from a journal that is mended_journal anew, or all from one; some fail, some wait at a length."""
    folder.mkdir()
    journal = Journal(folder)
    for number in range(count):
        if anew:
            journal = Journal(folder)
        trial = journal.draw(space(*LINES), search)
        if number % 5 == 1:
            journal.tell(trial, FAILED, reason="a node")
        elif number % 5 == 2:
            journal.tell(trial, PRUNED, reason="not finite")
        else:
            journal.report(trial, 10, number % 7 + trial.params["optimizer.lr"])
            if number % 5 == 3:
                journal.tell(trial, COMPLETE, [1.0])
    return [trial.overrides for trial in Journal(folder).trials()]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_is_drawn_depends_on_the_journal_alone(tmp_path, sampler):
    search = OptunaSearch("optuna", trials=20, sampler=sampler)
    one, other = drawn(tmp_path / "one", search, 16, False), drawn(tmp_path / "two", search, 16, True)
    assert one == other and len({*map(tuple, one)}) == 16
    rates = [float(trial[0].partition("=")[2]) for trial in one]
    assert all(1e-4 <= rate <= 1e-1 and len(f"{rate:g}") < 12 for rate in rates)
    assert {trial[1] for trial in one} <= {f"model.n_layers={number}" for number in range(1, 5)}


def test_no_trial_is_drawn_twice_and_the_space_may_end(tmp_path):
    for sampler in ("tpe", "random", "grid"):
        (tmp_path / sampler).mkdir()
        journal, few = Journal(tmp_path / sampler), space("ac=none,op", "model.n_layers=1,2,3")
        search = OptunaSearch("optuna", sampler=sampler)
        found = []
        while trial := journal.draw(few, search):
            journal.tell(trial, COMPLETE, [float(trial.number)])
            found.append(tuple(trial.overrides))
        assert len(found) == len({*found}) == 6, sampler


def test_one_driver_at_a_time_and_an_unfinished_line_is_cut(tmp_path):
    journal = Journal(tmp_path)
    journal.draw(space(*LINES), OptunaSearch("optuna"))
    file = tmp_path / "optuna.journal"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":4,"wor')
    with locked(tmp_path):
        assert file.read_bytes() == whole
        with pytest.raises(ConfigError, match="another process drives this search"), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert len(Journal(tmp_path).trials()) == 1


def a_journal(folder) -> bytes:
    """Write the journal of a small search, and return its bytes."""
    journal = Journal(folder)
    for number in range(3):
        trial = journal.draw(space(*LINES), OptunaSearch("optuna"))
        journal.note_run(trial, 10, f"run-{number}")
        journal.report(trial, 10, 9.5 - number)
        journal.tell(trial, COMPLETE, [9.5 - number])
    journal.confirm(trial, 2, "run-9", 7.5)
    return (folder / "optuna.journal").read_bytes()


WHOLE = (space(*LINES), OptunaSearch("optuna"))


def results(run: str) -> list[float] | None:
    return {"run-0": [9.5], "run-1": [8.5], "run-2": [7.5], "run-9": [7.5]}.get(run)


def test_every_change_of_a_journal_is_seen_and_it_is_made_again(tmp_path, capsys):
    whole, file = a_journal(tmp_path), tmp_path / "optuna.journal"
    table = Journal(tmp_path).trials()
    lines, rng = whole.splitlines(keepends=True), random.Random(3)
    changed = [
        whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :] for at in range(0, len(whole), 37)
    ]
    changed += [
        b"".join(lines[:4] + lines[5:]),
        b"".join([*lines[:4], b"\n", *lines[4:]]),
        b"".join(lines[:3] + lines[4:2:-1]),
    ]
    changed += [
        whole.replace(b'"values":[9', b'"values":[2'),
        b"".join([*lines[:4], lines[4][:20] + b"\n", *lines[5:]]),
    ]
    changed += [whole[:200] + bytes(40) + whole[240:], b"".join([lines[0], *lines]), b"[]\n" + whole, whole + b"{}\n"]
    for content in changed:
        file.write_bytes(content)
        try:
            seen = Journal(tmp_path).trials() != table
        except JournalDamaged:
            seen = True
        if not seen:  # a change that no reader sees, such as a letter of a number's exponent
            continue
        if content.endswith(b"\n"):  # a last line that is incomplete is cut, as after a power cut
            journal = mended_journal(tmp_path, ["minimize"], results, *WHOLE)
            told = capsys.readouterr().err
            assert "optuna.journal.damaged" in told and told.count("\n") == 1, content
            assert journal.trials()[: len(journal.trials())] == journal.trials() and not journal.differs(results)
            trial = journal.draw(space(*LINES), OptunaSearch("optuna"))
            assert trial is not None and Journal(tmp_path).trials()[-1] == trial
            (tmp_path / "optuna.journal.damaged").unlink()


def test_lines_without_checksums_are_compared_with_the_results_of_runs(tmp_path, capsys):
    """An earlier version has written them."""
    whole, file = a_journal(tmp_path), tmp_path / "optuna.journal"
    old = re.sub(rb',"crc32":"[0-9a-f]{8}"', b"", whole)
    for content, right in (
        (old, True),
        (old.replace(b'"values":[9', b'"values":[2'), False),
        (old.replace(b'"value":7.5', b'"value":1.5'), False),
        (old.replace(b'"overrides"', b'"overridex"'), False),
    ):
        file.write_bytes(content)
        journal = mended_journal(tmp_path, ["minimize"], results, *WHOLE)
        assert bool(capsys.readouterr().err) is not right, content
        assert len(journal.trials()) == (3 if right else 0)
    file.write_bytes(old)
    journal = mended_journal(tmp_path, ["minimize"], results, *WHOLE)
    journal.draw(space(*LINES), OptunaSearch("optuna"))  # its lines have checksums, also over the old ones
    file.write_bytes(file.read_bytes().replace(b'"values":[9', b'"values":[2'))
    with pytest.raises(JournalDamaged):
        Journal(tmp_path)


def test_a_file_system_without_locks_has_a_lease(tmp_path, monkeypatch):
    def without(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", without)
    lease = tmp_path / "driver.lease"
    with locked(tmp_path):
        with pytest.raises(ConfigError, match="another process drives this search"), locked(tmp_path):
            pass
        assert lease.exists()
    assert not lease.exists()
    dead = subprocess.Popen(["true"])
    record = process(dead.pid) | {"born": "x"}
    dead.wait()
    lease.write_text(json.dumps(record))
    with locked(tmp_path):  # the driver that held it was killed
        pass
    lease.write_text(json.dumps(record | {"host": "elsewhere"}))
    with pytest.raises(ConfigError, match="on elsewhere"), leased(lease):
        pass
    os.utime(lease, (1, 1))  # no sign of life for long
    with leased(lease):
        assert json.loads(lease.read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["driver.lock"]


@pytest.mark.parametrize("kind", ["empty", "pipe", "endless", "sparse"])
def test_reading_a_search_writes_nothing_and_opens_only_plain_files(tmp_path, kind):
    """The report of another person's search, which a driver may be writing just now."""
    file = tmp_path / "optuna.journal"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 1 << 36 if kind == "sparse" else 0)
    before = os.lstat(file)
    with pytest.raises(JournalDamaged):
        summary_of(tmp_path)
    assert os.lstat(file) == before


def test_lines_that_are_lost_at_the_end_are_seen_and_made_again(tmp_path, capsys):
    """A cut file, or one of a backup: what is left of it is intact, and names the winner of fewer trials."""
    folder, runs = tmp_path / "runs/_sweeps/one", tmp_path / "runs"
    folder.mkdir(parents=True)
    journal, cells = Journal(folder), []
    for number in range(4):
        trial = journal.draw(space(*LINES), OptunaSearch("optuna"))
        for steps in (5, 10):
            run = runs / f"run-{number}-{steps}"
            run.mkdir()
            before = str(runs / f"run-{number}-5/checkpoints/step-5") if steps == 10 else None
            layout.CONFIG.write(run, {"model": {}, "steps": steps, "checkpoint": {"initial_load_path": before}})
            layout.RESULT.write(run, {"status": "done", "validation_loss": 10.0 - number - steps / 100})
            journal.note_run(trial, steps, run.name)
            journal.report(trial, steps, 10.0 - number - steps / 100)
        journal.tell(trial, COMPLETE, [10.0 - number - 0.1])
        cell = {"name": f"trial {number}", "overrides": ["steps=10", *trial.overrides], "directory": run.name}
        cells.append(cell | {"trial": number, "seed": None})
    layout.SWEEP.write(folder, {"name": "s", "command": [], "baseline": None, "cells": cells})
    whole, table = (folder / "optuna.journal").read_bytes(), journal.trials()
    assert summary_of(folder).winner == table[3] and not summary_of(folder).unfinished
    lines = whole.splitlines(keepends=True)
    for kept in range(len(lines)):
        (folder / "optuna.journal").write_bytes(b"".join(lines[:kept]))
        with contextlib.suppress(JournalDamaged):
            summary = summary_of(folder)
            assert summary.unfinished and any(trial.open for trial in summary.trials), kept
            assert "winner: " not in "".join(summary.notes())
        journal = mended_journal(folder, ["minimize"], lambda run: None, *WHOLE)
        warned = capsys.readouterr().err
        assert warned.count("\n") == bool(warned) == (folder / "optuna.journal.damaged").exists()
        assert [trial.overrides for trial in journal.trials()] == [trial.overrides for trial in table]
        for trial, known in zip(journal.trials(), table, strict=True):
            assert trial.runs == known.runs and trial.values.items() <= known.values.items() and 5 in trial.values, kept
        assert not Journal(folder).lacks(cells) and not (warned and kept > len(lines) - 3)
        (folder / "optuna.journal.damaged").unlink(missing_ok=True)
    (folder / "optuna.journal").unlink()
    assert section_of_report(folder) is None and "search's table is left out" in capsys.readouterr().err
