import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.streams import Stream
from titan_hydra.core.job.config import schema


class Listed:
    """A source of texts in memory: a list of units, each a list of texts."""

    def __init__(self, units):
        self.contents, self.units = units, len(units)

    def rows(self, unit, start=0):
        yield from list(enumerate(self.contents[unit]))[start:]


TOKENIZER = tokenizer.load(schema.Tokenizer(name="embedded"))


@settings(deadline=None, max_examples=60)
@given(
    units=st.lists(st.lists(st.text(max_size=30), max_size=4), min_size=1, max_size=6).filter(
        lambda units: any(map(any, units))
    ),
    seq_len=st.integers(1, 40),
)
def test_packing_loses_and_doubles_no_token(units, seq_len):
    stream = Stream(Listed(units), TOKENIZER, slot=0, slots=1, seq_len=seq_len, seed=None)
    epoch = [token for unit in units for text in unit if text for token in TOKENIZER.document(text)]
    samples = [stream.sample() for _ in range(len(epoch) // seq_len)]
    assert all(len(sample) == seq_len + 1 for sample in samples)
    joined = np.concatenate([samples[0][:1], *(sample[1:] for sample in samples)]) if samples else np.array([], int)
    assert joined.tolist()[: len(epoch)] == epoch[: len(joined)]


@settings(deadline=None, max_examples=60)
@given(
    units=st.lists(st.lists(st.text(max_size=30), max_size=4), min_size=1, max_size=6).filter(
        lambda units: any(map(any, units))
    ),
    slots=st.integers(1, 5),
    taken=st.integers(0, 9),
    seed=st.none() | st.integers(0, 9),
)
def test_state_is_exact_wherever_it_is_taken(units, slots, taken, seed):
    for slot in range(slots):
        stream, other = (Stream(Listed(units), TOKENIZER, slot, slots, 7, seed) for _ in range(2))
        for _ in range(taken):
            stream.sample()
        other.load(stream.state)
        assert [stream.sample().tolist() for _ in range(5)] == [other.sample().tolist() for _ in range(5)]


@pytest.mark.parametrize("seed", [None, 3])
def test_an_epoch_deals_every_unit_once(seed):
    units = [[f"unit {i}"] for i in range(12)]
    streams = [Stream(Listed(units), TOKENIZER, slot, 4, 8, seed) for slot in range(4)]
    for epoch in range(3):
        turns = [stream._unit(turn) for stream in streams for turn in range(epoch * 3, epoch * 3 + 3)]
        assert sorted(turns) == list(range(12))


@pytest.mark.parametrize("seed", [None, 3])
def test_every_slot_meets_every_unit(seed):
    """If each slot met only some units, and all the text were in the units of another slot, a slot would search for
    ever.
    """
    for units in range(1, 9):
        for slots in range(1, 9):
            streams = [Stream(Listed([["x"]] * units), TOKENIZER, slot, slots, 8, seed) for slot in range(slots)]
            assert all({stream._unit(turn) for turn in range(300)} == set(range(units)) for stream in streams), (
                units,
                slots,
            )


def test_slots_that_share_a_document_begin_at_different_places():
    text = " ".join(map(str, range(1000)))
    streams = [Stream(Listed([[text]]), TOKENIZER, slot, 4, 8, 0) for slot in range(4)]
    starts = [stream.sample()[0] for stream in streams]
    document = TOKENIZER.document(text)
    assert starts == [document[len(document) * quarter // 4] for quarter in range(4)]


def test_a_source_without_text_is_refused():
    stream = Stream(Listed([[], [""]]), TOKENIZER, 0, 2, 8, 0)
    with pytest.raises(ConfigError, match="no document with text"):
        stream.sample()


def test_fewer_rows_than_slots_still_feed_every_slot(job, tmp_path):
    (tmp_path / "tiny.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    for shuffle in (True, False):
        loader = data.build(
            job(name="text_files", path=str(tmp_path / "tiny.jsonl"), global_batch=16, shuffle=shuffle), 0, 1
        )
        assert [loader.next()["tokens"].shape for _ in range(3)] == [(16, 32)] * 3


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    buffer=st.integers(2, 7),
    taken=st.integers(0, 9),
    slots=st.integers(1, 3),
)
def test_a_shuffle_buffer_is_exact_wherever_its_state_is_taken(rows, buffer, taken, slots):
    units = [[f"unit {unit} row {row}" for row in range(count)] for unit, count in enumerate(rows)]
    stream, other = (Stream(Listed(units), TOKENIZER, 0, slots, 7, seed=1, buffer=buffer) for _ in range(2))
    for _ in range(taken):
        stream.sample()
    other.load(stream.state)
    assert [stream.sample().tolist() for _ in range(5)] == [other.sample().tolist() for _ in range(5)]


def test_a_shuffle_buffer_shuffles_documents_of_a_shard_and_loses_none():
    texts = [f"text {number}" for number in range(100)]
    documents = Stream(Listed([texts]), TOKENIZER, 0, 1, 7, seed=1, buffer=30)._documents(0, 0, 0)
    taken = [TOKENIZER.decode(next(documents).tokens.tolist()[1:-1]) for _ in range(200)]
    first, second = taken[:100], taken[100:]
    assert sorted(first[:90]) == sorted(texts[:90]) and first[:90] != texts[:90]
    assert set(first[:30]) == set(texts[:30])
    # a block may continue into the next epoch
    assert sorted(first[90:] + second[:20]) == sorted(texts[90:] + texts[:20])
