"""A row that cannot be used costs this row alone, on every layout; files in folders, and files of other forms."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import files
from titan_hydra.core.data.shards import ROW, BadRow
from titan_hydra.core.job.config import files as config_files
from titan_hydra.core.job.rules import data as rules

from .test_files import zst
from .test_shards import take

DEEP = b'{"text": "deep", "more": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
BAD = {
    "null": b'{"text": null}',
    "number": b'{"text": 5}',
    "missing": b'{"txt": "x"}',
    "list": b"[1]",
    "surrogate": b'{"text": "half \\ud83d of it"}',
    "latin1": b'{"text": "\xff"}',
    "cut": b'{"text": "cut',
    "deep": DEEP,
    "twice": b'{"text": "one", "text": "another"}',
}


def rows_of(texts):
    return [json.dumps({"text": text}).encode() for text in texts]


@pytest.fixture
def lines():
    return rows_of(f"row {row} " + "x" * row for row in range(40))


def found(file):
    return [text if isinstance(text, str) else type(text) for _, text in files.rows(file)]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_row_costs_this_row_alone(job, tmp_path, lines, bad):
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join([*lines[:20], bad, *lines[20:]]))
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(lines))
    keys = {"name": "text_files", "seq_len": 64, "global_batch": 1, "local_batch": 1}
    good, _ = take(job(**keys, path=str(tmp_path / "good.jsonl")), 1, 30)
    left, state = take(job(**keys, path=str(tmp_path / "bad.jsonl"), max_bad_rows=1), 1, 30)
    assert np.array_equal(left, good)
    assert list(state["bad"]) == [f"{ROW}{tmp_path}/bad.jsonl:21"]
    with pytest.raises(ConfigError, match=r"bad\.jsonl:21: .*; data\.max_bad_rows=0$"):
        take(job(**keys, path=str(tmp_path / "bad.jsonl"), max_bad_shards=5), 1, 30)


def test_bad_rows_are_counted_alike_on_every_layout_and_after_a_resume(job, tmp_path, lines):
    bad = list(BAD.values())
    for number in range(3):
        mixed = [row for pair in zip(lines[number::3], bad[number:] + bad, strict=False) for row in pair]
        (tmp_path / f"{number}.jsonl").write_bytes(b"\n".join(mixed))
    keys = {"name": "text_files", "path": str(tmp_path), "seq_len": 64, "global_batch": 8, "shuffle_buffer": 3}
    one, state = take(job(**keys, max_bad_rows=40), 1, 40)
    number = len(state["bad"])
    assert number == 40 and all(name.startswith(ROW) for name in state["bad"])
    for ranks in (2, 4):
        many, of_many = take(job(**keys, max_bad_rows=number), ranks, 40)
        assert np.array_equal(many, one) and of_many["bad"] == state["bad"]
    first, middle = take(job(**keys, max_bad_rows=number), 4, 13)
    rest, end = take(job(**keys, max_bad_rows=number), 2, 27, middle)
    assert np.array_equal(np.concatenate([first, rest]), one) and end["bad"] == state["bad"]
    loader = data.build(job(**keys, max_bad_rows=number - 1), 0, 8)
    with pytest.raises(ConfigError, match=rf"the last of {number} bad rows; data\.max_bad_rows={number - 1}$"):
        loader.take_news(state["bad"])  # no rank has met them all


def test_a_csv_and_a_parquet_keep_their_other_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2\n3,caf\xe9\n4,"a" b\n5,five\n')
    assert found(tmp_path / "a.csv") == ["one", BadRow, BadRow, BadRow, "five"]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet", row_group_size=2)
    assert found(tmp_path / "a.parquet") == ["a", BadRow, "c"]
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    for name, column in (("twice.parquet", "text"), ("a.parquet", "body"), ("a.csv", "body")):
        with pytest.raises(ConfigError, match=f"{name}: .* column"):
            list(files.rows(tmp_path / name, column))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.csv.zst"])
def test_what_stands_before_a_damage_is_read(tmp_path, name):
    """A truncated file lacks one row; garbage costs all behind it, and counts as a bad shard."""
    texts = [f"row {row} " + "y" * (row % 7) for row in range(20_000)]
    content = ("text\n" + "".join(f"{text}\n" for text in texts)).encode()
    if ".jsonl" in name:
        content = b"\n".join(rows_of(texts)) + b"\n"
    pack = gzip.compress if name.endswith(".gz") else zst
    file = tmp_path / name
    file.write_bytes(pack(content)[:-40])
    *before, last = found(file)
    assert last is BadRow and before == texts[: len(before)] and len(before) > 100
    file.write_bytes(pack(content) + b"garbage")
    rows, before = files.rows(file), []
    with pytest.raises(ConfigError, match=rf"{name}:\d+: cannot be read from here on") as error:
        before.extend(text for _, text in rows)
    assert before == texts and not isinstance(error.value, BadRow)
    file.write_bytes(b"garbage")
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: "):
        list(files.rows(file))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
        ('\ufeff [\n  {\n    "text": "a [{\\"}"\n  },\n  {"text": "b"}\n]\n', ['a [{"}', "b"]),
        ('[{"text": "a"}, null, {"text": "b"}, [1], 5]', ["a", BadRow, "b", BadRow, BadRow]),
        ('[{"text": "a"}, {"text": nothing}, {"text": "b"}', ["a", BadRow, "b", BadRow]),
        ('[{"text": "a"}, {"text": "b', ["a", BadRow]),
        ("[]", []),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    ],
)
def test_a_json_file_may_be_an_array_of_records(tmp_path, packed, content, texts):
    file = tmp_path / ("x.json.gz" if packed else "x.json")
    file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert found(file) == texts
    assert [*map(str, files.rows(file, start=1, every=2))] == [*map(str, files.rows(file))][1::2]


def test_lines_of_a_pretty_array_are_named(tmp_path):
    (tmp_path / "x.json").write_text('[\n  {"text": "a"},\n  {\n    "txt": 5\n  }\n]\n')
    _, (number, bad) = files.rows(tmp_path / "x.json")
    assert number == 1 and bad.shard == f"{ROW}{tmp_path}/x.json:3"


def test_a_byte_order_mark_is_not_learned(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert found(tmp_path / "x.txt") == ["Hello"]


def test_lines_end_where_editors_end_them(tmp_path):
    (tmp_path / "x.txt").write_bytes("one\u2028still one\x0c\x85\r\n\ntwo\n".encode())
    assert list(files.texts(tmp_path / "x.txt", "text")) == [(1, "one\u2028still one\x0c\x85"), (3, "two")]


def test_linked_folders_are_read_once(tmp_path):
    for name in ("corpus/own", "elsewhere/deep", "corpus/.ipynb_checkpoints"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jsonl").write_text("{}")
    (tmp_path / "corpus/a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/again").symlink_to(tmp_path / "elsewhere/deep")
    (tmp_path / "corpus/also").symlink_to("own")
    (tmp_path / "corpus/own/circle").symlink_to("..")
    names = [str(file.relative_to(tmp_path / "corpus")) for file in config_files.expand(str(tmp_path / "corpus"))]
    assert names == ["a/deep/x.jsonl", "own/x.jsonl"]


def test_descriptions_in_a_folder_are_no_data(job, tmp_path):
    for name in ("README.md", "dataset_infos.json", "notes.md", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert [file.name for file in files.require("data.path", str(tmp_path), files.TEXT_SUFFIXES)] == ["a.jsonl"]
    (tmp_path / "a.jsonl").rename(tmp_path / "a.txt")
    (tmp_path / "dataset_infos.json").unlink()
    names = [file.name for file in files.require("data.path", str(tmp_path), files.TEXT_SUFFIXES)]
    assert names == ["a.txt", "notes.md"]
    assert [file.name for file in files.require("data.path", f"{tmp_path}/*.md", (".md",))] == ["README.md", "notes.md"]


@pytest.mark.parametrize(
    ("name", "content", "keys", "key"),
    [
        ("a.jsonl", b'{"text": null}\n' * 3, {}, "data.max_bad_rows=0"),
        ("a.jsonl", b'{"text": null}\n' * 3, {"max_bad_rows": 5}, "none of the first rows"),
        ("a.jsonl", b'{"body": "a"}\n', {}, "set data.text_key"),
        ("a.csv", b"body\na\n", {"max_bad_rows": 5}, "set data.text_key"),
        ("a.jsonl.gz", b'{"text": "a"}\n', {}, "not a .gz file"),
        ("a.jsonl.zst", b'{"text": "a"}\n', {}, "not a .zst file"),
        ("a.parquet", b'{"text": "a"}\n', {}, "not a Parquet file"),
        ("a.parquet", b"PAR1 cut off", {}, "not a Parquet file"),
        ("a.txt", "text ".encode("utf-16") * 3000, {}, "cannot be read"),
    ],
)
def test_an_error_of_the_file_is_known_before_anything_starts(job, tmp_path, name, content, keys, key):
    (tmp_path / name).write_bytes(content)
    (fault,) = rules.sources_find_nothing_wrong(job(name="text_files", path=str(tmp_path), **keys))
    assert key in str(fault) and "\n" not in str(fault)


def test_bytes_that_are_not_utf8_cost_their_row_of_a_parquet(tmp_path):
    offsets = pyarrow.py_buffer(np.array([0, 2, 4, 6], np.int32).tobytes())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"ab\xff\xfecd")])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet") == ["ab", BadRow, "cd"]


def test_the_first_bytes_of_a_text_may_end_within_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("ä" * 9)
    assert list(files.beginnings(tmp_path / "a.txt", "text", 1, 5)) == ["ää"]


def test_some_bad_rows_may_be_left_out_before_the_start(job, tmp_path, lines):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([BAD["null"], *lines]))
    assert not list(rules.sources_find_nothing_wrong(job(name="text_files", path=str(tmp_path), max_bad_rows=1)))
