import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import files
from titan_hydra.core.data.items import TokenFiles
from titan_hydra.experiments.compose.compose import CONF, compose_job


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("", ["a.txt", "b.txt", "deep/c.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deep/c.txt"]),
        ("none.txt", []),
    ],
)
def test_expand(folder, path, names):
    assert [str(file.relative_to(folder)) for file in files.expand(f"{folder}/{path}")] == names


def test_missing_file_names_key_value_and_near_names(folder):
    with pytest.raises(ConfigError, match=r"data\.path=.*/aa\.txt: no such file; did you mean .*/a\.txt"):
        files.require("data.path", f"{folder}/aa.txt")
    with pytest.raises(ConfigError, match=r"no such file$"):
        files.require("data.path", f"{folder}/nowhere/c.txt")


def test_files_of_no_use(folder):
    (folder / "empty.txt").touch()
    with pytest.raises(ConfigError, match="the file is empty"):
        files.require("data.path", str(folder / "empty.txt"))
    with pytest.raises(ConfigError, match=r"a\.txt ends in none of \.bin"):
        files.require("data.path", str(folder / "a.txt"), (".bin",))
    with pytest.raises(ConfigError, match=r"data\.path=null"):
        files.require("data.path", None)


def jsonl(path, records):
    path.write_bytes(
        b"".join(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n" for record in records)
    )
    return path


@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (1, 4), (9, 7), (30, 1)])
def test_rows_are_numbered_alike_in_every_kind_of_file(tmp_path, start, every):
    texts = [f"text {i}" for i in range(23)]
    lines = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=5)
    # two frames, as pzstd writes them
    (tmp_path / "x.jsonl.zst").write_bytes(zst(lines.read_bytes()[:99]) + zst(lines.read_bytes()[99:]))
    (tmp_path / "x.csv.zst").write_bytes(
        zst("\ufeffid,text\r\n".encode() + b"".join(b'7,"text %d"\r\n' % i for i in range(23)))
    )
    for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.csv.zst", "x.parquet"):
        assert list(files.rows(tmp_path / name, "text", start, every)) == list(enumerate(texts))[start::every]


def zst(content: bytes) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return out.getvalue().to_pybytes()


def test_a_csv_field_may_hold_lines_and_be_long(tmp_path):
    long = "x" * 200_000
    (tmp_path / "x.csv").write_text(f'text,n\n"two\nlines, ""quoted""",1\n{long},2\n')
    assert [text for _, text in files.rows(tmp_path / "x.csv")] == ['two\nlines, "quoted"', long]


@pytest.mark.parametrize(
    ("name", "kind", "made"), [("x.fasta", "text_files", "x.fasta.jsonl"), ("x.npy", "tokens", "x.npy.bin")]
)
def test_the_line_of_a_refusal_converts_the_file(tmp_path, monkeypatch, name, kind, made):
    monkeypatch.chdir(tmp_path)
    if kind == "tokens":
        np.save(name, np.arange(500) % 300)
    else:
        Path(name).write_text(">one here\nACD\nEF\n>two\nGH>I\n")
    with pytest.raises(ConfigError) as refused:
        compose_job(f"data={kind}", f"data.path={name}")
    assert "\n" not in str(refused.value) and f"{name} ends in none of" in str(refused.value)
    line = "python -c" + str(refused.value).partition("python -c")[2]
    subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)
    compose_job(f"data={kind}", f"data.path={made}", "data.seq_len=64")
    if kind == "tokens":
        assert TokenFiles("data.path", made, 300, 100, None).sample(1, 0)["tokens"].tolist() == [*range(100, 201)]
    else:
        assert [text for _, text in files.rows(Path(made))] == ["ACDEF", "GH>I"]


def test_the_lines_of_the_page_write_your_own_token_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.arange(1000))
    page = (CONF.parent / "docs/data.md").read_text()
    exec(page.partition("### Your own token ids")[2].partition("```python\n")[2].partition("```")[0], {})
    job = compose_job("data=tokens", "data.path=corpus.bin", "model.vocab_size=4096", "data.seq_len=10")
    assert TokenFiles("data.path", job.data.path, 4096, 10, None).sample(3, 0)["tokens"].tolist() == [*range(30, 41)]


def test_text_file_is_one_row(folder):
    assert list(files.rows(folder / "a.txt")) == [(0, "a.txt")]
    assert list(files.rows(folder / "a.txt", start=1)) == []


def test_blank_lines_are_passed_over(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a"}, b"\n", {"text": "b"}])
    assert list(files.rows(path)) == [(0, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 1}\n", r"x\.jsonl:2: not a JSON line"),
        (b'{"text": "\xff"}\n', r"x\.jsonl:2: not a JSON line"),
        (b'{"body": "a", "id": 1}\n', r"x\.jsonl:2: no column 'text', but 'body', 'id': set data\.text_key"),
        (b'{"text": 3}\n', r"x\.jsonl:2: column 'text' holds int"),
        (b"[1]\n", r"x\.jsonl:2: not a record but list"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a"}, line])
    with pytest.raises(ConfigError, match=message):
        list(files.good(files.rows(path)))


def test_bad_files_are_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20])
    for name, message in [
        ("x.parquet", "not a Parquet file"),
        ("x.txt", "cannot be read"),
        ("x.jsonl.gz", "the file is cut off here"),
    ]:
        with pytest.raises(ConfigError, match=rf"{name}(:\d+)?: {message}"):
            list(files.good(files.rows(tmp_path / name)))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "y.parquet")
    with pytest.raises(ConfigError, match="no column 'text', but 'body'"):
        list(files.rows(tmp_path / "y.parquet"))
