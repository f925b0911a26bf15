"""The embedded corpus is complete, has no held-out text in its training part, and is the same on every machine."""

import hashlib

from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.embedded import PIECE, Embedded, held_out, text_of_corpus
from titan_hydra.experiments.compose.compose import compose_job

TEXTS = text_of_corpus().split("\f")


def pieces(split):
    corpus = Embedded(split)
    return [text for unit in range(corpus.units) for _, text in corpus.rows(unit)]


def test_pieces_of_the_texts_are_the_texts():
    for split in ("train", "validation"):
        assert "".join(pieces(split)) == "".join(text for text in TEXTS if held_out(text) == (split == "validation"))


def test_pieces_are_short_and_end_at_blank_lines():
    found = pieces("train")
    assert max(map(len, found)) < 5 * PIECE
    assert all(text.endswith("\n\n") or any(whole.endswith(text) for whole in TEXTS) for text in found)


def test_no_text_is_in_both_splits():
    names = [text.partition("\n")[0] for text in TEXTS]
    assert len(set(names)) == len(names)
    assert 0.02 < sum(map(held_out, TEXTS)) / len(TEXTS) < 0.1
    assert not set(pieces("train")) & set(pieces("validation"))


def test_the_corpus_is_the_one_that_the_losses_in_the_docs_are_of():
    assert hashlib.sha256(text_of_corpus().encode()).hexdigest()[:16] == "802e73bae213a37a"


def test_the_default_run_reads_no_text_twice():
    default = compose_job()
    tokens = sum(len(tokenizer.load(default.tokenizer).document(text)) for text in pieces("train"))
    assert tokens > 2 * default.steps * default.data.global_batch * default.data.seq_len
