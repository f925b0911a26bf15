"""Test what the checks read from files: paths and globs, and sizes of vocabularies."""

import json

import pytest

from titan_hydra.core.job.config.files import expand, similar, vocabulary_size
from titan_hydra.core.job.config.schema import Tokenizer


def test_paths_globs_and_folders(tmp_path):
    for name in ("a[1].txt", "b.txt", ".hidden"):
        (tmp_path / name).touch()
    assert expand(str(tmp_path / "a[1].txt")) == [tmp_path / "a[1].txt"]
    assert expand(str(tmp_path / "*.txt")) == [tmp_path / "a[1].txt", tmp_path / "b.txt"]
    assert expand(str(tmp_path)) == [tmp_path / "a[1].txt", tmp_path / "b.txt"]
    assert expand(str(tmp_path / "c.txt")) == []
    assert similar(str(tmp_path / "bb.txt")) == (str(tmp_path / "b.txt"),)


def test_vocabulary_sizes(tmp_path):
    assert vocabulary_size(Tokenizer(name="embedded")) == 4096
    file = tmp_path / "tokenizer.json"
    for vocabulary in ({"a": 0, "b": 1}, [["a", 0.0], ["b", -1.0]]):
        file.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 4}]}))
        assert vocabulary_size(Tokenizer(name="hf", path=str(file))) == 5
    file.write_text("no tokenizer at all\n")
    with pytest.raises(ValueError, match="not a tokenizer"):
        vocabulary_size(Tokenizer(name="tiktoken", path=str(file)))
