"""Text that the tokenizer does not know gives a warning before anything starts, because it would be learned as the
unknown token.
"""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from titan_hydra import cli
from titan_hydra.core.data import files, unknown
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import warnings
from titan_hydra.experiments.compose.compose import compose_unchecked

ROWS = ["ACGT" * 20] * 90 + ["ACgt\n" * 16] * 10  # 6 % of the characters are g, t or newlines


@pytest.fixture
def letters(tmp_path):
    """Return a tokenizer.json with one token for each letter A, C, G and T."""
    words = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, **{letter: 1 + place for place, letter in enumerate("ACGT")}}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    words.add_tokens(["user", "assistant"])
    words.save(str(tmp_path / "letters.json"))
    return tmp_path / "letters.json"


def warned(*overrides):
    return [
        line
        for fault in warnings(freeze(compose_unchecked("steps=1", "lr_scheduler.warmup_steps=0", *overrides)))
        if "are unknown to" in (line := str(fault))
    ]


def write(folder, name, texts):
    file = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    elif name.endswith(".txt"):
        file.write_text("".join(texts))
    else:
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        file.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    return file


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_text_of_every_kind_of_file(tmp_path, letters, name):
    own = ("data=text_files", "tokenizer=hf", f"tokenizer.path={letters}")
    file = write(tmp_path, name, ROWS[::-1])
    (line,) = warned(*own, f"data.path={file}")
    assert (
        line.startswith(f"data.path={file}: ") and f"unknown to the tokenizer {letters}, most often 'g', 't', '" in line
    )
    assert not warned(*own, f"data.path={write(tmp_path, f'known.{name}', ROWS[:9])}")
    assert not warned("data=text_files", f"data.path={file}"), "a tokenizer of bytes knows everything"


def test_bytes_and_byte_fallback_know_everything(tmp_path):
    """Tokenizers of bytes or with byte fallback know every text even if they name an unknown token, as Llama 2's does."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "</s>"]
    bytewise = tokenizers.Tokenizer(
        models.BPE({letter: place for place, letter in enumerate(alphabet)}, [], unk_token="</s>")
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "A": 258}
    fallback = tokenizers.Tokenizer(models.BPE(named, [], unk_token="<unk>", byte_fallback=True))
    for place, words in enumerate((bytewise, fallback)):
        words.add_special_tokens(["</s>"])
        words.save(str(tmp_path / f"{place}.json"))
        own = ("tokenizer=hf", f"tokenizer.path={tmp_path}/{place}.json", "data=text_files")
        assert not warned(*own, f"data.path={write(tmp_path, 'a.txt', ROWS)}")


def test_an_unknown_token_of_many_characters_counts_by_characters(tmp_path):
    """A unigram model makes one unknown token of a run of unknown characters. So half the characters of a soft-masked
    text may be unknown, although less than a hundredth of its tokens are.
    """
    words = tokenizers.Tokenizer(models.Unigram([("<unk>", -9.0), ("</s>", -9.0), ("A", -1.0)], unk_id=0))
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "unigram.json"))
    file = write(tmp_path, "a.jsonl", ["A" * 4000 + "c" * 4000])
    (line,) = warned("tokenizer=hf", f"tokenizer.path={tmp_path}/unigram.json", "data=text_files", f"data.path={file}")
    assert "0.0% of the tokens and 50.0% of the characters" in line and f"most often '{'c' * 20}'" in line


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_data_set_of_the_hub_in_a_local_folder(tmp_path, letters, name):
    """Notes and other files may lie beside the rows. Data sets on the hub itself are not read."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text("of unknown letters " * 99)
    (tmp_path / "set" / "meta.lock").write_text("lock")
    own = ("data=hf", f"data.path={tmp_path}/set", "tokenizer=hf", f"tokenizer.path={letters}")
    write(tmp_path / "set", name, ROWS[:9])
    assert not warned(*own)
    write(tmp_path / "set", name, ROWS[::-1])
    (line,) = warned(*own)
    assert line.startswith(f"data.path={tmp_path}/set: ") and "most often 'g', 't', " in line
    assert not warned("data=hf", "data.path=somebody/set", *own[2:]) and not warned("data=c4", *own[2:])


def test_little_of_a_large_data_set_is_read(tmp_path, letters, monkeypatch):
    """A few rows of a few files are read, and only the first cell of a sweep encodes them."""
    for number in range(30):
        write(tmp_path, f"{number:02}.jsonl", [f"{number:02} " * 10_000] * 100)
    write(tmp_path, "whole.txt", ["A"] * 100_000)
    taken, rows = [], files.rows

    def watched(file, *rest):
        for number, text in rows(file, *rest):
            taken.append(file.name)
            yield number, text

    monkeypatch.setattr(files, "rows", watched)
    own = ("data=text_files", "tokenizer=hf", f"tokenizer.path={letters}")
    assert warned(*own, f"data.path={tmp_path}/??.jsonl")
    assert len(set(taken)) == 8 and len(taken) <= unknown.FILES * unknown.ROWS
    before = unknown.count.cache_info()
    assert warned(*own, f"data.path={tmp_path}/??.jsonl", "optimizer.lr=1")
    assert unknown.count.cache_info().misses == before.misses
    assert [len(text) for text in files.beginnings(tmp_path / "whole.txt", "text", 3, 50)] == [50]


def test_what_cannot_be_read_gives_no_warning(tmp_path, letters):
    """Instead a rule, or later a rank, reports the unreadable file."""
    (tmp_path / "a.jsonl").write_text("{\n")
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "g"}))
    for name in ("a.jsonl", "a.parquet", "b.jsonl"):
        assert not warned(
            "data=text_files", "tokenizer=hf", f"tokenizer.path={letters}", f"data.path={tmp_path / name}"
        )


def test_the_embedded_corpus(letters):
    (line,) = warned("tokenizer=hf", f"tokenizer.path={letters}")
    assert line.startswith("data.name=embedded: ")


def test_encoding_counts_what_is_unknown(tmp_path, letters, capsys):
    file = write(tmp_path, "a.txt", ROWS)
    assert (
        cli.main(
            [
                "data",
                "encode",
                "--tokenizer",
                str(letters),
                "--out",
                f"{tmp_path}/a.bin",
                "--workers",
                "1",
                str(file),
            ]
        )
        == 0
    )
    assert ", 6.0% unknown to the tokenizer" in capsys.readouterr().out
