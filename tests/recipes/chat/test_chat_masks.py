"""The learned tokens of a conversation are those of transformers' own mask, and those that a reader would mark."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint import tokenizer as export
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.facts import Facts
from titan_hydra.core.job.config import schema
from titan_hydra.recipes.chat import template
from titan_hydra.recipes.chat.conversations import parse
from titan_hydra.recipes.chat.rows import ConversationReader
from titan_hydra.recipes.chat.sources import TemplateSource

MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
)
EMBEDDED = schema.Tokenizer(name="embedded")
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply <two> numbers & more.",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}},
    },
}


def turns(*contents, **more):
    return {
        "messages": [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    } | more


PLAIN = [
    turns("Hi", "Hello."),
    turns("Hi", "Hello.", "And you?", "Well, thanks."),
    turns("Grüß dich \U0001f600", "Schön \U0001f600\U0001f680, 你好", "é", "\U0001f44b\U0001f3fd!"),
    turns("Code?", "\n\nimport os\n\tprint(1)\n\n", "More", "   x = 1"),
    turns("<b>'\"&", '{"a": [1, 2]} <tool> &amp;'),
    {"messages": [{"role": "system", "content": "Be brief."}, *turns("1+1?", "2", "2+2?", "4")["messages"]]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
]
CALLS = {
    "messages": [
        {"role": "user", "content": "6 x 7?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"b": 7, "a": 6}}}],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ],
    "tools": [MULTIPLY],
}
THOUGHT = {
    "messages": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "One and one."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
    ]
}
ROWS = dict.fromkeys(template.BUILT_IN, PLAIN) | {
    "chatml": [*PLAIN, CALLS, THOUGHT],
    "qwen3": [*PLAIN, CALLS, THOUGHT],
    "llama3": [*PLAIN, CALLS],
}


OF_EMBEDDED = Facts({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, tokenizer={"name": "embedded"})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the embedded tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported")
    export.write_facts(OF_EMBEDDED, folder, 4096)
    return schema.Tokenizer(name="hf", path=str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Return the same tokenizer with the marks of all templates as special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    export.write_facts(OF_EMBEDDED, folder, 4096)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens([*MARKS])
    words.save(str(folder / "tokenizer.json"))
    return schema.Tokenizer(name="hf", path=str(folder / "tokenizer.json"))


def reader(config, name, train_on="assistant", change=lambda text: text):
    own = template.Template(name, change(template.BUILT_IN[name].read_text()), template.special_names(config))
    return ConversationReader([], own, tokenizer.load(config), train_on)


def without_tags(text):
    return text.replace("{%- generation -%}", "{%- if true -%}").replace("{%- endgeneration -%}", "{%- endif -%}")


def read(row):
    return parse(json.dumps(row).encode())


def learned(reader, row):
    """Return the text that is learned, one piece for each run of tokens."""
    found = reader.encode(read(row))
    edges = np.flatnonzero(np.diff(found.trained, prepend=False, append=False))
    return [
        reader.tokenizer.decode(found.tokens[begin:end].tolist())
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_the_package_has_six_templates_with_tags():
    assert list(template.BUILT_IN) == ["chatml", "gemma", "llama3", "mistral", "phi", "qwen3"]


@pytest.mark.parametrize("name", template.BUILT_IN)
@pytest.mark.parametrize("kind", ["embedded", "exported", "hf"])
def test_masks_are_those_of_transformers(exported, hf, name, kind):
    transformers = pytest.importorskip("transformers")
    folder = (hf if kind == "hf" else exported).path.removesuffix("tokenizer.json")
    ours = reader({"embedded": EMBEDDED, "exported": exported, "hf": hf}[kind], name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for row in ROWS[name]:
        conversation = read(row)
        expected = theirs.apply_chat_template(
            conversation.messages,
            tools=conversation.tools or None,
            chat_template=ours.template.source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = ours.encode(conversation)
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.trained.astype(int).tolist() == expected["assistant_masks"], row
        assert 0 < found.trained.sum() < len(found.tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["Hello.<|im_end|>", "Well, thanks.<|im_end|>"]),
        ("phi", ["Hello.<|end|>", "Well, thanks.<|end|>"]),
        ("gemma", ["Hello.<end_of_turn>", "Well, thanks.<end_of_turn>"]),
        ("llama3", ["Hello.<|eot_id|>", "Well, thanks.<|eot_id|>"]),
        ("mistral", [" Hello.<|end_of_text|>", " Well, thanks.<|end_of_text|>"]),
    ],
)
def test_without_tags_the_text_tells(hf, name, expected):
    assert learned(reader(hf, name, change=without_tags), PLAIN[1]) == expected
    assert learned(reader(hf, name), PLAIN[1]) == expected
    assert (
        learned(reader(hf, name, "last", without_tags), PLAIN[1])
        == learned(reader(hf, name, "last"), PLAIN[1])
        == expected[1:]
    )


@pytest.mark.parametrize("name", [name for name in template.BUILT_IN if name != "qwen3"])
def test_tags_and_the_text_agree(hf, name):
    tagged, plain = reader(hf, name), reader(hf, name, change=without_tags)
    assert tagged.template.tagged and not plain.template.tagged
    for row in ROWS[name]:
        one, other = tagged.encode(read(row)), plain.encode(read(row))
        assert one.tokens.tolist() == other.tokens.tolist() and one.trained.tolist() == other.trained.tolist(), row


def test_ranges_of_tokens_that_leave_out_blanks_do_no_harm(hf, tmp_path):
    """In Llama 3's tokenizer.json a token's range leaves out blanks. A mask made from such ranges would end where an
    answer begins with blanks.
    """
    words = tokenizers.Tokenizer.from_file(hf.path)
    words.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    words.save(str(tmp_path / "tokenizer.json"))
    trimmed = schema.Tokenizer(name="hf", path=str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(Path(hf.path).with_name("tokenizer_config.json").read_text())
    for row in PLAIN:
        one, other = (reader(config, "phi").encode(read(row)) for config in (hf, trimmed))
        assert one.tokens.tolist() == other.tokens.tolist() and one.trained.tolist() == other.trained.tolist(), row


def test_reasoning_is_learned_and_that_of_earlier_turns_stays_out(hf):
    assert learned(reader(hf, "qwen3"), THOUGHT) == ["2<|im_end|>", "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]
    assert learned(reader(hf, "qwen3", "last", without_tags), THOUGHT) == [
        "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    ]


def test_a_template_that_tells_nothing_is_refused(hf):
    """Without tags, and with reasoning that is removed when the next question comes, the template does not show which
    text is the assistant's.
    """
    with pytest.raises(
        ConfigError, match=r"qwen3: it has no {% generation %} tags.*message 2.*Take train_on=last or all"
    ):
        reader(hf, "qwen3", change=without_tags).encode(read(THOUGHT))
    assert len(learned(reader(hf, "qwen3", "all", without_tags), THOUGHT)) == 1


def test_calls_are_learned_and_results_are_not(hf):
    pieces = learned(reader(hf, "chatml"), CALLS)
    assert pieces == [
        '<tool_call>\n{"name": "multiply", "arguments": {"b": 7, "a": 6}}\n</tool_call><|im_end|>',
        "It is 42.<|im_end|>",
    ]
    quoted = json.loads(json.dumps(CALLS))
    quoted["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"b": 7, "a": 6}'
    assert learned(reader(hf, "chatml"), quoted | {"tools": json.dumps([MULTIPLY])}) == pieces


def test_tokens_are_those_of_the_whole_text_also_where_a_beginning_has_others():
    """In the whole text, the newlines at the end of the header and at the start of the answer are one token. This token
    does not occur if only the beginning is tokenized.
    """
    ours, row = (
        reader(EMBEDDED, "llama3", change=lambda text: without_tags(text).replace(" | trim", "")),
        turns("Hi", "\nHello."),
    )
    found, words = ours.encode(read(row)), ours.tokenizer
    assert found.tokens.tolist() == words.locate(template._plain(ours.template.render(read(row)))).ids
    prompt = words.locate(ours.template.render(read(turns("Hi")), prompt=True)).ids
    assert found.tokens[: len(prompt)].tolist() != prompt
    assert learned(ours, row) == ["\n\n\nHello.<|eot_id|>"]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{% for m in messages %}", "line 1: "),
        ("{{ ''.__class__.__mro__ }}", "it is not allowed in a template: "),
        ("{{ messages.append(1) }}", "it is not allowed in a template: "),
        ("{{ 'x' * 10000000000 }}", "it is not allowed in a template: a result of `\\*` is larger"),
        ("{{ 9 ** 9999999 }}", "it is not allowed in a template: a result of `\\*\\*` is larger"),
    ],
)
def test_a_template_that_is_broken_or_breaks_out_is_refused(source, line):
    with pytest.raises(ConfigError, match=f"data.chat_template=x: {line}"):
        template.Template("data.chat_template=x", source, {}).render(read(PLAIN[0]))


@pytest.mark.parametrize("doubled", ["ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]|join", "ns.x|replace('a', 'aa')"])
def test_a_template_that_fills_the_memory_is_refused(doubled):
    source = f"{{% set ns = namespace(x='a') %}}{{% for i in range(99) %}}{{% set ns.x = {doubled} %}}{{% endfor %}}"
    with pytest.raises(ValueError, match="MemoryError"), template.time_limit(60):
        template.Template("data.chat_template=x", source, {}).render(read(PLAIN[0]))


def test_the_template_comes_from_the_tokenizers_own_files(hf, tmp_path):
    source = TemplateSource("chat")
    with pytest.raises(ConfigError, match=r"data.chat_template=null: no template came with .*one of chatml, gemma,"):
        template.load_template("data", source, hf)
    config = tmp_path / "tokenizer_config.json"
    own = schema.Tokenizer(name="hf", path=str(tmp_path / "tokenizer.json"))
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "a {{ bos_token }}"}]
    config.write_text(json.dumps({"chat_template": several, "bos_token": {"content": "<s>"}}))
    assert template.load_template("data", source, own).render(read(PLAIN[0])) == "a <s>"
    (tmp_path / "chat_template.jinja").write_text("b {{ eos_token }}{{ strftime_now('%d %b %Y') }}")
    assert template.load_template("data", source, own).render(read(PLAIN[0])) == "b 26 Jul 2024"
    source.chat_template = str(tmp_path / "chat_template.jinjo")
    with pytest.raises(
        ConfigError,
        match=r"data.chat_template=.*jinjo: No such file or directory; nearest legal: .*chat_template.jinja",
    ):
        template.load_template("data", source, own)
    source.chat_template = "phi"
    assert template.load_template("data", source, own).render(read(PLAIN[0])).startswith("<|user|>\nHi<|end|>")
