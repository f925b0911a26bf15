"""Test the promises of the data: the order of samples does not depend on the layout, and continues exactly from a saved
state.
"""

import json
import threading

import numpy as np
import pytest
import torch

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import loader as loaders
from titan_hydra.core.train.objectives.language import cut

SOURCES = ["embedded", "synthetic", "tokens", "hf", "jsonl", "shards", "parquet", "books", "single"]


@pytest.fixture(autouse=True)
def none_before():
    """Remember the threads of earlier tests, which do not count."""
    BEFORE[:] = threading.enumerate()


BEFORE: list[threading.Thread] = []


def threads():
    """Return the data threads that this test has started and that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == "data" and thread not in BEFORE]


def take(job, ranks, steps, state=None, split="train"):
    """Return global batches [steps, G, S + 1] that this number of ranks reads together, and the ranks' merged state
    after a round trip through JSON.
    """
    parts, states = [], []
    for rank in range(ranks):
        loader = data.build(job, rank, ranks, split)
        if state:
            loader.load(state)
        batches = [loader.next() for _ in range(steps)]
        parts.append([torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1).numpy() for batch in batches])
        states.append(loader.state())
        loader.close()
    return np.concatenate(parts, axis=1), json.loads(json.dumps(loaders.merge(states)))


@pytest.mark.parametrize("source", SOURCES)
def test_slots_do_not_depend_on_the_number_of_ranks(job, corpus, source):
    one, _ = take(job(**corpus[source]), 1, 12)
    assert one.shape == (12, 4, 33)
    for ranks in (2, 4):
        assert np.array_equal(take(job(**corpus[source]), ranks, 12)[0], one)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_goes_on_exactly_from_a_saved_state_on_other_ranks(job, corpus, source, prefetch):
    whole, _ = take(job(**corpus[source]), 1, 23)
    saver = job(**corpus[source], prefetch=prefetch)
    _, state = take(saver, 4, 13)
    assert np.array_equal(take(saver, 2, 10, state)[0], whole[13:])


@pytest.mark.parametrize("source", SOURCES)
def test_seed_and_shuffle_change_the_order(job, corpus, source):
    orders = [
        take(job(seed, **corpus[source], shuffle=shuffle), 1, 6)[0]
        for seed, shuffle in [(0, True), (1, True), (0, False)]
    ]
    if source == "single":  # a single document has only one order
        return
    assert not np.array_equal(orders[0], orders[1])
    if source != "synthetic":
        assert not np.array_equal(orders[0], orders[2])


@pytest.mark.parametrize("source", SOURCES)
def test_slots_of_a_step_differ(job, corpus, source):
    batches, _ = take(job(**corpus[source], global_batch=16), 1, 2)
    assert len({sample.tobytes() for sample in batches[0]}) == 16


def test_state_is_of_what_was_returned_not_of_what_was_prepared(job, corpus):
    loader = data.build(job(**corpus["jsonl"], prefetch=4), 0, 1)
    states = [loader.state(), *((loader.next(), loader.state())[1] for _ in range(3))]
    loader.close()
    plain = data.build(job(**corpus["jsonl"]), 0, 1)
    assert states == [plain.state(), *((plain.next(), plain.state())[1] for _ in range(3))]


def test_nothing_is_prepared_before_the_first_next(job):
    loader = data.build(job(prefetch=4), 0, 1)
    assert not threads()
    loader.next()
    assert threads()
    loader.close()
    assert not threads()


def test_rewind_starts_over(job):
    loader = data.build(job(prefetch=2), 0, 1, "validation")
    first = [loader.next()["tokens"] for _ in range(3)]
    loader.rewind()
    assert all(torch.equal(loader.next()["tokens"], tokens) for tokens in first)
    loader.close()


def test_validation_is_held_out_and_the_same_for_every_seed(job):
    first, _ = take(job(0), 1, 3, split="validation")
    assert np.array_equal(take(job(1), 1, 3, split="validation")[0], first)
    assert not np.array_equal(take(job(0), 1, 3)[0], first)


def test_synthetic_validation_is_not_training(job):
    assert not np.array_equal(
        take(job(name="synthetic"), 1, 1)[0], take(job(name="synthetic"), 1, 1, split="validation")[0]
    )


def test_validation_path_is_asked_for(job, corpus):
    with pytest.raises(ConfigError, match=r"data\.validation_path=null"):
        data.build(job(**corpus["jsonl"]), 0, 1, "validation")
    held_out = job(**corpus["jsonl"], validation_path=corpus["books"]["path"])
    assert take(held_out, 1, 2, split="validation")[0].shape == (2, 4, 33)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_while_preparing_is_raised_by_next(job, tmp_path, prefetch):
    (tmp_path / "bad.jsonl").write_text('{"text": "' + "word " * 200 + '"}\n{"tex')
    loader = data.build(
        job(name="text_files", path=str(tmp_path / "bad.jsonl"), global_batch=1, prefetch=prefetch), 0, 1
    )
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: not a JSON line"):
        for _ in range(20):
            loader.next()
    assert not threads()


def test_state_of_other_data_is_refused(job, corpus):
    _, state = take(job(**corpus["jsonl"]), 2, 2)
    with pytest.raises(
        ConfigError, match=r"data\.global_batch=8: the saved order of the data has data\.global_batch=4"
    ):
        data.build(job(**corpus["jsonl"], global_batch=8), 0, 1).load(state)
    with pytest.raises(ConfigError, match="units"):
        data.build(job(**corpus["shards"]), 0, 1).load(state)
    state["slots"].pop("3")
    with pytest.raises(ConfigError, match=r"lacks slots \[3\] of 4"):
        data.build(job(**corpus["jsonl"]), 1, 2).load(state)


BOS, EOS = 90, 91


def test_cut_without_mask_shifts_by_one():
    batch = cut(np.array([[BOS, 1, 2, EOS, BOS]]), None)
    assert batch["tokens"].tolist() == [[BOS, 1, 2, EOS]]
    assert batch["labels"].tolist() == [[1, 2, EOS, BOS]]
    assert len(batch) == 2


@pytest.mark.parametrize(
    ("bos", "tokens", "labels", "documents", "positions"),
    [
        (
            BOS,
            [7, EOS, BOS, 1, 2, EOS, BOS, 3],
            [EOS, -100, 1, 2, EOS, -100, 3],
            [0, 0, 1, 1, 1, 1, 2],
            [0, 1, 0, 1, 2, 3, 0],
        ),
        (BOS, [BOS, 1, EOS, BOS, EOS, BOS], [1, EOS, -100, EOS, -100], [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]),
        (None, [7, EOS, 1, 2, EOS, 3], [EOS, -100, 2, EOS, -100], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
    ],
)
def test_document_mask(bos, tokens, labels, documents, positions):
    batch = cut(np.array([tokens]), (bos, EOS))
    assert batch["labels"].tolist() == [labels]
    assert batch["documents"].tolist() == [documents]
    assert batch["positions"].tolist() == [positions]


@pytest.mark.parametrize("source", ["jsonl", "tokens"])
def test_document_mask_of_real_batches(job, corpus, source):
    batch = data.build(job(**corpus[source], document_mask=True), 0, 1).next()
    bos = 3840
    assert (batch["tokens"] == bos).any()
    assert (batch["positions"][batch["tokens"] == bos] == 0).all()
    assert bos not in batch["labels"]
    assert all(
        tensor.dtype == (torch.int32 if name == "ends" else torch.int64) for name, tensor in batch.tensors.items()
    )
    plain = data.build(job(**corpus[source]), 0, 1).next()
    assert torch.equal(plain["tokens"], batch["tokens"])
    assert set(plain.tensors) == {"tokens", "labels"}
