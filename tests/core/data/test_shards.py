"""Test missing and damaged shards, which are left out and counted up to a limit, the same on every layout; and many
small shards.
"""

import gzip
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.shards import ROW
from titan_hydra.core.job.config.files import missing
from titan_hydra.core.job.rules import data as rules

from .test_items import write
from .test_mixture import read


def jsonl(path, rows):
    content = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def shards(tmp_path):
    """Return twelve shards of a numbered set: one is truncated, one has a flipped bit in the middle, one is missing."""
    for number in range(12):
        jsonl(
            tmp_path / f"c4-{number:05}-of-00012.json.gz",
            [f"shard {number} row {row} " + "x" * row for row in range(40)],
        )
    cut, flipped = tmp_path / "c4-00002-of-00012.json.gz", tmp_path / "c4-00005-of-00012.json.gz"
    cut.write_bytes(cut.read_bytes()[:-30])
    content = bytearray(flipped.read_bytes())
    content[60] ^= 0xFF
    flipped.write_bytes(content)
    (tmp_path / "c4-00007-of-00012.json.gz").unlink()
    return {"name": "text_files", "path": str(tmp_path / "*.json.gz"), "seq_len": 64, "global_batch": 8}


def take(job, ranks, steps, state=None):
    """Return the inputs [steps, G, S], and the merged state after a round trip through JSON."""
    samples, state = read(job, ranks, steps, state)
    return samples.reshape(steps, -1, job.data.seq_len + 1)[..., :-1], state


def test_bad_shards_are_left_out_alike_on_every_layout_and_after_a_resume(job, shards):
    one, state = take(job(**shards, max_bad_shards=2, max_bad_rows=1), 1, 60)
    assert sorted(Path(name).name[3:8] for name in state["bad"]) == ["00002", "00005", "00007"]
    assert [name.startswith(ROW) for name in sorted(state["bad"])] == [False, False, True]
    assert "No such file" in next(reason for shard, reason in state["bad"].items() if "00007" in shard)
    four, of_four = take(job(**shards, max_bad_shards=2, max_bad_rows=1), 4, 60)
    assert np.array_equal(four, one) and of_four["bad"] == state["bad"]
    first, middle = take(job(**shards, max_bad_shards=2, max_bad_rows=1), 4, 33)
    rest, end = take(job(**shards, max_bad_shards=2, max_bad_rows=1), 2, 27, middle)
    assert np.array_equal(np.concatenate([first, rest]), one) and end["bad"] == state["bad"]


@pytest.mark.parametrize(("limit", "so_far"), [(0, ""), (1, r"the last of 2 bad shards; ")])
def test_one_too_many_stops_with_its_name(job, shards, limit, so_far):
    with pytest.raises(
        ConfigError, match=rf"c4-\d+-of-00012\.json\.gz.*: cannot be read.*; {so_far}data\.max_bad_shards={limit}$"
    ):
        take(job(**shards, max_bad_shards=limit, max_bad_rows=1), 1, 60)


def test_gaps_in_a_numbered_set_are_known_before_anything_starts(job, shards):
    (fault,) = rules.data_files_are_there(job(**shards))
    assert "1 of a numbered set are missing, the first is c4-00007-of-00012.json.gz" in str(fault)
    assert not list(rules.data_files_are_there(job(**shards, max_bad_shards=1)))


@pytest.mark.parametrize(
    ("names", "pattern", "gone"),
    [
        (["x-0-of-3", "x-2-of-3"], "*", ["x-1-of-3"]),
        (["x-1-of-3", "x-3-of-3"], "", ["x-2-of-3"]),  # shards are counted from 1
        (["x-1-of-3"], "x-1-of-3", []),
        (["x-00001-of-01024.gz", "x-00003-of-01024.gz"], "x-0000[1-3]*", ["x-00002-of-01024.gz"]),
        (["x-0-of-2", "x-1-of-2", "notes.txt"], "*", []),
    ],
)
def test_missing(tmp_path, names, pattern, gone):
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    assert [file.name for file in missing(str(tmp_path / pattern), files)] == gone


def test_nothing_but_bad_shards_stops(job, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"text": ')
    with pytest.raises(ConfigError, match="no document with text"):
        take(job(name="text_files", path=str(tmp_path), max_bad_rows=10), 1, 1)


def test_a_bad_token_file_keeps_its_numbers(job, tmp_path):
    """Samples of the other files come at the same steps as before, and other samples replace the lost ones."""
    for name, first in [("a", 0), ("b", 1000), ("c", 2000)]:
        write(tmp_path / f"{name}.bin", range(first, first + 401))
    keys = {"name": "tokens", "path": str(tmp_path / "*.bin"), "seq_len": 8, "global_batch": 2}
    whole, state = take(job(**keys), 1, 60)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(
        ConfigError, match=r"b\.bin: no such file, but b\.bin\.json lists 401 tokens in uint16; data\.max_bad_shards=0"
    ):
        take(job(**keys), 1, 1)
    left, bad = take(job(**keys, max_bad_shards=1), 2, 60)
    lost = (whole[..., 0] >= 1000) & (whole[..., 0] < 2000)
    assert lost.any() and np.array_equal(left[~lost], whole[~lost])
    assert not ((left >= 1000) & (left < 2000)).any()
    assert len({row.tobytes() for row in left[lost]}) > 20
    assert list(bad["bad"]) == [str(tmp_path / "b.bin")]
    data.build(job(**keys, max_bad_shards=1), 0, 1).load(state)  # the change of this key leaves the data the same


def test_an_id_that_no_tokenizer_gives_is_damage(job, tmp_path):
    path = write(tmp_path / "a.bin", range(401))
    tokens = np.fromfile(path, np.uint16)
    tokens[100] = 60_000
    tokens.tofile(path)
    keys = {"name": "tokens", "path": path, "seq_len": 8, "global_batch": 2}
    with pytest.raises(ConfigError, match=r"a\.bin: id 60000 at token 100, not one of 4096: damaged"):
        take(job(**keys), 1, 60)
    samples, state = take(job(**keys, max_bad_shards=1), 1, 60)
    assert samples.max() < 4096 and len(state["bad"]) == 1


def test_a_header_that_is_gone_takes_its_file_along(job, tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.bin", range(401))
    (tmp_path / "b.bin.json").unlink()
    loader = data.build(job(name="tokens", path=str(tmp_path), seq_len=8, max_bad_shards=1), 0, 1)
    assert loader.signature["samples"] == 50
    assert list(loader.news()) == [str(tmp_path / "b.bin")]


def test_many_small_shards_need_few_descriptors(job, tmp_path):
    for number in range(400):
        write(tmp_path / f"{number}.bin", range(number, number + 17))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 64, hard))
    try:
        samples, _ = take(job(name="tokens", path=str(tmp_path), seq_len=16, global_batch=40), 1, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len({sample.tobytes() for sample in samples.reshape(400, 16)}) == 400


def test_news_are_of_what_was_returned_and_told_once(job, shards):
    loader = data.build(job(**shards, max_bad_shards=2, max_bad_rows=1), 0, 1)
    told = []
    for _ in range(60):
        loader.next()
        told += list(loader.news())
        loader.take_news(loader.news())
    assert len(told) == len(set(told)) == 3
    with pytest.raises(ConfigError, match=r"from another rank; the last of 3 bad shards; data\.max_bad_shards=2"):
        loader.take_news({"other": "from another rank"})


def test_a_token_file_that_is_cut_off_while_it_is_read_is_noticed(job, tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.bin", range(401))
    keys = {"name": "tokens", "path": str(tmp_path / "*.bin"), "seq_len": 8, "global_batch": 2, "max_bad_shards": 1}
    loader = data.build(job(**keys), 0, 1)
    with (tmp_path / "b.bin").open("r+b") as file:
        file.truncate(300)
    samples = [loader.next()["tokens"] for _ in range(50)]
    assert all(batch.shape == (2, 8) for batch in samples)
    assert "it has been cut off since it was opened" in loader.news()[str(tmp_path / "b.bin")]
