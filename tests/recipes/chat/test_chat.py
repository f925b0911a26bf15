"""Conversations as samples: they are packed whole, the same on every layout, and resumed exactly; conversations that
cannot be used are counted, with their places.
"""

import gzip
import json
import os
import random

import numpy as np
import pytest
import tokenizers

from tests.core.data.test_files import zst
from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import loader as loaders
from titan_hydra.core.data.records import Records
from titan_hydra.core.data.shards import ROW, BadShards
from titan_hydra.core.job.config import Fault
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules import checks
from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.recipes.chat import rows
from titan_hydra.recipes.chat.rows import Turns, first_fit


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Use small windows, so that an epoch of a small file has several."""
    monkeypatch.setattr(rows, "WINDOW", 25)


@pytest.fixture
def talk(job, tmp_path):
    """Return a function that makes a job of 90 conversations in two files; keyword arguments are keys of `data`. Two of
    the conversations are too long.
    """
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {number}"},
                {"role": "assistant", "content": f"{number} " * (number % 20 + 1)},
            ]
        }
        for number in range(90)
    ]
    rows[33]["messages"][1]["content"] = rows[71]["messages"][1]["content"] = "long " * 100
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:40]) + "\n\n  \n")
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines[40:]))

    def make(seed=0, **keys):
        made = job(
            seed, **{"name": "chat", "path": str(tmp_path / "*.jsonl"), "seq_len": 96, "document_mask": True} | keys
        )
        made.objective.name = "sft"
        return made

    return make


def take(job, ranks, steps, state=None):
    """Return the tensors of global batches [steps, G, ...] that this number of ranks reads together, and the ranks'
    merged state after a round trip through JSON.

    The ends of documents, whose width changes, are left out: they can be computed from the documents.
    """
    parts, states = [], []
    for rank in range(ranks):
        loader = data.build(job, rank, ranks)
        if state:
            loader.load(state)
        batches = [loader.next().tensors for _ in range(steps)]
        parts.append(
            {name: np.stack([batch[name].numpy() for batch in batches]) for name in batches[0] if name != "ends"}
        )
        states.append(loader.state())
        loader.close()
    whole = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    return whole, json.loads(json.dumps(loaders.merge(states)))


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shuffle", [True, False])
def test_slots_do_not_depend_on_the_number_of_ranks(talk, shuffle):
    one, _ = take(talk(shuffle=shuffle), 1, 20)
    for ranks in (2, 4):
        assert same(take(talk(shuffle=shuffle), ranks, 20)[0], one)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_goes_on_exactly_from_a_saved_state_on_other_ranks(talk, prefetch):
    whole, _ = take(talk(), 1, 23)
    for ranks in (1, 4):
        _, state = take(talk(prefetch=prefetch), ranks, 13)
        assert set(state["slots"]["0"]) == {"window", "first"}
        assert same(
            take(talk(prefetch=prefetch), 2, 10, state)[0], {name: values[13:] for name, values in whole.items()}
        )


def conversations(batches):
    """Return the content of each sample: for each document its tokens, as a tuple. The last token of a document is only
    a label.
    """
    tokens, documents = (batches[name].reshape(-1, batches[name].shape[-1]) for name in ("tokens", "documents"))
    for row in range(len(tokens)):
        yield [tuple(tokens[row, documents[row] == document]) for document in range(documents[row].max() + 1)]


def test_an_epoch_has_every_conversation_once_and_whole_and_the_next_one_in_another_order(talk):
    job = talk(global_batch=1, local_batch=1)
    loader = data.build(job, 0, 1)
    samples = loader.samples
    epochs = []
    for epoch in range(2):
        found = [
            turns for window in range(4 * epoch, 4 * epoch + 4) for sample in samples.packed(window) for turns in sample
        ]
        assert len(found) == 88
        epochs.append([tuple(turns.tokens) for turns in found])
    everything = {tuple(samples.reader.turns(number).tokens) for number in range(90)}
    assert (
        set(epochs[0]) == set(epochs[1]) == {tokens for tokens in everything if len(tokens) <= 97}
        and epochs[0] != epochs[1]
    )
    sizes = [sum(len(turns.tokens) for turns in sample) for window in range(4) for sample in samples.packed(window)]
    assert max(sizes) <= 97 and sum(sizes) / 97 / len(sizes) > 0.8


def test_labels_are_the_next_tokens_of_the_assistant_within_a_conversation(talk):
    job = talk()
    batches, _ = take(job, 1, 10)
    loader = data.build(job, 0, 1)
    words = loader.samples.reader.tokenizer
    tokens, labels, documents, positions = (
        batches[name].reshape(40, 96) for name in ("tokens", "labels", "documents", "positions")
    )
    learned = labels != IGNORED
    assert np.array_equal(labels[:, :-1][learned[:, :-1]], tokens[:, 1:][learned[:, :-1]])
    begins = np.diff(documents, axis=1, prepend=-1) == 1
    assert (positions[begins] == 0).all() and (np.diff(positions)[~begins[:, 1:]] == 1).all()
    assert not learned[:, :-1][begins[:, 1:]].any(), "no conversation is predicted from the one before"
    for row in range(40):
        pieces = words.decode(labels[row][learned[row]].tolist()).split("<|eot_id|>")
        assert pieces[-1] == "" and all(len(set(piece.split())) == 1 for piece in pieces[:-1]), pieces


def test_one_conversation_may_fill_a_sample_to_its_last_label(talk, tmp_path):
    """A sample has seq_len inputs and as many labels, so one conversation in it may have one token more than seq_len."""
    loader = data.build(talk(), 0, 1)
    number = int(np.argmax([len(loader.samples.reader.turns(number).tokens) for number in range(30)]))
    tokens = loader.samples.reader.turns(number).tokens
    (tmp_path / "a.jsonl").write_text(loader.samples.reader.lines.row(number)[1].decode())
    (tmp_path / "b.jsonl").unlink()
    batch = data.build(talk(seq_len=len(tokens) - 1), 0, 1).next()
    assert batch["tokens"][0].tolist() == tokens[:-1].tolist() and batch["labels"][0, -1] == tokens[-1]
    with pytest.raises(ConfigError, match="no usable conversation in it"):
        data.build(talk(seq_len=len(tokens) - 2), 0, 1).next()


def test_what_is_too_long_is_counted_and_no_limit_holds_for_it(talk):
    loader = data.build(talk(), 0, 1)
    for _ in range(40):
        loader.next()
    news = loader.news()
    assert (
        len(news) == len({name for name in news if name.startswith("left out: data, conversations ")})
        and 1 <= len(news) <= 2
    )
    assert sum(int(reason.split()[0]) for reason in news.values()) == 2
    assert all(
        "conversations with more than data.seq_len=96 + 1 tokens, as " in reason and ".jsonl:" in reason
        for reason in news.values()
    )
    loader.take_news(news)
    assert loader.news() == {}


def test_first_fit_decreasing():
    def turns(*lengths):
        return [Turns(np.zeros(length, np.int32), np.ones(length, bool)) for length in lengths]

    packed = first_fit(turns(3, 7, 5, 2, 4, 10), {"tokens": 10})
    assert [[len(one.tokens) for one in sample] for sample in packed] == [[10], [7, 3], [5, 4], [2]]
    assert first_fit([], {"tokens": 10}) == []


def test_rows_share_a_sample_with_room_of_every_unit():
    class Wide(Turns):
        size = property(lambda self: {"tokens": len(self.tokens), "width": 4 if len(self.tokens) < 4 else 1})

    packed = first_fit(
        [Wide(np.zeros(length, np.int32), np.ones(length, bool)) for length in (2, 5, 3, 1)], {"tokens": 10, "width": 6}
    )
    assert [[len(one.tokens) for one in sample] for sample in packed] == [[5, 3], [2], [1]]


GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def broken(dice):
    """Return a row from which nothing can be learned, and a part of the reason."""
    say = lambda *messages, **more: json.dumps({"messages": list(messages)} | more)  # noqa: E731
    user, assistant = GOOD["messages"]
    text = json.dumps(GOOD)
    return dice.choice(
        [
            (text[: dice.randrange(1, len(text))], "not a JSON line"),
            (text + dice.choice("}]x"), "not a JSON line"),
            (dice.choice(["[" * 100_000, '{"a":' * 100_000]), "not a JSON line"),
            (dice.choice(["1", "null", '"Hi"', "[]", "1e999"]), "not a record"),
            (
                dice.choice(["{}", '{"text": "Hi"}', '{"messages": {}}', '{"messages": []}', '{"messages": "Hi"}']),
                "no list of messages",
            ),
            (say(dice.choice([None, 1, "Hi", []]), assistant), "message 1 is "),
            (say(user, {"content": "Hello."}), "message 2 has no role"),
            (say({"role": dice.choice([1, None, "", []]), "content": "Hi"}, assistant), "message 1 has no role"),
            (
                say(user, {"role": "assistant", "content": dice.choice([None, 1, {}, [1], [{"type": "image"}]])}),
                "as content, not text",
            ),
            (say(user), "no message of the assistant"),
            (say(user, {"role": "assistant", "content": "x", "tool_calls": {"a": 1}}), "not a list"),
            (
                say(
                    user, {"role": "assistant", "content": "x", "tool_calls": [dice.choice([1, {}, {"function": "f"}])]}
                ),
                "name of a function",
            ),
            (
                say(
                    user,
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    },
                ),
                "not JSON",
            ),
            (say(user, assistant, tools=dice.choice(["{", 1, [1], {"a": 1}])), "its tools are not"),
            (
                say(user, {"role": "assistant", "content": dice.choice(["<|eot_id|>", "a <|begin_of_text|>"])}),
                "it holds <|",
            ),
            (say({"role": "user<|eot_id|>", "content": "x"}, assistant), "it holds <|eot_id|>"),
            (
                say(user, {"role": "assistant", "content": dice.choice(["\ud800", "a\udfffb"])}),
                "half of a surrogate pair",
            ),
            (say(user, {"role": "assistant", "content": "a\ufdd0b"}), "U+FDD0"),
            (
                say(user, {"role": "assistant", "content": "2", "reasoning": "1 + 1"}),
                "the template refuses it: llama3 has no place",
            ),
            (say(user, {"role": "assistant", "content": "2", "reasoning": 1}), "as reasoning, not text"),
        ]
    )


@pytest.fixture
def damaged(tmp_path):
    """Return a file of 500 unusable rows among 40 usable ones: the reasons by place."""
    dice, reasons, lines = random.Random(1), {}, []
    places = set(dice.sample(range(1, 540), 500))
    for number in range(540):
        row, reason = broken(dice) if number in places else (json.dumps(GOOD), None)
        lines.append(
            row.encode("utf-8", "surrogatepass") if number % 7 else row.encode("utf-8", "surrogatepass") + b" "
        )
        if reason:
            reasons[f"{tmp_path / 'damaged.jsonl'}:{number + 1}"] = reason
    bad = sorted(places)[3]
    lines[bad], reasons[f"{tmp_path / 'damaged.jsonl'}:{bad + 1}"] = b'{"messages": "\xff\xfe"}', "not a JSON line"
    (tmp_path / "damaged.jsonl").write_bytes(b"\n".join(lines))
    return reasons


def test_every_malformed_row_is_counted_with_its_line(talk, tmp_path, damaged):
    loader = data.build(talk(path=str(tmp_path / "damaged.jsonl"), max_bad_rows=500), 0, 1)
    for _ in range(10):
        loader.next()
    found = {name.removeprefix(ROW): reason for name, reason in loader.state()["bad"].items()}
    assert found.keys() == damaged.keys() and len(found) == 500
    for place, reason in damaged.items():
        assert found[place].startswith(f"{place}: ") and reason in found[place] and "\n" not in found[place], (
            place,
            reason,
            found[place],
        )


def test_the_first_malformed_row_is_refused_where_none_may_be_left_out(talk, tmp_path, damaged):
    with pytest.raises(ConfigError) as error:
        data.build(talk(path=str(tmp_path / "damaged.jsonl"), shuffle=False), 0, 1).next()
    first = min(damaged, key=lambda place: int(place.rpartition(":")[2]))
    assert str(error.value).startswith(f"{first}: ") and str(error.value).endswith("data.max_bad_rows=0")


def faults(*words):
    return [str(fault) for fault in checks.check(freeze(compose_unchecked(*words)))]


def test_the_launcher_tries_the_template_on_the_first_conversation(tmp_path, monkeypatch):
    file, own = tmp_path / "a.jsonl", tmp_path / "own.jinja"
    file.write_text(json.dumps(GOOD) + "\n")
    words = ("data=chat", f"data.path={file}", f"data.chat_template={own}")
    own.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert compose_job(*words).objective.name == "sft"
    own.write_text("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}")
    assert faults(*words)[0].startswith(f"data.chat_template={own}: it has no {{% generation %}} tags, and")
    own.write_text("{% for m in messages %}")
    assert faults(*words)[0].startswith(f"data.chat_template={own}: line 1: ")
    monkeypatch.setattr(rows, "TRIED", 0.2)
    own.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert faults(*words)[0].startswith(
        f"data.chat_template={own}: it has not ended after 0.2 s on the first conversation"
    )
    monkeypatch.undo()
    own.unlink()
    os.mkfifo(own)  # opening it would block
    assert faults(*words)[0].startswith(f"data.chat_template={own}: not a file")
    file.write_text('{"text": "Hi"}\n')
    (reason,) = faults(*words[:2])
    assert reason.startswith(f"data.path={file}: {file}:1: no list of messages under 'messages'")
    assert reason.endswith("but 'text'; data.max_bad_rows=0")
    assert faults("data=chat")[0].startswith("data.path=null: data=chat needs it")
    words = ("data=chat", f"data.path={file}", "tokenizer=hf", "tokenizer.path=gone.json")
    assert faults(*words)[0].startswith("tokenizer.path=gone.json: no such file")


@pytest.mark.parametrize("source", ["chat", "preference"])
def test_a_file_without_a_row_is_one_line(tmp_path, source):
    file = tmp_path / "a.jsonl"
    for content, reason in (("", "the file is empty"), ("\n \n", "no row in it")):
        file.write_text(content)
        assert faults(f"data={source}", f"data.path={file}") == [str(Fault("data.path", str(file), reason))]


def test_sources_of_text_do_not_suit_the_objective():
    assert faults("objective=sft")[0].startswith(
        "data.name=embedded: objective=sft needs trained and documents of each sample"
    )
    with pytest.raises(
        ConfigError, match=r"data.train_on=last: data.name=embedded does not read it; chat or embedded_chat would"
    ):
        compose_job("data=embedded", "data.train_on=last")


def test_conversations_of_several_sources_are_mixed(talk, tmp_path):
    job = compose_job(
        "data=mixture",
        "objective=sft",
        "data.document_mask=true",
        "data.seq_len=256",
        "data.local_batch=8",
        "+data.mixture={shipped: {weight: 1, name: embedded_chat}, last: {weight: 1, name: embedded_chat, train_on: last}}",
    )
    batch = data.build(job, 0, 1).next()
    assert batch["tokens"].shape == (8, 256) and (batch["labels"] != IGNORED).any()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("added", "said"), [([], "its <|im_start|> is 12 unknown tokens of "), (["<|im_start|>", "<|im_end|>"], None)]
)
def test_a_mark_that_the_tokenizer_does_not_know_is_a_fault(tmp_path, added, said, pairs):
    """With one token per letter, for instance, most of the learned tokens would be the unknown tokens of `<|im_end|>`."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "A": 2, "C": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.add_special_tokens(["</s>", *added])
    words.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "rows.jsonl"
    talk = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "C"}]}
    pair = {"prompt": "A", "chosen": "C", "rejected": "A", "ref_chosen_logps": -1.0, "ref_rejected_logps": -1.0}
    # after more blank lines than the check looks at first
    file.write_text("\n" * 40 + json.dumps(pair if pairs else talk) + "\n")
    found = faults(
        f"data={'preference' if pairs else 'chat'}",
        f"data.path={file}",
        "data.chat_template=chatml",
        "tokenizer=hf",
        f"tokenizer.path={tmp_path / 'tokenizer.json'}",
    )
    assert [fault.startswith(f"data.chat_template=chatml: {said}") for fault in found] == [True] * bool(said), found


def test_chats_are_read_from_packed_files_as_from_plain_ones(tmp_path):
    content = b'{"messages": [{"role": "user", "content": "a"}]}\n\n' * 3
    for name, written in (("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content)), ("a.jsonl.zst", zst(content))):
        (tmp_path / name).write_bytes(written)
        lines = Records([tmp_path / name], BadShards())
        assert [lines.row(number)[1] for number in range(len(lines))] == [content[: content.index(b"\n") + 1]] * 3, name
    (tmp_path / "a.jsonl.zst").write_bytes(zst(content * 1000)[:-9])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.zst:\d+: the file is cut off here"):
        Records([tmp_path / "a.jsonl.zst"], BadShards())
