"""Test that what the words print as tables fits a terminal of 80 columns, with runs and sweeps of long names, and that
each run's hash stays whole.
"""

import re

import pytest

from titan_hydra import cli

NAME = "llama3_8b, fsdp_tp_pp_cp, float8_rowwise, a long name of cell"
RESULT = {"tokens_per_second": 123456.7, "tokens_per_second_iqr": 2000.0, "measured_steps": 100, "device": "H100"}


@pytest.fixture(scope="module")
def runs(new_sweep, tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow") / "runs"
    sweep = new_sweep(folder)
    sweep.name = "a_study_with_a_very_long_name_that_nobody_would_type_twice"
    for number in range(3):
        path = f"/a/path/that/goes/on/and/on/and/one/more/folder/{number}/corpus-*.jsonl"
        changes = {"optimizer.lr": 1e-3 * (number + 1), "data.path": path}
        sweep.cell(f"{NAME} {number}", changes, losses=[5.0 - number / 10] * 60, result=RESULT)
    return sweep


@pytest.mark.parametrize(
    ("line", "hashes"),
    [
        ("status", True),
        ("status --all", False),
        ("report", False),
        ("compare A B", True),
        ("plan model=llama3_8b hardware=h100 gpus=8,16", False),
        ("rates goodput model=llama3_70b hardware=h100 gpus=1024", False),
    ],
)
def test_a_table_fits_80_columns(line, hashes, runs, monkeypatch, capsys):
    if line.split()[0] not in cli.COMMANDS:
        pytest.skip("the instrument is not there")
    runs.report(capsys)
    names = [cell["directory"] for cell in runs.cells]
    known = [name[-8:] for name in names]
    words = [{"A": known[0], "B": known[1]}.get(word, word) for word in line.split()]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(runs.runs.parent)
    assert cli.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    # lines to paste stay whole
    columns = [text for text in out if "  " in text and not re.match(r" +(\d+ +python|titan) ", text)]
    assert columns and max(map(len, columns)) <= 80, max(columns, key=len)
    assert not hashes or all(name in "\n".join(columns) for name in known[: 2 if "A" in line else 3])
