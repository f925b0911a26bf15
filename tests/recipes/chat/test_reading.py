"""What rows of conversations give has a number, so that no run goes on with rows that are read in another way."""

import hashlib
import json

import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.chat.conversations import parse
from titan_hydra.recipes.chat.rows import READING

from .test_rows import BESIDE, INLINE, ROWS, load, talk

TWICE = (
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "content": "b"}]}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "messages": []}',
    '{"prompt": "q", "completion": "a", "completion": "b"}',
    json.dumps(
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "content": "a"}]'}
    ),
)


@pytest.mark.parametrize("line", TWICE)
def test_a_key_that_a_record_has_twice_costs_its_row(line):
    with pytest.raises(ValueError, match=r"'(content|messages|completion)' twice|not JSON"):
        parse(line.encode())
    assert parse(b'{"prompt": "q", "completion": "a", "prompt": "q"}') == parse({"prompt": "q", "completion": "a"})


ODD = [
    talk(
        ("system", "s", {}),
        ("user", "q", {}),
        ("assistant", "a", {"weight": 0}),
        ("user", "r", {}),
        ("assistant", INLINE, {}),
    ),
    talk(("user", "q", {}), ("assistant", "a", BESIDE), system="Be kind."),
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "q", "input": "behind", "output": "a", "history": [["p", "o"]]},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"question": "q", "answer": "a", "thinking": "t"},
    {"prompt": "q", "completion": "a", "label": True},
    {"prompt": "q", "question": "p", "answer": "a"},
    {"messages": json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])},
    talk(("user", "q", {}), ("assistant", "a", {"reasoning": "x", "thinking": "y"})),
    talk(("user", "q", {}), ("assistant", None, {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})),
]
# by rows.READING: a digest of what these rows give. If it changes, an older run would see other samples when it is
# resumed: raise READING by one, and put the new digest here.
READ = {3: "3ec0138a5f99e3a7"}


def reading_of(lines, conversations):
    """Return a digest of what lines give, each as a list of conversations."""
    found = []
    for line in lines:
        try:
            found.append([load("chatml").spans(side, "assistant") for side in conversations(line.encode())])
        except ValueError:
            found.append("refused")
    assert "refused" in found
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def test_the_number_of_the_reading_changes_with_what_rows_give():
    lines = [*map(json.dumps, ODD), *TWICE]
    assert {READING: reading_of(lines, lambda line: [parse(line)])} == READ


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("data=mixture", "+data.mixture={a: {weight: 1, name: chat, path: PATH}, b: {weight: 1, name: embedded_chat}}"),
    ],
)
def test_a_run_that_has_read_rows_in_another_way_is_not_resumed(words, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    words = [word.replace("PATH", f"{tmp_path}/a.jsonl") for word in words or ("data=chat", "data.path=PATH")]
    job = compose_job("debug=tiny", *words, "data.local_batch=2")
    loader = data.build(job, 0, 1)
    state = loader.state()
    loader.load(state)
    key = next(key for key in loader.signature if key.rpartition(".")[2] == "reading")
    for saved in ({**loader.signature, key: READING - 1}, {k: v for k, v in loader.signature.items() if k != key}):
        with pytest.raises(ConfigError, match=f"another way since the state was saved .{key}={READING}"):
            loader.load(state | {"signature": saved})
    loader.close()
