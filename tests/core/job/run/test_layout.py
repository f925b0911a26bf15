"""Each file of a run directory has one name, which is written only in layout.py and in the map in docs/architecture.md."""

import ast
import json
from pathlib import Path

import pytest

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.layout import Entry
from titan_hydra.experiments.launch.executors.slurm import sbatch
from titan_hydra.experiments.runs import rundir

ROOT = Path(__file__).parents[4]
ENTRIES = [entry for entry in vars(layout).values() if isinstance(entry, Entry)]
# These names have another meaning too: Hugging Face's config.json, options, signals, SLURM's programs.
OTHERS = {
    "core/checkpoint/convert.py",
    "core/job/inputs.py",
    "core/checkpoint/folder.py",
    "core/data/facts.py",
    "recipes/flux/encoders.py",
    "instruments/verify/export.py",
    "recipes/transformers/hf.py",
}


def test_the_map_has_every_file():
    assert layout.table_of_files() in (ROOT / "docs/architecture.md").read_text()
    assert {
        *layout.OF_RUN,
        *layout.OF_ATTEMPT,
        layout.SWEEPS,
        layout.SWEEP,
        layout.RATES,
        layout.JOURNAL,
        layout.DRIVER,
        layout.LEASE,
        layout.CODE,
        layout.CODE_STATE,
        layout.FILES,
        layout.FILES_TABLE,
        layout.GONE,
        layout.GONE_RUN,
        layout.ARCHIVED,
        layout.PROOFS,
        layout.PROOF,
    } == set(ENTRIES)


def test_file_names_stand_in_the_layout_alone():
    """Only layout.py contains the names of files, except in docstrings, messages and the batch script."""
    names = {entry.name for entry in ENTRIES if "." in entry.name} | {
        "attempts",
        "checkpoints",
        "meetings",
        "_sweeps",
        "_code",
    }
    for file in (ROOT / "titan_hydra").rglob("*.py"):
        if file.name != "layout.py" and file.relative_to(ROOT / "titan_hydra").as_posix() not in OTHERS:
            constants = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
            assert not names & constants, file


def test_the_batch_script_uses_names_of_the_layout():
    for entry in (
        layout.CLAIM,
        layout.OWN_JOB,
        layout.JOB_LOG,
        layout.EXIT,
        layout.STOPPED,
        layout.CANCELLED,
        layout.SPENT,
    ):
        assert f'/{entry.name}"' in sbatch.BODY or f"/{entry.name} " in sbatch.BODY, entry.name
    assert f'"$1/{layout.ATTEMPT.of(Path()).parent}"' in sbatch.BODY


def test_numbered_files(tmp_path):
    for name in ("rank_0.json", "rank_10.json", "rank_2.json", "rank_2.json.bak", "rank_x.json", "rank_02.json"):
        (tmp_path / name).write_text('{"pid": 1}')
    assert list(layout.RANK.all(tmp_path)) == [0, 2, 10] and layout.RANK.read_all(tmp_path)[10] == {"pid": 1}
    for name in ("1", "12", "1.bak", ".job-3"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert layout.ATTEMPT.all(tmp_path) == {1: tmp_path / "attempts/1", 12: layout.ATTEMPT.of(tmp_path, 12)}


def test_two_manifests_of_one_name_have_shapes_of_their_own(tmp_path):
    step = {"step": 3, "world_size": 1, "time": 1.0, "files": {"x": {"bytes": 1, "crc32": "00"}}}
    sweep = {"name": "s", "command": [], "baseline": None, "cells": []}
    for mine, entry, other in ((step, layout.MANIFEST, layout.SWEEP), (sweep, layout.SWEEP, layout.MANIFEST)):
        entry.write(tmp_path, mine)
        assert entry.read(tmp_path) == mine and other.read(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "rows", "damaged"),
    [
        ('{"event": "a", "step": 1}\n', [1], 0),
        ('{"event": "a", "step": 1}\n{"event": "a", "st', [1], 0),
        ('{"event": "a", "step": 1}', [1], 0),
        ('\n{"event": "a"}\nx\n{"event": "b", "step": 2}\n', [2], 2),
        ("", [], 0),
    ],
)
def test_rows(tmp_path, text, rows, damaged):
    (tmp_path / "events.jsonl").write_text(text)
    found, count = layout.EVENTS.rows(tmp_path)
    assert ([row["step"] for row in found], count) == (rows, damaged)
    assert layout.EVENTS.last(tmp_path) == (json.loads(json.dumps(found[-1])) if rows else {})


def test_a_submitted_attempt_needs_what_its_state_is_read_from(tmp_path):
    owner = {"pid": 1, "host": "a", "born": None, "started": 1.0, "executor": "slurm"}
    submitted = {"job_id": None, "token": "t", "user": "u"}
    for content, intact in ((owner, True), (owner | submitted, True), (owner | {"token": "t"}, False)):
        layout.CLAIM.write(tmp_path, content)
        assert bool(layout.CLAIM.read(tmp_path)) is intact
    layout.ATTEMPT.of(tmp_path, 1).mkdir(parents=True)
    layout.CLAIM.write(layout.ATTEMPT.of(tmp_path, 1), owner)
    assert rundir.state(tmp_path).kind == "interrupted", "as without a record"


def test_a_changed_digit_of_a_row_is_seen(tmp_path):
    rows = [{"step": step, "loss": 9.25 - step, "mfu": None} for step in (1, 2, 3)]
    file = layout.METRICS.of(tmp_path)
    whole = b"".join(map(layout.with_sum, rows))
    file.write_bytes(whole)
    assert layout.METRICS.rows(tmp_path) == (rows, 0) and layout.METRICS.last(tmp_path) == rows[-1]
    for before, after in ((b"8.25", b"3.25"), (b'"step": 1', b'"step": 4'), (b'"mfu"', b'"mfv"'), (b'": "', b'":  "')):
        file.write_bytes(whole.replace(before, after, 1))
        assert layout.METRICS.rows(tmp_path) == (rows[1:], 1), after
    for at in range(whole.index(b"\n")):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found, damaged = layout.METRICS.rows(tmp_path)
        # a change in the name of the checksum leaves the numbers as they are
        assert (found, damaged) == (rows[1:], 1) or found[0].items() >= rows[0].items(), at
    old = json.dumps(rows[0]).encode() + b"\n"  # an earlier version's
    file.write_bytes(old + whole)
    assert layout.METRICS.rows(tmp_path) == (rows[:1] + rows, 0)


def test_a_changed_number_of_a_result_is_seen(tmp_path):
    """A result with another checksum counts as absent, and one of an earlier version, without a checksum, is read."""
    result = {"status": "done", "name": "é", "final_loss": 4.9477, "tokens": 320, "tasks": {}, "mfu": None}
    layout.RESULT.write(tmp_path, result)
    assert layout.RESULT.read(tmp_path) == result
    file = layout.RESULT.of(tmp_path)
    whole = json.dumps(result | {layout.CHECKSUM: layout.sum_of(result)})
    for text in (whole, json.dumps(json.loads(whole), indent=4)):
        file.write_text(text)
        assert layout.RESULT.read(tmp_path) == result
    for at, letter in enumerate(whole[: whole.index(layout.CHECKSUM)]):
        if letter.isdigit():
            file.write_text(whole[:at] + str((int(letter) + 1) % 10) + whole[at + 1 :])
            assert layout.RESULT.read(tmp_path) == {}, whole[at - 10 : at + 2]
