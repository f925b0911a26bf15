"""Mixtures keep their proportions on any number of ranks, and each source is read as it would be read alone."""

import json
from collections import Counter

import numpy as np
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import loader as loaders
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.mixture import pattern
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.load import values_are_what_the_schema_takes
from titan_hydra.core.job.rules import data as rules

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
BOS, EOS = 3840, 3841


@pytest.fixture
def three(tmp_path, job):
    """Return a job that mixes text, token files and many small shards; each sample holds tokens of one source only, and
    the tokens' values show which.
    """
    marks = {name: tokenizer.load(schema.Tokenizer(name="embedded")).encode(name * 3)[0] for name in WEIGHTS}
    lines = [json.dumps({"text": "aaa" * (i % 7 + 1)}) + "\n" for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    np.full(3000, marks["b"], dtype=np.uint16).tofile(tmp_path / "b.bin")
    sha256 = tokenizer.load(schema.Tokenizer(name="embedded")).sha256
    (tmp_path / "b.bin.json").write_text(
        json.dumps(
            {
                "dtype": "uint16",
                "tokens": 3000,
                "vocab_size": 4096,
                "bos_id": BOS,
                "eos_id": EOS,
                "tokenizer_sha256": sha256,
            }
        )
    )
    (tmp_path / "c").mkdir()
    for shard in range(60):
        (tmp_path / "c" / f"{shard}.txt").write_text("ccc" * (shard % 5 + 1))
    texts = {"a": ("text_files", "a.jsonl"), "b": ("tokens", "b.bin"), "c": ("text_files", "c")}

    def make(seed=0, weights=WEIGHTS, **keys):
        parts = {
            name: {"name": kind, "path": str(tmp_path / path), "weight": weights[name]}
            for name, (kind, path) in texts.items()
            if name in weights
        }
        return job(seed, **{"name": "mixture", "mixture": parts, "seq_len": 4, "global_batch": 40} | keys)

    make.name_of = lambda sample: next(name for name in WEIGHTS if marks[name] in sample)
    return make


def read(job, ranks, steps, state=None):
    """Return the samples [steps x G, S + 1] in the order of their numbers, and the merged state after a round trip
    through JSON.
    """
    parts, states = [], []
    for rank in range(ranks):
        loader = data.build(job, rank, ranks)
        if state:
            loader.load(state)
        batches = [loader.next() for _ in range(steps)]
        parts.append([np.concatenate([batch["tokens"], batch["labels"][:, -1:]], axis=1) for batch in batches])
        states.append(loader.state())
    return np.concatenate(parts, axis=1).reshape(-1, job.data.seq_len + 1), json.loads(
        json.dumps(loaders.merge(states))
    )


def test_three_sources_keep_their_proportions_on_any_ranks_and_across_resume(three):
    """10,000 samples are read by one rank, by four, and by two that become eight after a resume. All read the same
    samples, 50, 30 and 20 percent of them from each source.
    """
    one, _ = read(three(), 1, 250)
    assert len(one) == 10_000
    counts = Counter(map(three.name_of, one.tolist()))
    assert {name: pytest.approx(10_000 * weight, rel=0.01) for name, weight in WEIGHTS.items()} == counts
    assert np.array_equal(read(three(), 4, 250)[0], one)
    first, state = read(three(), 2, 101)
    rest, _ = read(three(), 8, 149, state)
    assert np.array_equal(np.concatenate([first, rest]), one)


def test_every_step_and_every_slot_has_its_share(three):
    """If a share were missing, some slot would never read a part of a source."""
    names = np.array(list(map(three.name_of, read(three(), 1, 250)[0].tolist()))).reshape(250, 40)
    for name, weight in WEIGHTS.items():
        assert (abs((names == name).sum(axis=1) - 40 * weight) <= 1).all()
        assert (abs((names == name).sum(axis=0) - 250 * weight) < 5 * (250 * weight) ** 0.5).all()


def test_a_source_is_read_as_it_would_be_alone(three, tmp_path):
    """The samples of a source are numbered without gaps, whichever samples of other sources lie between them."""
    samples = data.build(three(), 0, 1).samples
    taken = {name: [] for name in WEIGHTS}
    for number in range(20 * 40):
        name, own = samples.choose(number)
        taken[name].append(own)
    assert {name: sorted(own) for name, own in taken.items()} == {
        name: list(range(int(800 * w))) for name, w in WEIGHTS.items()
    }


@pytest.mark.parametrize("counts", [[5000, 3000, 2000], [9999, 1], [3334, 3333, 3333], [10_000]])
def test_a_pattern_is_always_near_its_shares(counts):
    turns, before = pattern(counts)
    assert np.bincount(turns, minlength=len(counts)).tolist() == counts == before[-1].tolist()
    due = np.arange(10_001)[:, None] * np.array(counts) / 10_000
    assert (abs(before - due) < 1).all()


def test_seed_changes_which_slot_takes_what_and_names_not_their_order(three):
    assert not np.array_equal(read(three(1), 1, 5)[0], read(three(0), 1, 5)[0])
    turned = three()
    turned.data.mixture = dict(reversed(turned.data.mixture.items()))
    assert np.array_equal(read(turned, 1, 5)[0], read(three(), 1, 5)[0])


def test_documents_are_masked_within_each_source(three):
    plain, _ = read(three(), 1, 3)
    loader = data.build(three(document_mask=True), 0, 1)
    for step in range(3):
        batch = loader.next()
        assert np.array_equal(batch["tokens"], plain.reshape(3, 40, 5)[step, :, :4])
        assert (batch["positions"][batch["tokens"] == BOS] == 0).all() and (batch["tokens"] == BOS).any()
        assert BOS not in batch["labels"]


def test_another_mixture_does_not_go_on_from_the_state(three):
    _, state = read(three(), 1, 2)
    with pytest.raises(ConfigError, match=r"data\.mixture\.a\.weight=0\.4: the saved order of the data has .*0\.5"):
        data.build(three(weights=WEIGHTS | {"a": 0.4}), 0, 1).load(state)
    with pytest.raises(ConfigError, match=r"data\.mixture="):
        data.build(three(weights={"a": 0.5, "b": 0.3}), 0, 1).load(state)


def test_ids_of_different_tokenizers_do_not_meet(three, tmp_path):
    header = json.loads((tmp_path / "b.bin.json").read_text())
    (tmp_path / "b.bin.json").write_text(json.dumps(header | {"tokenizer_sha256": "0123456789"}))
    with pytest.raises(
        ConfigError, match=r"data\.mixture: sources with different tokenizers \(a \w{8}, b 01234567, c \w{8}\)"
    ):
        data.build(three(), 0, 1)


def test_synthetic_sources_are_not_alike(job):
    parts = {name: {"name": "synthetic", "weight": 1} for name in "ab"}
    batch = data.build(job(name="mixture", mixture=parts), 0, 1).next()
    assert len({sample.numpy().tobytes() for sample in batch["tokens"]}) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mixture": {}}, "data.mixture={}: data=mixture needs sources"),
        ({"name": "embedded"}, "data=embedded does not read it; mixture would"),
        ({"weights": {"a": 0, "b": 1}}, "data.mixture.a.weight=0: must be more than 0"),
        ({"weights": {"a": float("nan")}}, "data.mixture.a.weight=nan: must be a finite number"),
        ({"weights": {"a": 1, "b": 1e-6}}, "data.mixture.b.weight=1e-06: less than one sample in 10,000"),
        ({"shuffle_buffer": 8, "shuffle": False}, "data.shuffle_buffer=8: data.shuffle=false keeps documents in order"),
        ({"shuffle_buffer": 8, "weights": {"b": 1}}, "data.shuffle_buffer=8: data=tokens is shuffled as a whole"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(three, changed, message):
    job = three(**changed)
    job.data.prefetch = 1
    faults = [fault for fault in values_are_what_the_schema_takes(job) if fault.key.startswith("data.")]
    (fault,) = faults or [fault for rule in rules.VALUES for fault in rule(job)]
    assert message in str(fault)


def test_paths_of_every_source_are_looked_at(three):
    cell = three()
    cell.data.mixture["a"].path, cell.data.mixture["b"].path = "/nowhere/x.jsonl", None
    cell.validation.name = "on"
    faults = "\n".join(str(fault) for rule in rules.PLACE for fault in rule(cell))
    assert "data.mixture.a.path=/nowhere/x.jsonl: no such file" in faults
    assert "data.mixture.b.path=null: data=tokens needs it" in faults
    assert faults.count("validation_path=null: validation=on") == 3
