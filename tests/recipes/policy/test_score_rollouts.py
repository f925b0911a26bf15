"""`titan data score-rollouts`: its numbers, in float32 and bfloat16, and what it refuses."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import log_softmax

from tests.core.train.conftest import TINY
from tests.kits import forked
from titan_hydra import cli
from titan_hydra.core.checkpoint.opened import open_model
from titan_hydra.core.train.generate import load_model

GOOD = {"tokens": [1, 2, 3, 4, 5], "old_logprobs": [-1.0, -2.0], "advantages": 1.0, "id": "a"}
SHORT = {"tokens": [9, 8, 7], "old_logprobs": [-3.0], "advantages": [0.5], "id": "b"}
BAD = {"tokens": [1, 2, 3], "advantages": 1.0}


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    """Return a function that scores rows, with further words, and returns the exit status and the rows written."""
    folder = tmp_path_factory.mktemp("scored")
    words = (*TINY, "data=embedded_chat", "data.seq_len=64", "steps=1", "validation=off", "data.local_batch=2")
    assert forked.run("launch.py", [*words, "gpus=1"], folder, os.environ).returncode == 0
    (run,) = (folder / "runs").glob("*-*")

    def go(rows, *more, out=folder / "out.jsonl", model=run):
        file = folder / "rows.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        out.unlink(missing_ok=True)
        status = cli.main(["data", "score-rollouts", str(model), str(file), "--out", str(out), *more])
        return status, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    go.run, go.folder = run, folder
    return go


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("column", ["ref_logprobs", "old_logprobs"])
def test_each_sampled_token_gets_its_log_probability(score, column, dtype):
    status, (first, second) = score([GOOD, SHORT], "--column", column, "--dtype", dtype)
    opened = open_model(score.run)
    model = load_model(opened.reader, opened.config, 8, dtype)
    for row, given in ((first, GOOD), (second, SHORT)):
        with torch.no_grad():
            logs = log_softmax(model(torch.tensor([given["tokens"]]))[0].double(), -1)
        sampled = range(len(given["tokens"]) - len(given["old_logprobs"]), len(given["tokens"]))
        expected = [logs[place - 1, given["tokens"][place]].item() for place in sampled]
        # one forward per row of another length: in bfloat16, matmuls of other shapes round otherwise
        assert row[column] == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.02)
        assert {key: value for key, value in row.items() if key != column} == {
            key: value for key, value in given.items() if key != column
        }
    assert status == 0


def test_a_row_that_is_no_rollout_is_left_out_only_if_allowed(score, capsys):
    assert score([GOOD, BAD, SHORT]) == (2, [])
    assert "rows.jsonl:2: " in (line := capsys.readouterr().err) and line.endswith("--max-bad-rows=0\n")
    status, rows = score([GOOD, BAD, SHORT], "--max-bad-rows", "1")
    assert status == 0 and [row["id"] for row in rows] == ["a", "b"] and "rows.jsonl:2: " in capsys.readouterr().err


def test_rows_of_parquet_are_scored_alike(score):
    file, out = score.folder / "rows.parquet", score.folder / "of_parquet.jsonl"
    rows = [row | {"advantages": [1.0]} if row is SHORT else row | {"advantages": [1.0, 1.0]} for row in (GOOD, SHORT)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert cli.main(["data", "score-rollouts", str(score.run), str(file), "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == score(rows)[1]


@pytest.mark.parametrize(
    ("rows", "more", "begins"),
    [
        ([], (), ""),
        (["{no json\n"], (), ""),
        ([GOOD | {"tokens": [1, 99_999, 3]}], (), ""),
        ([GOOD | {"tokens": [True, 2, 3]}], (), ""),
        ([GOOD | {"old_logprobs": [-1.0] * 5}], (), ""),
        ([{key: value for key, value in GOOD.items() if key != "advantages"}], (), ""),
        ([GOOD | {"tokens": [1] * 200_000}], (), ""),
        ([GOOD], ("--step", "9"), "--step=9: "),
        ([GOOD], ("--max-bad-rows", "-1"), "--max-bad-rows=-1: "),
        ([GOOD], ("--imports", "nothing_of_this_name"), "--imports="),
        ([GOOD], ("--tokenizer", "nothing.json"), "tokenizer.path=nothing.json: "),
    ],
)
def test_what_cannot_be_scored_is_one_line_and_writes_nothing(score, rows, more, begins, capsys):
    assert score(rows, *more) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(begins or str(score.folder / "rows.jsonl"))


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_read(score, capsys):
    for place in (score.folder / "none" / "out.jsonl", score.folder):
        argv = ["data", "score-rollouts", "no_such_run", str(score.folder / "rows.jsonl"), "--out", str(place)]
        assert cli.main(argv) == 2
        assert capsys.readouterr().err.startswith(f"--out={place}: ")
    assert cli.main(["data", "score-rollouts", str(score.run), "none.jsonl", "--out", "x.jsonl"]) == 2
    assert capsys.readouterr().err == "none.jsonl: no such file\n"
