"""Test tokenizers, and the verbs of `titan data` that make and use them."""

import argparse
import base64
import json
import re
import resource
import subprocess
import sys
import unicodedata

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.tokenizer import letters_of_bytes
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.embedded import Embedded
from titan_hydra.core.data.shards import BadShards
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.files import vocabulary_size
from titan_hydra.experiments.runs import command_data

EMBEDDED = schema.Tokenizer(name="embedded")
LOADED = tokenizer.load(EMBEDDED)


@settings(deadline=None)
@given(st.text())
@example("def f(x):\n\t\treturn x ** 2  # naïve\r\n\r\n    ")
@example("日本語 العربية 🏳️‍🌈 e\u0301 \x00\x07 1234567 don't DON'T")
def test_text_comes_back(text):
    assert LOADED.decode(LOADED.encode(text)) == text


def test_names_of_special_tokens_in_a_text_are_text():
    text = "a<|end_of_text|>b<|begin_of_text|>"
    assert max(LOADED.encode(text)) < 3840
    assert LOADED.decode(LOADED.encode(text)) == text


def test_embedded_is_what_the_design_says():
    assert vocabulary_size(EMBEDDED) == 4096
    assert (LOADED.vocab_size, LOADED.bos_id, LOADED.eos_id) == (4096, 3840, 3841)
    assert LOADED.decode([3840, 3841, 3846, 3849, 4095]) == (
        "<|begin_of_text|><|end_of_text|><|start_header_id|><|eot_id|><|reserved_special_token_250|>"
    )
    text = "The standard library is what every installation of Python brings along.\n"
    assert len(LOADED.encode(text)) < len(text) / 3


def test_a_million_blanks_do_not_end_the_process():
    text = "a" + " " * 1_500_000 + "\t\n" * 600_000 + "b"
    assert LOADED.decode(LOADED.encode(text)) == text


def test_imports_bring_in_no_library():
    check = (
        "import sys; import titan_hydra.core.data.tokenizer; import titan_hydra.core.data.files; import titan_hydra.core.data; "
        "assert not {'torch', 'tiktoken', 'tokenizers', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def hf(path, bos="<s>", eos="</s>"):
    """Return a byte-level tokenizer.json with two special tokens; `null` leaves one of them out."""
    model = tokenizers.models.BPE(
        vocab={character: i for i, character in enumerate(sorted(letters_of_bytes()))}, merges=[]
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([token for token in (bos, eos) if token])
    made.save(str(path))
    return schema.Tokenizer(name="hf", path=str(path))


def test_hf(tmp_path):
    config = hf(tmp_path / "tokenizer.json")
    loaded = tokenizer.load(config)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (258, 256, 257)
    assert vocabulary_size(config) == 258
    text = "naïve 🙂</s> x"
    assert loaded.decode(loaded.encode(text)) == text
    assert 257 not in loaded.encode(text)
    assert loaded.document("a")[0] == 256
    assert loaded.document("a")[-1] == 257


def test_hf_with_unusual_names_asks_the_config_beside_it(tmp_path):
    config = hf(tmp_path / "tokenizer.json", "<start>", "<stop>")
    with pytest.raises(ConfigError, match="no end-of-text token"):
        tokenizer.load(config)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<start>", "eos_token": {"content": "<stop>"}})
    )
    assert (tokenizer.load(config).bos_id, tokenizer.load(config).eos_id) == (256, 257)


def test_hf_with_one_token_for_both_separates_documents_once(tmp_path):
    config = hf(tmp_path / "tokenizer.json", None, "<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    )
    loaded = tokenizer.load(config)
    assert loaded.bos_id is None
    assert loaded.document("a") == [*loaded.encode("a"), 256]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tiktoken", None, r"tokenizer\.path=null: tokenizer=tiktoken needs the path of a tokenizer\.model"),
        ("hf", None, r"needs the path of a tokenizer\.json"),
        ("tiktoken", "", "ranks 256 bytes or more from 0 without gaps, this one 0"),
        ("tiktoken", "{}", "not a tokenizer.model"),
        ("tiktoken", "IQ== 0\nIg== 2\n", "without gaps"),
        ("hf", "IQ== 0\n", r"not a tokenizer\.json"),
        ("hf", '{"model": {"vocab": {"a": 0}}}', r"not a tokenizer\.json"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, name, content, message):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    config = schema.Tokenizer(name=name, path=None if content is None else str(path))
    with pytest.raises(ConfigError, match=message) as caught:
        tokenizer.load(config)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.path=.*/none: No such file"):
        tokenizer.load(schema.Tokenizer(name="hf", path=str(tmp_path / "none")))


# The command


def run(*arguments):
    return cli.main(["data", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.model"
    path.with_name("corpus.txt").write_text("".join(Embedded().pieces))
    assert run("train-tokenizer", "--vocab", 1500, "--out", path, path.with_name("corpus.txt")) == 0
    return path


def test_trained_tokenizer_is_of_llama3s_kind(trained):
    loaded = tokenizer.load(schema.Tokenizer(name="tiktoken", path=str(trained)))
    assert (loaded.vocab_size, loaded.bos_id) == (1500, 1244)
    assert vocabulary_size(schema.Tokenizer(name="tiktoken", path=str(trained))) == 1500
    first = [base64.b64decode(line.split()[0]) for line in trained.read_text().splitlines()[:256]]
    assert first == [bytes([byte]) for byte in range(256)]


def test_tiktoken_encodes_as_the_trained_tokenizer_does():
    """The text has every kind of character and code, not only the text from which the merges were learned."""
    corpus = [
        piece.text
        for _, piece in zip(range(40), command_data._texts(argparse.Namespace(files=[]), BadShards()), strict=False)
    ]
    learnt = command_data._train(corpus, 800)
    bytes_of = command_data._bytes_of_ids(learnt)
    ranks = [bytes([byte]) for byte in range(256)] + [token for _, token in sorted(bytes_of.items()) if len(token) > 1]
    ours = tiktoken.Encoding(
        "test",
        pat_str=tokenizer.LLAMA3_SPLIT,
        mergeable_ranks={token: i for i, token in enumerate(ranks)},
        special_tokens={},
    )
    unusual = [
        "".join(chr(code) for code in range(start, start + 500) if unicodedata.category(chr(code)) != "Cs")
        for start in range(0, 0x20000, 500)
    ]
    for text in [*corpus, *unusual, "aaaa" * 50, "   \n\n\t  x", "it'S we'LL 12345"]:
        assert [bytes_of[id] for id in learnt.encode(text).ids] == [ranks[id] for id in ours.encode_ordinary(text)]


def test_train_on_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the hat on the cat " * 50)
    assert run("train-tokenizer", "--vocab", 520, "--out", tmp_path / "x.model", tmp_path / "a.txt") == 0
    assert run("train-tokenizer", "--vocab", 4096, "--out", tmp_path / "y.model", tmp_path / "a.txt") == 2
    assert "the text is too short for it" in capsys.readouterr().err
    assert not (tmp_path / "y.model").exists()
    assert run("train-tokenizer", "--vocab", 100, "--out", tmp_path / "y.model") == 2
    assert "--vocab=100" in capsys.readouterr().err


@pytest.fixture
def documents(tmp_path):
    """Return files of every kind, and the documents in the order in which the files are given to the command."""
    texts = [f"{kind} {i}: " + "naïve text " * (i % 7) for kind in ("text", "line", "record") for i in range(9)]
    for i, text in enumerate(texts[:9]):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[9:18]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[18:]}), tmp_path / "records.parquet")
    return [f"{tmp_path}/?.txt", tmp_path / "lines.jsonl", tmp_path / "records.parquet"], texts


def test_encode_keeps_order_whatever_the_number_of_workers(tmp_path, documents, monkeypatch):
    paths, texts = documents
    monkeypatch.setattr(command_data, "BATCH_CHARACTERS", 100)  # so small that both workers get many batches
    for workers in (1, 2):
        assert (
            run("encode", "--tokenizer", "embedded", "--workers", workers, "--out", tmp_path / f"{workers}.bin", *paths)
            == 0
        )
    one, two = ((tmp_path / f"{workers}.bin").read_bytes() for workers in (1, 2))
    assert one == two
    assert np.frombuffer(one, np.uint16).tolist() == [token for text in texts for token in LOADED.document(text)]
    header = json.loads((tmp_path / "1.bin.json").read_text())
    assert header == {
        "dtype": "uint16",
        "tokens": len(one) // 2,
        "documents": 27,
        "vocab_size": 4096,
        "bos_id": 3840,
        "eos_id": 3841,
        "tokenizer_sha256": LOADED.sha256,
    }
    assert not list(tmp_path.glob("*.partial"))


def test_encode_without_a_tokenizer_takes_the_embedded_one(tmp_path, documents):
    (paths, _), named, unnamed = documents, tmp_path / "named.bin", tmp_path / "unnamed.bin"
    assert run("encode", "--tokenizer", "embedded", "--workers", 1, "--out", named, paths[1]) == 0
    assert run("encode", "--workers", 1, "--out", unnamed, paths[1]) == 0
    assert unnamed.read_bytes() == named.read_bytes()
    header = json.loads((tmp_path / "unnamed.bin.json").read_text())
    assert (
        header == json.loads((tmp_path / "named.bin.json").read_text()) and header["tokenizer_sha256"] == LOADED.sha256
    )


def test_encode_takes_a_tokenizer_by_its_path(tmp_path, documents, trained):
    config = hf(tmp_path / "tokenizer.json")
    assert run("encode", "--tokenizer", config.path, "--workers", 1, "--out", tmp_path / "hf.bin", documents[0][1]) == 0
    assert run("encode", "--tokenizer", trained, "--workers", 1, "--out", tmp_path / "own.bin", documents[0][1]) == 0
    assert [json.loads((tmp_path / name).read_text())["vocab_size"] for name in ("hf.bin.json", "own.bin.json")] == [
        258,
        1500,
    ]


def test_large_vocabularies_take_four_bytes(tmp_path, documents):
    ranks = [bytes([byte]) for byte in range(256)] + [i.to_bytes(3, "big") for i in range(70_000)]
    (tmp_path / "large.model").write_text(
        "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(ranks))
    )
    assert (
        run(
            "encode",
            "--tokenizer",
            tmp_path / "large.model",
            "--workers",
            1,
            "--out",
            tmp_path / "x.bin",
            documents[0][1],
        )
        == 0
    )
    assert json.loads((tmp_path / "x.bin.json").read_text())["dtype"] == "uint32"
    assert np.fromfile(tmp_path / "x.bin", np.uint32)[0] == 70_256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": "nothing.txt"}, "FILES=.*nothing.txt: no such file"),
        ({"tokenizer": "nothing.model"}, "tokenizer.path=nothing.model: No such file"),
        ({"out": "/nowhere/x.bin"}, "--out=/nowhere/x.bin: No such file or directory"),
        ({"workers": 0}, "--workers=0: at least 1"),
        ({"files": "bad.jsonl"}, r"bad\.jsonl:2: not a JSON line"),
        ({"files": "blank.jsonl"}, "no text"),
    ],
)
def test_encode_fails_in_one_line_and_leaves_nothing(tmp_path, capsys, change, message):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    keys = {"tokenizer": "embedded", "out": tmp_path / "x.bin", "workers": 1} | change
    name = keys.pop("files", "a.txt")
    assert run("encode", *(part for key, value in keys.items() for part in (f"--{key}", value)), tmp_path / name) == 2
    error = capsys.readouterr().err
    assert re.search(message, error.strip().splitlines()[-1])
    assert "Traceback" not in error
    assert not list(tmp_path.glob("x.bin*"))


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("command", ["encode", "train-tokenizer"])
def test_a_bad_row_costs_this_row_alone(tmp_path, capsys, form, command):
    texts = [f"row {row} " + "naïve text " * row for row in range(9)]
    texts[3:3], file = [None], tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    elif form == "json":
        file.write_text(json.dumps([{"text": text} for text in texts], indent=0))
    elif form == "jsonl":
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        file.write_text(
            "".join(f"{text}\n" for text in ("text,id", *((text and f"{text},1") or '"a"x,1' for text in texts)))
        )
    (tmp_path / "good.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    options = ["--workers", 1] if command == "encode" else ["--vocab", 514]
    assert run(command, *options, "--out", tmp_path / "x.bin", file) == 2
    assert re.search(r"a\.\w+:( row )?\d+: .*; --max-bad-rows=0$", capsys.readouterr().err.strip())
    assert not list(tmp_path.glob("x.bin*"))
    assert run(command, *options, "--max-bad-rows", 1, "--out", tmp_path / "x.bin", file) == 0
    printed = capsys.readouterr()
    assert len(re.findall(rf"^left out: {file}:.*\d+: ", printed.err, re.MULTILINE)) == 1
    assert "1 row left out" in printed.out
    assert run(command, *options, "--out", tmp_path / "good.bin", tmp_path / "good.jsonl") == 0
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "good.bin").read_bytes()


def test_a_full_disk_is_one_line_and_keeps_the_old_file(tmp_path):
    """A limit on the file size replaces a full disk: the real write fails half-way."""
    (tmp_path / "a.txt").write_text("some text " * 200_000)
    (tmp_path / "x.bin").write_bytes(b"old")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "titan_hydra.cli",
            "data",
            "encode",
            "--workers",
            "1",
            "--out",
            tmp_path / "x.bin",
            tmp_path / "a.txt",
        ],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == f"--out={tmp_path / 'x.bin'}: File too large"
    assert (tmp_path / "x.bin").read_bytes() == b"old"
    assert not list(tmp_path.glob("*.partial"))
