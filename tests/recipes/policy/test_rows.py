"""Pairs and rollouts are the same from JSON lines, arrays, Parquet and datasets; a bad row costs this row alone."""

import json

import pytest

from tests.recipes.chat.test_reading import reading_of
from tests.recipes.chat.test_rows import MULTIPLY, forms_agree, write_forms
from titan_hydra.core.data.files import record_of
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules import checks
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.recipes.chat.rows import READING
from titan_hydra.recipes.policy.rows import pair_of


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def pair(number):
    call = {"function": {"name": "multiply", "arguments": json.dumps({"a": number, "b": None if number % 2 else 3})}}
    called = [say("assistant", None, tool_calls=[call]), say("tool", str(number)), say("assistant", f"It is {number}.")]
    return {
        "prompt": [say("system", "Be brief."), say("user", f"{number}?")]
        if number % 3
        else [say("user", f"{number}?")],
        "chosen": called if number % 4 == 0 else [say("assistant", str(number))],
        "rejected": [say("assistant", "I do not know.", reasoning_content=None)],
        "tools": json.dumps([MULTIPLY]) if number % 4 == 0 else None,
        "ref_chosen_logps": -20.0 - number % 7,
        "ref_rejected_logps": -25.0 - number % 5,
        "source": None,
    }


def drawn(number):
    size = 1 + number % 5
    return {
        "tokens": [number % 4096, *range(7, 8 + size)],
        "old_logprobs": [-0.5 - 0.25 * place for place in range(size)],
        "advantages": [1.0 - place % 3 for place in range(size)],
        "prompt": None,
    }


KINDS = {"preference": (pair, "data.chat_template=chatml", "data.seq_len=256"), "rollouts": (drawn, "data.seq_len=32")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_in_every_form(kind, tmp_path):
    make, *words = KINDS[kind]
    forms_agree(write_forms(tmp_path, [make(number) for number in range(60)]), f"data={kind}", *words)


@pytest.mark.parametrize("form", ["parquet", "hub", "saved"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_is_found_before_the_start_in_every_form(kind, form, tmp_path):
    make, *words = KINDS[kind]
    rows = [make(number) for number in range(8)]
    rows[3] |= {"rejected": None} if kind == "preference" else {"old_logprobs": None}
    place = write_forms(tmp_path, rows)[form].split()
    base = ("debug=tiny", f"data={kind}", *words, *place)
    (fault,) = checks.check(freeze(compose_unchecked(*base)))
    assert fault.key == "data.path" and "row 4: " in str(fault)
    assert not list(checks.check(freeze(compose_unchecked(*base, "data.max_bad_rows=1"))))


NO = {"chosen": "Blue.", "rejected": "Seven."}
SAYS = [say("user", "Name a colour.")]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Name a colour.", "input": "", **NO},
        {"question": "Name a colour.", **NO},
        {"conversations": [{"from": "human", "value": "Name a colour."}]}
        | {key: {"from": "gpt", "value": text} for key, text in NO.items()},
        {"messages": SAYS, **{key: say("assistant", text) for key, text in NO.items()}},
        {key: [*SAYS, say("assistant", text)] for key, text in NO.items()},
        {"prompt": "", **{key: [*SAYS, say("assistant", text)] for key, text in NO.items()}},
    ],
)
def test_the_question_of_a_pair_is_found_in_every_form(row):
    assert pair_of(row) == pair_of({"prompt": SAYS, **NO})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (NO, "no question in 'prompt'"),
        (NO | {"chosen": None}, "no pair in it"),
        (NO | {"history": "a?"}, "no question in 'prompt'"),
        (NO | {"prompt": "q", "history": "a?"}, "'history'"),
        (NO | {"prompt": "q", "instruction": "r"}, "'instruction' and 'prompt'"),
        (
            {key: [*SAYS, say("assistant", text)] for key, text in NO.items()}
            | {"messages": [*SAYS, say("assistant", "Blue.")]},
            "another question|is not the one of",
        ),
    ],
)
def test_a_pair_whose_question_is_not_clear_is_refused(row, reason):
    with pytest.raises(ValueError, match=reason):
        pair_of(row)


TALK = [say("user", "q"), say("assistant", "a")]
ODD = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"instruction": "q", "input": "c", "chosen": "a", "rejected": "b", "system": "Be kind."},
    {"prompt": [], "chosen": TALK, "rejected": [TALK[0], say("assistant", "b")]},
    {"prompt": TALK[:1], "chosen": TALK, "rejected": say("assistant", "b")},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"},
    {"messages": [*TALK, say("user", "r")], "chosen": "a", "rejected": "b"},
    {"chosen": "a", "rejected": "b"},
    {"prompt": "p", "chosen": TALK, "rejected": TALK},
]
READ = {3: "f2f1a406a5c45c9c"}  # as in tests/recipes/chat/test_reading.py


def test_the_number_of_the_reading_changes_with_what_pairs_give():
    lines = [*map(json.dumps, ODD), '{"prompt": "q", "chosen": "a", "rejected": "b", "chosen": "c"}']
    assert {READING: reading_of(lines, lambda line: pair_of(record_of(line)))} == READ


def test_pairs_that_teach_nothing_are_told(tmp_path):
    scores = {"ref_chosen_logps": -1.0, "ref_rejected_logps": -1.0}
    rows = [{"prompt": "q", "chosen": "a", "rejected": "ab"[number % 2]} | scores for number in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = freeze(compose_unchecked("debug=tiny", "data=preference", f"data.path={tmp_path}/a.jsonl"))
    assert [fault.key for fault in checks.warnings(job) if "in 3 of the first 6" in str(fault)] == ["data.path"]
