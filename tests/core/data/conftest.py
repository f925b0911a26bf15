"""Jobs and small corpora for all tests of data."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from titan_hydra import cli
from titan_hydra.core.job.config import from_dict, schema

TEXTS = [f"Document {i}: " + " ".join(f"word{i * j % 97}" for j in range(i % 40 + 1)) for i in range(120)]


@pytest.fixture
def job():
    """Return a function that makes a job of small samples; keyword arguments are keys of `data`."""

    def make(seed=0, **data):
        job = schema.Job(seed=seed)
        job.model.vocab_size = 4096
        job.data = from_dict(
            schema.Data, {"name": "embedded", "seq_len": 32, "local_batch": 2, "global_batch": 4, "prefetch": 0} | data
        )
        return job

    return make


@pytest.fixture
def corpus(tmp_path):
    """Write the same documents in every kind of file; return a dict of data keys by name of the source."""
    (tmp_path / "one.jsonl").write_text(jsonl(TEXTS))
    (tmp_path / "parts").mkdir()
    for part in range(3):
        with gzip.open(tmp_path / "parts" / f"{part}.json.gz", "wt") as stream:
            stream.write(jsonl(TEXTS[part::3]))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS, "id": range(len(TEXTS))}), tmp_path / "one.parquet", row_group_size=50
    )
    (tmp_path / "books").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "books" / f"{i:03}.txt").write_text(text)
    (tmp_path / "single.txt").write_text("\n".join(TEXTS))
    encode(tmp_path / "one.bin", tmp_path / "one.jsonl")
    return {
        "embedded": {"name": "embedded"},
        "synthetic": {"name": "synthetic"},
        "tokens": {"name": "tokens", "path": str(tmp_path / "one.bin")},
        "hf": {"name": "hf", "path": str(tmp_path / "parts")},
    } | {
        name: {"name": "text_files", "path": str(tmp_path / path)}
        for name, path in [
            ("jsonl", "one.jsonl"),
            ("shards", "parts/*.json.gz"),
            ("parquet", "one.parquet"),
            ("books", "books"),
            ("single", "single.txt"),
        ]
    }


def jsonl(texts):
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))


def encode(out, *files):
    """Run `titan data encode` in this process."""
    assert (
        cli.main(["data", "encode", "--tokenizer", "embedded", "--workers", "1", "--out", str(out), *map(str, files)])
        == 0
    )
