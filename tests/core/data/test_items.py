import json

import numpy as np
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.items import Synthetic, TokenFiles
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose.compose import compose_unchecked


def write(path, ids, **changed):
    np.asarray(ids, dtype=np.uint16).tofile(path)
    header = {
        "dtype": "uint16",
        "tokens": len(ids),
        "documents": 1,
        "vocab_size": 4096,
        "bos_id": 3840,
        "eos_id": 3841,
        "tokenizer_sha256": "0",
    }
    path.with_name(path.name + ".json").write_text(json.dumps(header | changed))
    return str(path)


def epoch_of(source, samples, epoch=0):
    return [source.sample(epoch * samples + i, 0)["tokens"].tolist() for i in range(samples)]


@pytest.mark.parametrize("seed", [None, 0])
def test_an_epoch_visits_every_sample_of_every_file_once(tmp_path, seed):
    write(tmp_path / "a.bin", range(100, 135))  # three samples of 10 + 1 tokens, and four tokens left over
    write(tmp_path / "b.bin", range(200, 221))  # two samples
    source = TokenFiles("data.path", str(tmp_path / "*.bin"), 4096, 10, seed)
    expected = [list(range(start, start + 11)) for start in (100, 110, 120, 200, 210)]
    epochs = [epoch_of(source, 5, epoch) for epoch in range(4)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert (epochs[0] == expected) == (seed is None)
    assert (len({str(epoch) for epoch in epochs}) > 1) == (seed is not None)


def test_tokens_are_what_the_stream_of_the_same_text_packs(job, corpus):
    """Without shuffling one slot reads the same samples, whether the text was encoded beforehand or is tokenized during
    the run.
    """
    one = {"global_batch": 1, "shuffle": False}
    streamed, stored = (data.build(job(**corpus[source], **one), 0, 1) for source in ("jsonl", "tokens"))
    for _ in range(streamed_samples := 30):
        assert streamed.next()["tokens"].tolist() == stored.next()["tokens"].tolist()
    assert stored.signature["samples"] > streamed_samples


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 34}, r"70 bytes, but a\.bin\.json lists 34 tokens in uint16"),
        ({"vocab_size": 5000}, r"encoded with 5000 ids, more than model\.vocab_size=4096"),
        ({"dtype": "nothing"}, "missing or damaged"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"tokens": -35}, "tokens is -35"),
        ({"bos_id": [1]}, r"bos_id is \[1\]"),
        ({"eos_id": 4096}, "eos_id is 4096"),
        ({"eos_id": "x"}, "eos_id is 'x'"),
        ({"tokenizer_sha256": {"a": 1}}, "tokenizer_sha256 is {'a': 1}"),
    ],
)
def test_a_file_that_is_not_what_its_header_says(tmp_path, changed, message):
    path = write(tmp_path / "a.bin", range(35), **changed)
    with pytest.raises(ConfigError, match=message):
        TokenFiles("data.path", path, 4096, 10, 0)


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=.*35 tokens, fewer than one sample of data\.seq_len=35 \+ 1"):
        TokenFiles("data.path", write(tmp_path / "a.bin", range(35)), 4096, 35, 0)
    write(tmp_path / "b.bin", range(35), tokenizer_sha256="1")
    with pytest.raises(ConfigError, match="different tokenizers"):
        TokenFiles("data.path", str(tmp_path / "*.bin"), 4096, 10, 0)
    (tmp_path / "a.bin.json").unlink()
    with pytest.raises(ConfigError, match=r"a\.bin\.json is missing"):
        TokenFiles("data.path", str(tmp_path / "a.bin"), 4096, 10, 0)
    with pytest.raises(ConfigError, match=r"data\.validation_path=.*no such file"):
        TokenFiles("data.validation_path", str(tmp_path / "c.bin"), 4096, 10, 0)


def test_synthetic_is_uniform_and_a_function_of_its_number():
    source = Synthetic(100, 1000, seed=-3)
    tokens = np.concatenate([source.sample(number, 0)["tokens"] for number in range(100)])
    counts = np.bincount(tokens, minlength=100)
    assert len(counts) == 100
    assert (abs(counts - 1001) < 160).all()  # within five standard deviations
    assert np.array_equal(Synthetic(100, 1000, seed=-3).sample(5, 1)["tokens"], source.sample(5, 3)["tokens"])


@pytest.mark.parametrize(
    ("ids", "keys", "reason"),
    [
        ([3841] * 90, ["data.document_mask=true"], "all eos_id=3841, so none of them is learned"),
        ([3841] * 90, [], None),
        ([5, 4095] * 45, ["model.vocab_size=4096"], None),
        ([5, 4096] * 45, ["model.vocab_size=4096"], "have the id 4096, and model.vocab_size is 4096"),
        ([5, 4096] * 45, ["model.vocab_size=4096", "data.max_bad_shards=1"], None),
    ],
)
def test_ids_that_cannot_be_learned_are_refused_before_the_start(tmp_path, ids, keys, reason):
    words = ("debug=tiny", "data=tokens", f"data.path={write(tmp_path / 'a.bin', ids)}", *keys)
    found = [str(fault) for fault in check(freeze(compose_unchecked(*words)))]
    assert len(found) == (reason is not None) and all(reason in fault for fault in found)
