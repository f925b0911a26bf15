"""A long .txt is encoded in pieces, whose tokens are those of the whole text; no slot holds more than a piece."""

import gzip

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import long_text
from titan_hydra.core.data.embedded import Embedded
from titan_hydra.core.data.long_text import LongText
from titan_hydra.core.data.shards import BadShard
from titan_hydra.core.data.tokenizer import load
from titan_hydra.core.job.config import schema

from .test_shards import take

CORPUS = "\n".join(Embedded().pieces)[:150_000]
TEXTS = {
    "lines": CORPUS,
    "crlf": CORPUS.replace("\n", "\r\n"),
    "words": " ".join(CORPUS.split()),
    "other letters": ("Grüße, 你好 \U0001f600!\n\n\u00e9t\u00e9 " * 20 + "\nÄpfel\n") * 150,
}


@pytest.fixture
def short(monkeypatch):
    """Make pieces short, so that a small file has many."""
    monkeypatch.setattr(long_text, "LONG", 20_000)
    monkeypatch.setattr(long_text, "PIECE", 3000)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return tokenizers of several kinds by name."""
    found = {"embedded": load(schema.Tokenizer(name="embedded"))}
    for name, (pre, normalizer) in {
        "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        "llama2": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        "metaspace": (pre_tokenizers.Metaspace(), normalizers.NFC()),
    }.items():
        own = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        if pre:
            own.pre_tokenizer = pre
        if normalizer:
            own.normalizer = normalizer
        trainer = trainers.BpeTrainer(
            vocab_size=1200,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if name == "gpt2" else [],
            max_token_length=8,
            show_progress=False,
        )
        # in words, as merges over a text without words would take long
        lines = [
            line for word in CORPUS[:60_000].splitlines() for line in (word.split(" ") if name == "llama2" else [word])
        ]
        own.train_from_iterator(lines, trainer)
        path = tmp_path_factory.mktemp(name) / "tokenizer.json"
        own.save(str(path))
        found[name] = load(schema.Tokenizer(name="hf", path=str(path)))
    return found


@pytest.mark.parametrize("kind", ["embedded", "gpt2", "llama2", "metaspace"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_pieces_have_the_tokens_of_the_whole_text(short, words, tmp_path, kind, text):
    (tmp_path / "a.txt").write_bytes(text.encode())
    own = words[kind]
    pieces = list(LongText(tmp_path / "a.txt").pieces())
    assert len(pieces) > 20 and max(len(piece.text) for _, piece in pieces) <= 6000
    assert "".join(piece.text for _, piece in pieces) == text
    assert [token for _, piece in pieces for token in piece.encode(own)] == own.document(text)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_pieces_are_the_same_from_any_of_them_on(short, tmp_path, name):
    content = b"\xef\xbb\xbf" + CORPUS.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    text = LongText(tmp_path / name)
    pieces = list(text.pieces())
    assert pieces[0][0] == 3 and "\ufeff" not in pieces[0][1].text
    for place in (1, 7, len(pieces) - 1):
        assert list(text.pieces(pieces[place][0])) == pieces[place:]
    begins = [text.at(number, 4) for number in range(4)]
    assert begins == sorted(begins) and len(set(begins)) == 4 and set(begins) <= {begin for begin, _ in pieces}


def test_a_text_without_words_is_cut_too(short, tmp_path):
    for content in ("你好" * 20_000, "=" * 50_000, "\n" * 50_000):
        (tmp_path / "a.txt").write_text(content)
        text = LongText(tmp_path / "a.txt")
        pieces = list(text.pieces())
        assert "".join(piece.text for _, piece in pieces) == content and len(pieces) > 5
        assert list(text.pieces(pieces[3][0])) == pieces[3:]


@pytest.mark.parametrize("buffer", [0, 3])
def test_the_order_of_long_texts_is_that_of_no_layout(short, job, tmp_path, buffer):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(CORPUS[number * 40_000 : (number + 1) * 40_000])
    (tmp_path / "small.txt").write_text("A small text.")
    keys = {"name": "text_files", "path": str(tmp_path), "seq_len": 64, "global_batch": 8, "shuffle_buffer": buffer}
    one, state = take(job(**keys), 1, 40)
    for ranks in (2, 4):
        many, of_many = take(job(**keys), ranks, 40)
        assert np.array_equal(many, one) and of_many["slots"] == state["slots"]
    first, middle = take(job(**keys), 4, 23)
    rest, end = take(job(**keys), 2, 17, middle)
    assert np.array_equal(np.concatenate([first, rest]), one) and end["slots"] == state["slots"]
    assert len({sample.tobytes() for sample in one[0]}) >= 6  # slots that share a file begin at other places


def test_a_state_of_whole_texts_is_refused(job, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(CORPUS)
    keys = {"name": "text_files", "path": str(tmp_path)}
    _, state = take(job(**keys), 1, 3)
    monkeypatch.setattr(long_text, "LONG", 100_000)
    with pytest.raises(ConfigError, match="read in another way"):
        data.build(job(**keys), 0, 1).load(state)
    monkeypatch.setattr(long_text, "LONG", 1 << 30)
    data.build(job(**keys), 0, 1).load(state)


def test_a_long_text_that_is_no_utf8_is_left_out_from_there_on(short, job, tmp_path):
    (tmp_path / "a.txt").write_bytes(CORPUS.encode()[:30_000] + b"\xff" + CORPUS.encode())
    (tmp_path / "b.txt").write_text("A small text.")
    _, state = take(job(name="text_files", path=str(tmp_path), max_bad_shards=1), 1, 900)
    assert list(state["bad"]) == [str(tmp_path / "a.txt")] and "byte 30,000 is not UTF-8" in str(state["bad"])
    (tmp_path / "a.txt").write_bytes(b"\xff" * 30_000)
    with pytest.raises(BadShard, match="not UTF-8"):
        LongText(tmp_path / "a.txt")
