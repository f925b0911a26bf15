"""Data sets of Megatron-LM, written by its published format, are read token for token, with the documents of their index."""

import struct

import numpy as np
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.indexed import document_starts
from titan_hydra.core.data.items import TokenFiles
from titan_hydra.core.data.learned import faults_of_ids

from .test_items import write

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron(folder, texts, dtype="uint16", name="a", **changed):
    """Write texts, each a list of sequences of ids, as NAME.bin and NAME.idx; return the .bin."""
    sequences = [np.asarray(ids, dtype) for sequences in texts for ids in sequences]
    (folder / f"{name}.bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", CODES[dtype]),
        "sequences": struct.pack("<Q", len(sequences)),
        "entries": struct.pack("<Q", len(texts) + 1),
        "lengths": lengths.tobytes(),
        "places": ((np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize).tobytes(),
        "documents": np.cumsum([0, *map(len, texts)], dtype=np.int64).tobytes(),
    }
    (folder / f"{name}.idx").write_bytes(b"".join((parts | changed).values()))
    return folder / f"{name}.bin"


SEVERAL = [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10, 11]], [[]], [[12]], [[13, 14], [15, 16, 17]]]  # 17 tokens


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_token_is_read(tmp_path, dtype):
    file = megatron(tmp_path, SEVERAL, dtype)
    source = TokenFiles("data.path", str(file), 64, 4, None, documents=True)
    samples = [source.sample(number, 0) for number in range(4)]
    assert [sample["tokens"].tolist() for sample in samples] == [list(range(1 + 4 * i, 6 + 4 * i)) for i in range(4)]
    assert document_starts(file.with_suffix(".idx")).tolist() == [0, 5, 11, 12, 17]
    assert [sample["documents"].tolist() for sample in samples] == [
        [1, 1, 1, 1, 1], [1, 2, 2, 2, 2], [2, 2, 2, 3, 4], [4, 4, 4, 4, 4],
    ]  # fmt: skip
    assert "documents" not in TokenFiles("data.path", str(file), 64, 4, None).sample(0, 0)


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_has_the_documents_of_the_index(job, tmp_path, masked):
    file = megatron(tmp_path, SEVERAL)
    batch = data.build(
        job(name="tokens", path=str(file), seq_len=8, global_batch=2, shuffle=False, document_mask=masked), 0, 1
    ).next()
    assert batch["tokens"].tolist() == [list(range(1, 9)), list(range(9, 17))]
    if not masked:
        assert "documents" not in batch.tensors and batch["labels"].tolist()[0] == list(range(2, 10))
        return
    assert batch["documents"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5, -100, 7, 8, 9], [10, 11, -100, -100, 14, 15, 16, 17]]


def test_every_layout_and_file_gives_the_same_documents(job, tmp_path):
    rng = np.random.default_rng(0)
    for name in "abc":
        long = [[rng.integers(0, 4096, rng.integers(0, 40)) for _ in range(rng.integers(1, 4))] for _ in range(60)]
        megatron(tmp_path, long, "int32", name)
    made = job(name="tokens", path=str(tmp_path / "*.bin"), seq_len=32, global_batch=4, document_mask=True)
    (one,), two = [data.build(made, 0, 1)], [data.build(made, rank, 2) for rank in range(2)]
    for _ in range(10):
        whole, parts = one.next(), [loader.next() for loader in two]
        for name in ("tokens", "labels", "documents", "positions"):
            assert whole[name].tolist() == [row for part in parts for row in part[name].tolist()]


BAD = {  # what is changed in the index, and the words of the line
    "magic": ({"magic": b"MMIDXXX\x00\x00"}, "begins with"),
    "older": ({"magic": b"TNTIDX\x00\x00\x00"}, "older format"),
    "version": ({"version": struct.pack("<Q", 2)}, "version 2"),
    "code": ({"code": b"\x09"}, "9, not one of 1 to 8"),
    "floats": ({"code": b"\x07"}, "float32"),
    "too many": ({"sequences": struct.pack("<Q", 2**60)}, "bytes, and"),
    "cut": ({"documents": b"\0" * 20}, "bytes, and"),
    "head": ({"entries": b"", "lengths": b"", "places": b"", "documents": b""}, "cut off"),
    "images": ({"magic": b"MMIDIDX\x00\x00", "modes": b"\0" * 8}, "images"),
    "negative": ({"lengths": np.array([3, -2, 6, 0, 1, 2, 3, 4], np.int32).tobytes()}, "negative"),
    "gap": ({"places": (b"\1" + b"\0" * 63)}, "sequence 0"),
    "order": ({"documents": np.array([0, 5, 2, 4, 6, 8], np.int64).tobytes()}, "documents"),
    "last": ({"documents": np.array([0, 2, 3, 4, 5, 6], np.int64).tobytes()}, "documents"),
    "empty": (dict.fromkeys(("magic", "version", "code", "sequences", "entries", "lengths", "places", "documents"), b""), "begins"),
}  # fmt: skip
EIGHT = [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10, 11]], [[]], [[12]], [[13, 14], [15, 16, 17], [18, 19, 20, 21]]]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_index_is_one_line_before_the_start(job, tmp_path, name):
    changed, words = BAD[name]
    file = megatron(tmp_path, EIGHT, **changed)
    made = job(name="tokens", path=str(file), seq_len=4, global_batch=2)
    (fault,) = faults_of_ids("data", made.data, made)
    assert words in str(fault) and "a.idx" in str(fault) and "\n" not in str(fault)
    with pytest.raises(ConfigError, match=r"a\.idx"):
        data.build(made, 0, 1)


def test_a_bin_that_is_cut_or_has_other_ids_is_refused(job, tmp_path):
    file = megatron(tmp_path, EIGHT)
    file.write_bytes(file.read_bytes()[:-2])
    made = job(name="tokens", path=str(file), seq_len=4, global_batch=2)
    (fault,) = faults_of_ids("data", made.data, made)
    assert "40 bytes" in str(fault)
    with pytest.raises(ConfigError, match=r"40 bytes, but a\.idx lists 21 tokens in uint16"):
        data.build(made, 0, 1)
    other = megatron(tmp_path, [[list(range(9000, 9021))]])
    made = job(name="tokens", path=str(other), seq_len=4, global_batch=2)
    (fault,) = faults_of_ids("data", made.data, made)
    assert "9000" in str(fault)


def test_a_header_of_ours_beside_an_index_counts(tmp_path):
    file = megatron(tmp_path, SEVERAL)
    write(file, range(1, 18), eos_id=11, bos_id=None)
    source = TokenFiles("data.path", str(file), 4096, 4, None, documents=True)
    assert source.separators == (None, 11) and "documents" not in source.sample(0, 0)
