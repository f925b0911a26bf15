"""Every mutant names its place in the code and what should find it. A few mutants are planted, and found or missed as
they should be.
"""

import ast
import contextlib
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import titan_hydra
from tests.conftest import LONG
from tests.equivalence.cover import cover
from tests.equivalence.mutants import __main__ as command
from tests.equivalence.mutants import copy, corpus, trial
from tests.equivalence.mutants.mutant import Mutant
from titan_hydra.instruments.verify.matrix import whole_matrix

PACKAGE = Path(titan_hydra.__file__).parent
ROOT = Path(__file__).parents[2]
ALL = [mutant for mutants in corpus.SUBJECTS.values() for mutant in mutants]
FOUND = ("the norm counts copies", "AdamW's betas are exchanged", "expert gradients are doubled")
HARMLESS = Mutant(
    "nothing",
    "any",
    "core/train/step.py",
    "loss_in(shares).backward()",
    "loss_in(shares).backward()  # as before",
    "Nothing is wrong.",
    ("fsdp 2",),
)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place_and_can_be_compiled(mutant):
    text = (PACKAGE / mutant.file).read_text()
    planted = mutant.planted_in(text)
    ast.parse(planted)
    assert planted != text
    assert not mutant.like or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", mutant.like)


def test_a_text_that_has_changed_is_named():
    with pytest.raises(ValueError, match=r"core/train/step.py has 1 places for 'nothing', not 2"):
        Mutant(**vars(HARMLESS) | {"times": 2}).planted_in((PACKAGE / HARMLESS.file).read_text())


def test_names_are_unique_and_cases_and_tests_exist():
    assert max(Counter(mutant.name for mutant in ALL).values()) == 1 and len(ALL) >= 110
    cases = {case.name for case in whole_matrix()}
    for mutant in ALL:
        assert mutant.cases or mutant.tests, mutant.name
        assert set(mutant.cases) <= cases, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(), test


def test_nearly_all_mutants_have_a_case_or_a_test_that_the_default_suite_runs():
    quick = cover([case for case in whole_matrix() if case.quick])
    late = [
        mutant.name
        for mutant in ALL
        if not quick & set(mutant.cases) and all(test.removeprefix("tests/").startswith(LONG) for test in mutant.tests)
    ]
    assert len(late) <= 0.05 * len(ALL), late


def planted(monkeypatch, capsys, *mutants):
    """Run `python -m tests.equivalence.mutants --quick --json` with these mutants, and return its exit status and the content of its
    JSON.
    """
    monkeypatch.setattr(corpus, "SUBJECTS", {"some": list(mutants)})
    status = command.main(["--quick", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_mutants_are_found_and_a_harmless_change_is_missed(monkeypatch, capsys):
    before = (PACKAGE / HARMLESS.file).read_text()
    status, content = planted(monkeypatch, capsys, *(mutant for mutant in ALL if mutant.name in FOUND), HARMLESS)
    found = {row["name"]: row for row in content["mutants"]}
    assert status == 1 and content["summary"] == {"quick": 3, "matrix": 0, "tests": 0, "missed": 1}
    assert found["nothing"]["found_by"] == "missed" and found["nothing"]["times"] < 1
    assert found["the norm counts copies"]["column"] == "norm"
    assert all(found[name]["times"] > 1 for name in FOUND)
    assert (PACKAGE / HARMLESS.file).read_text() == before, "mutants are planted in a copy alone"


def test_what_fails_without_a_mutant_finds_nothing(monkeypatch, capsys):
    """A case that does not pass in the unchanged tree would find every mutant."""
    other = Mutant(
        **vars(HARMLESS) | {"name": "other", "old": "return shares.detach()", "new": "return shares.detach() * 2"}
    )
    wrong = Mutant(**vars(HARMLESS) | {"name": "wrong", "needs": "fsdp"})
    monkeypatch.setattr(
        trial.Copy,
        "run",
        lambda *_: {
            "outcomes": [{"case": "fsdp 2", "passed": False, "times": {"loss": 2.0}, "counts": {}, "error": ""}]
        },
    )
    monkeypatch.setattr(trial.Copy, "__init__", lambda _: None)
    monkeypatch.setattr(trial.Copy, "close", lambda _: None)
    monkeypatch.setattr(trial.Copy, "planted", lambda *_: contextlib.nullcontext())
    status, content = planted(monkeypatch, capsys, other, wrong)
    assert status == 1 and content["summary"]["missed"] == 2


def test_a_test_that_has_no_end_finds_nothing(monkeypatch):
    """On a busy machine any test can run out of time."""
    one = Mutant(**vars(HARMLESS) | {"cases": (), "tests": ("tests/core/train/test_step.py",)})
    monkeypatch.setattr(trial.Copy, "__init__", lambda _: None)
    monkeypatch.setattr(trial.Copy, "close", lambda _: None)
    monkeypatch.setattr(trial.Copy, "planted", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(copy.subprocess, "run", lambda command, **_: no_end(command))
    monkeypatch.setattr(trial.Copy, "folder", PACKAGE, raising=False)
    monkeypatch.setattr(trial.Copy, "environment", {}, raising=False)
    told: list[str] = []
    (finding,) = trial.Trial(False, told.append).run([one])
    assert not finding.found and "no verdict on nothing" in told[0]


def no_end(command):
    raise subprocess.TimeoutExpired(command, 1)
