"""Which cases `titan verify` runs, and what is refused before any of them is composed."""

import pytest

from titan_hydra import cli
from titan_hydra.instruments.verify.matrix import whole_matrix

NAMES = [case.name for case in whole_matrix()]


def listed(capsys, *words):
    assert cli.main(["verify", "--list", *words]) == 0
    return [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("fsdp 4", lambda name: name == "fsdp 4"),
        ("*fsdp 4", lambda name: "fsdp 4" in name),
        ("fsdp 4*tp 2", lambda name: "tp 2" in name.partition("fsdp 4")[2]),
        ("dp 4, ", lambda name: "dp 4, " in name),  # a text that no case has as its name
        ("", lambda name: True),
    ],
)
def test_an_exact_name_is_that_case_and_else_a_pattern(only, wanted, capsys):
    assert listed(capsys, "--only", only) == [name for name in NAMES if wanted(name)]


def test_each_case_can_be_named_alone():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.imports=[no_such_module]", "model.family=squared"], "there is no module no_such_module"),
        (["--write", "nowhere/page.md"], "--write nowhere/page.md: there is no folder"),
        (["--only", "fsdpp 4"], "fsdp 4"),
        (["fsdp 4"], "--only 'fsdp 4'"),
    ],
)
def test_what_is_wrong_is_one_line_before_the_matrix_is_composed(words, line, capsys):
    assert cli.main(["verify", *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1, err
