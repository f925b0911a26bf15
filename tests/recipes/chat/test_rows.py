"""A row of conversations is learned as it is written, or refused; from JSON lines, arrays, Parquet and datasets alike."""

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.records import HubRecords, Records
from titan_hydra.core.data.shards import BadRow, BadShards
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules import checks
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.recipes.chat import template
from titan_hydra.recipes.chat.conversations import parse
from titan_hydra.recipes.chat.printed import forgotten

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
NO_TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MULTIPLY = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}


def load(name, **options):
    source = template.BUILT_IN[name].read_text() if name in template.BUILT_IN else name
    return template.Template("data.chat_template=x", source, NAMES, options)


def talk(*messages, **others):
    return {"messages": [{"role": role, "content": content, **more} for role, content, more in messages], **others}


def learned(row, name="chatml", train_on="assistant", **options):
    """Return the learned parts of the text of a row, and the text."""
    text, spans = load(name, **options).spans(parse(json.dumps(row).encode()), train_on)
    return [text[begin:end] for begin, end in spans], text


INLINE = "<think>\nTwo and two.\n</think>\n\nIt is 4."
BESIDE = {"reasoning_content": "Two and two."}


@pytest.mark.parametrize(
    "content", [INLINE, "Two and two.\n</think>\n\nIt is 4.", " <think>Two and two.</think>It is 4."]
)
def test_reasoning_in_the_content_is_learned_as_reasoning_beside_it(content):
    beside = learned(talk(("user", "2+2?", {}), ("assistant", "It is 4.", BESIDE)), "qwen3")
    assert learned(talk(("user", "2+2?", {}), ("assistant", content, {})), "qwen3") == beside
    assert beside[0] == [INLINE + "<|im_end|>"]


def test_a_template_that_prints_reasoning_as_it_is_keeps_it():
    for name in ("chatml", "llama3", NO_TAGS):
        (answer,), _ = learned(talk(("user", "2+2?", {}), ("assistant", INLINE, {})), name)
        assert answer.startswith(INLINE)


def test_earlier_reasoning_is_left_out_and_told():
    earlier = INLINE.replace("Two and two.", "A wild guess.")
    row = talk(("user", "a", {}), ("assistant", earlier, {}), ("user", "b", {}), ("assistant", INLINE, {}))
    answers, text = learned(row, "qwen3")
    assert answers == ["It is 4.<|im_end|>", INLINE + "<|im_end|>"]
    assert forgotten(parse(row), text) == 1 and forgotten(parse(row), learned(row, "chatml")[1]) == 0


def test_the_system_column_is_the_first_message():
    beside = talk(("user", "q", {}), ("assistant", "a", {}), system="Be kind.")
    within = talk(("system", "Be kind.", {}), ("user", "q", {}), ("assistant", "a", {}))
    assert learned(beside) == learned(within) == learned(within | {"system": "Be kind."})
    with pytest.raises(ValueError, match="'system' is another text"):
        parse(within | {"system": "Be brief."})


@pytest.mark.parametrize("name", ["chatml", "qwen3", NO_TAGS], ids=["tags", "thinking", "differences"])
@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0, 1), ("train", False, True), ("training", False, None)])
def test_a_message_that_is_not_to_be_learned_is_not(name, key, off, on):
    row = talk(
        ("user", "q1", {}), ("assistant", "wrong", {key: off}), ("user", "q2", {}), ("assistant", "right", {key: on})
    )
    plain = talk(("user", "q1", {}), ("assistant", "wrong", {}), ("user", "q2", {}), ("assistant", "right", {}))
    answers, text = learned(row, name)
    assert (answers, text) == (learned(plain, name)[0][1:], learned(plain, name)[1])
    assert learned(row, name, "last") == learned(plain, name, "last")


@pytest.mark.parametrize(
    ("row", "train_on", "reason"),
    [
        (talk(("user", "q", {}), ("assistant", "a", {"weight": 0})), "assistant", "not learned"),
        (talk(("user", "q", {}), ("assistant", "a", {"weight": 0})), "all", "train_on=all"),
        (talk(("user", "q", {}), ("assistant", "a", {"weight": 0.5})), "assistant", "neither 0"),
        (talk(("user", "q", {}), ("assistant", "a", {"train": "no"})), "assistant", "neither 0"),
        (talk(("user", "q", {}), ("assistant", "a", {"weight": 0, "train": True})), "assistant", "both"),
        (talk(("user", "q", {"train": True}), ("assistant", "a", {})), "assistant", "the user's"),
        (talk(("user", "q", {}), ("assistant", "a", {"train_detail": [1]})), "assistant", "train_detail"),
        (talk(("user", "q", {"images": ["x.png"]}), ("assistant", "a", {})), "assistant", "images"),
        (talk(("user", "q", {}), ("assistant", "a", {}), images=["x.png"]), "assistant", "images"),
    ],
)
def test_what_a_row_states_and_cannot_have_is_refused(row, train_on, reason):
    with pytest.raises(ValueError, match=reason):
        learned(row, train_on=train_on)


def test_calls_and_observations_of_other_formats_are_calls():
    call = {"name": "multiply", "arguments": {"a": 6}}
    plain = talk(
        ("user", "q", {}),
        ("assistant", None, {"tool_calls": [{"type": "function", "function": call}]}),
        ("tool", "42", {}),
        ("assistant", "It is 42.", {}),
    )
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "It is 42."},
        ]
    }
    legacy = talk(
        ("user", "q", {}),
        ("assistant", None, {"function_call": {"name": "multiply", "arguments": '{"a": 6}'}}),
        ("function", "42", {}),
        ("assistant", "It is 42.", {}),
    )
    assert learned(sharegpt) == learned(legacy) == learned(plain)
    assert '"multiply"' in learned(plain)[0][0]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (talk(("user", "q", {}), ("assistant", "a", {"reasoning": "Deep thought."})), "reasoning"),
        (talk(("user", "q", {}), ("assistant", "", {"tool_calls": [{"name": "multiply"}]})), "call"),
        (talk(("user", "q", {}), ("assistant", "a", {}), tools=[MULTIPLY]), "tool multiply"),
        (talk(("critic", "Good?", {}), ("user", "q", {}), ("assistant", "a", {})), "content of message 1"),
    ],
)
def test_what_a_template_does_not_print_is_refused(row, what):
    some = NO_TAGS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'critic' %}")
    with pytest.raises(ValueError, match=f"does not print the {what}"):
        learned(row, some)


def test_quotes_and_blanks_may_be_printed_otherwise():
    quoted = NO_TAGS.replace("{{ m.content }}", "{{ m.content | trim | tojson }}")
    learned(talk(("user", ' say "é\n" ', {}), ("assistant", '{"a":  1}', {})), quoted)


def test_arguments_of_the_template(tmp_path):
    row = talk(("user", "q", {}), ("assistant", "a", {}))
    empty = "<think>\n\n</think>\n\n"
    assert learned(row, "qwen3")[0] == [empty + "a<|im_end|>"]
    assert learned(row, "qwen3", enable_thinking=False) == (["a<|im_end|>"], learned(row, "qwen3")[1])
    assert learned(row | {"chat_template_kwargs": {"enable_thinking": False}}, "qwen3")[0] == ["a<|im_end|>"]
    assert load("qwen3", enable_thinking=False).prompt([{"role": "user", "content": "q"}]).endswith(empty)
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    words = ("data=chat", f"data.path={tmp_path}/a.jsonl", "data.chat_template=chatml")
    for option in ("enable_thinking", "messages"):
        with pytest.raises(ConfigError, match=rf"data\.chat_template_kwargs\.{option}"):
            compose_job(*words, f"+data.chat_template_kwargs.{option}=false")


def ask(*answers):
    return talk(*((role, text, {}) for role, text in answers))


FORMS = {
    "alpaca": ({"instruction": "Add.", "input": "6 1", "output": "7"}, ask(("user", "Add.\n6 1"), ("assistant", "7"))),
    "no input": ({"instruction": "Hi?", "input": "", "output": "Ho."}, ask(("user", "Hi?"), ("assistant", "Ho."))),
    "null input": ({"instruction": "Hi?", "input": None, "output": "Ho."}, ask(("user", "Hi?"), ("assistant", "Ho."))),
    "dolly": (
        {"instruction": "Sum up.", "context": "Long.", "response": "Short.", "category": "x"},
        ask(("user", "Sum up.\nLong."), ("assistant", "Short.")),
    ),
    "completion": ({"prompt": "Hi?", "completion": "Ho."}, ask(("user", "Hi?"), ("assistant", "Ho."))),
    "question": (
        {"system_prompt": "Be kind.", "question": "Hi?", "response": "Ho."},
        ask(("system", "Be kind."), ("user", "Hi?"), ("assistant", "Ho.")),
    ),
    "history": (
        {"instruction": "c?", "output": "d", "history": [["a?", "b"]], "system": "S"},
        ask(("system", "S"), ("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")),
    ),
    "messages": (
        {
            "prompt": ask(("user", "a?"), ("assistant", "b"), ("user", "c?"))["messages"],
            "completion": ask(("assistant", "d"))["messages"],
        },
        talk(("user", "a?", {}), ("assistant", "b", {"weight": 0}), ("user", "c?", {}), ("assistant", "d", {})),
    ),
    "reasoning": (
        {"prompt": "q", "reasoning": "Deep thought.", "completion": "a"},
        talk(("user", "q", {}), ("assistant", "a", {"reasoning": "Deep thought."})),
    ),
    "functions": (
        {"prompt": "q", "completion": "a", "functions": [MULTIPLY["function"]]},
        talk(("user", "q", {}), ("assistant", "a", {}), tools=[MULTIPLY]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_question_and_its_answer_are_a_conversation(form):
    row, same = FORMS[form]
    assert parse(row) == parse(same)
    assert learned(row, "qwen3") == learned(same, "qwen3")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "a"}, "no list of messages.*no question with its answer.*'instruction'$"),
        ({"instruction": "a", "output": None}, "no list of messages"),
        ({"instruction": "a", "output": 5}, "'output' is int"),
        ({"instruction": "a", "output": ""}, "no message of the assistant"),
        ({"instruction": "a", "input": 5, "output": "b"}, "'input' is int"),
        ({"instruction": "a", "prompt": "p", "output": "b"}, "'instruction' and 'prompt'"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "'completion' and 'response'"),
        ({"prompt": "a", "completion": "b", "label": False}, "'label'"),
        (talk(("user", "q", {}), ("assistant", "a", {}), kto_tag=True), "'kto_tag'"),
        ({"question": "a", "choices": ["x", "y"], "answer": "x"}, "'choices'"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "'history'"),
        ({"instruction": "a", "output": "b", "images": ["x.png"]}, "'images'"),
        (
            {"prompt": "a", "completion": "b", "system": "s", "system_prompt": "t"},
            "'system' and 'system_prompt' differ",
        ),
        ({"prompt": [{"role": "user", "content": "a"}], "input": "x", "completion": "b"}, "'input' beside messages"),
        (talk(("user", "q", {}), ("assistant", "a", {"thinking": "x", "reasoning": "y"})), "different reasonings"),
        (
            talk(
                ("user", "q", {}), ("assistant", None, {"tool_calls": [{"name": "f"}], "function_call": {"name": "g"}})
            ),
            "in two places",
        ),
    ],
)
def test_a_question_or_an_answer_that_is_not_clear_is_refused(row, reason):
    with pytest.raises(ValueError, match=reason):
        learned(row)


ROWS = [
    talk(("user", f"{number}+1?", {}), ("assistant", str(number + 1), {"weight": number % 2}), ("user", "More?", {}))
    for number in range(90)
]
for _row in ROWS:
    _row["messages"].append({"role": "assistant", "content": "No.", "weight": 1, "reasoning_content": None})


@pytest.fixture
def forms(tmp_path):
    return write_forms(tmp_path, ROWS)


def write_forms(tmp_path, rows):
    """Write the same rows in each form; return overrides by name of the form."""
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=40)
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("# a data set")
    pyarrow.parquet.write_table(table, hub / "data/train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 5), hub / "data/test-00000-of-00001.parquet")
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(tmp_path / "lines.jsonl", clone)
    (clone / "README.md").write_text("# a data set")
    DatasetDict({"train": Dataset(table)}).save_to_disk(tmp_path / "saved")
    return {
        "lines": f"data.path={tmp_path}/lines.jsonl",
        "array": f"data.path={tmp_path}/array.json",
        "parquet": f"data.path={tmp_path}/rows.parquet",
        "clone": f"data.path={clone}",
        "hub": f"data.path={hub} data.hub_split=train",
        "saved": f"data.path={tmp_path}/saved data.hub_split=train",
    }


def test_questions_and_answers_are_the_same_in_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {
            "instruction": f"{n}+1?",
            "input": "Please." if n % 2 else None,
            "output": str(n + 1),
            "system": None if n % 3 else "S",
        }
        for n in range(90)
    ]
    forms_agree(write_forms(tmp_path, rows), "data=chat", "data.seq_len=64")


def test_rows_are_the_same_in_every_form(forms, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    forms_agree(forms, "data=chat", "data.seq_len=64")


def forms_agree(forms, *base):
    """Check that all forms give the same batches, and that the launcher finds no fault in them."""
    batches = {}
    for form, words in forms.items():
        job = compose_job("debug=tiny", *base, *words.split(), "data.local_batch=4")
        loader = data.build(job, 0, 1)
        batches[form] = [loader.next() for _ in range(5)]
        loader.close()
    for form, found in batches.items():
        for batch, expected in zip(found, batches["lines"], strict=True):
            for name, tensor in expected.tensors.items():
                assert np.array_equal(batch[name], tensor), (form, name)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("data.hub_split=gone", "data.path"),
        ("data.hub_split=train validation=on", "data.hub_validation_split"),
    ],
)
def test_a_dataset_is_tried_before_the_start(forms, tmp_path, monkeypatch, more, key):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ("debug=tiny", "data=chat", forms["hub"].split()[0], *more.split())
    (fault,) = checks.check(freeze(compose_unchecked(*words)))
    assert fault.key == key


def test_a_bad_row_of_parquet_is_named(tmp_path):
    rows = [*ROWS[:3], {"messages": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = Records([tmp_path / "rows.parquet"], BadShards())
    assert found.row(3)[0] == f"{tmp_path}/rows.parquet: row 4"
    with pytest.raises(ValueError, match="no list of messages"):
        parse(found.row(3)[1])
    with pytest.raises(ConfigError, match=r"data\.path=.*split gone"):
        HubRecords("data.path", str(tmp_path), None, "gone")


def warned(*words):
    return list(checks.warnings(freeze(compose_unchecked("debug=tiny", "data=chat", *words))))


def test_a_template_that_does_not_teach_the_stop_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(talk(("user", "q", {}), ("assistant", "a", {}))))
    base = (f"data.path={tmp_path}/a.jsonl", f"data.chat_template={tmp_path}/own.jinja")
    for source, what in (
        (template.BUILT_IN["llama3"].read_text(), None),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% else %}{{ m.content }}{% endif %}<|eot_id|>\n{% endfor %}",
            "<|eot_id|> behind them",
        ),
        ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}", "no special token"),
    ):
        if "generation" not in source:
            source += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
        (tmp_path / "own.jinja").write_text(source)
        found = [str(fault) for fault in warned(*base) if "stop" in str(fault)]
        assert len(found) == (what is not None) and (what is None or what in found[0])


def test_messages_may_be_json_text():
    row = talk(("user", "q", {}), ("assistant", "a", {}))
    assert parse({"messages": json.dumps(row["messages"])}) == parse(row)
    with pytest.raises(ValueError, match="not JSON"):
        parse({"messages": "[{"})


def test_arguments_that_come_from_the_row_are_refused():
    with pytest.raises(ValueError, match="'add_generation_prompt'"):
        parse(talk(("user", "q", {}), ("assistant", "a", {}), chat_template_kwargs={"add_generation_prompt": True}))


def test_half_a_surrogate_pair_is_a_bad_row_for_the_launcher_too(tmp_path):
    rows = [talk(("user", "\ud83d", {}), ("assistant", "a", {})), *ROWS[:3]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("debug=tiny", "data=chat", f"data.path={tmp_path}/a.jsonl")
    (fault,) = checks.check(freeze(compose_unchecked(*words)))
    assert fault.key == "data.path" and "a.jsonl:1: " in str(fault)
    assert not list(checks.warnings(freeze(compose_unchecked(*words, "data.max_bad_rows=1"))))


def test_two_columns_of_one_name_are_refused(tmp_path):
    column = pyarrow.array([row["messages"] for row in ROWS[:3]])
    table = pyarrow.Table.from_arrays([column, column], names=["messages", "messages"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="2 columns have the name 'messages'"):
        Records([tmp_path / "a.parquet"], BadShards())


def test_a_row_of_parquet_that_python_cannot_hold_is_a_bad_row(tmp_path):
    dates = pyarrow.array([0, 2**58, 0], pyarrow.int64()).cast(pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"messages": ["x"] * 3, "at": dates}), tmp_path / "a.parquet")
    found = Records([tmp_path / "a.parquet"], BadShards())
    assert found.row(0)[1]["messages"] == found.row(2)[1]["messages"] == "x"
    with pytest.raises(BadRow, match="row 2: "):
        found.row(1)
