"""`titan generate scores` gives each text the log-probability of a separate float64 computation, however texts are batched
or cut.
"""

import csv
import gzip
import json

import pyarrow
import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_hydra import cli
from titan_hydra.core.data import tokenizer
from titan_hydra.core.job.config import schema, to_dict
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.models.llama3.config import Llama3Config
from titan_hydra.core.train import score
from titan_hydra.instruments.verify import reference
from titan_hydra.instruments.verify.multipliers import Multipliers

WORDS = tokenizer.load(schema.Tokenizer(name="embedded"))
MODEL = Llama3Config(
    name="tiny", vocab_size=4096, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=40, max_seq_len=64
)
TEXTS = [
    "The function returns a tensor.",
    "a",
    "Every rank reads its own shard of the file, and no rank waits for another.",
    "x = [1]",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run's directory with one checkpoint, of a model whose predictions depend on positions and attention."""
    model, folder = build(MODEL, 64), tmp_path_factory.mktemp("score") / "run"
    init_weights(model, MODEL, seed=0)
    for parameter in model.layers.parameters():
        parameter.data.mul_(5)
    model.output.weight.data.mul_(3)
    dcp.save(
        {"model": model.state_dict()},
        storage_writer=dcp.FileSystemWriter(folder / "checkpoints/step-00000010"),
        no_dist=True,
    )
    config = {"model": to_dict(MODEL), "tokenizer": to_dict(schema.Tokenizer(name="embedded")), "data": {"seq_len": 48}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {name: value.double() for name, value in model.state_dict().items()}


def losses(weights, ids: list[list[int]]) -> list[list[float]]:
    """Return the float64 losses of all tokens except the first of each document. All documents are in one row, under a
    document mask.
    """
    rows = torch.tensor([[token for document in ids for token in document]])
    documents = torch.tensor([[number for number, document in enumerate(ids) for _ in document]])
    x, scales = weights["tok_embeddings.weight"][rows], Multipliers(1.0, 1.0, MODEL.head_width**-0.5)
    found = reference.forward(weights, x, documents, MODEL, reference.Routed(), scales)[0].log_softmax(-1)
    ends = [sum(map(len, ids[: number + 1])) for number in range(len(ids))]
    return [
        [-found[begin + place, document[place + 1]].item() for place in range(len(document) - 1)]
        for begin, document in zip([0, *ends], ids, strict=False)
    ]


def titan(capsys, *words, status=0):
    assert cli.main(["generate", "scores", *map(str, words)]) == status
    return capsys.readouterr()


def write(folder, ending):
    """Write the texts as a file of this kind."""
    file = folder / f"texts{ending}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    if ending == ".csv":
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([("name", "text"), *((str(n), text) for n, text in enumerate(TEXTS))])
    elif ending == ".txt":
        file.write_text("\n\n".join(TEXTS) + "\n")
    else:
        file.write_bytes({".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": packed}[ending](lines))
    return file


def packed(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".txt"])
def test_each_text_has_the_nats_of_its_document(run, tmp_path, capsys, monkeypatch, ending):
    """The results are compared with those of documents that share a row under a mask, computed by separate formulas."""
    folder, weights = run
    expected = [sum(document) for document in losses(weights, [WORDS.document(text) for text in TEXTS])]
    monkeypatch.setattr(score, "TOGETHER", 3)
    out = titan(capsys, folder, write(tmp_path, ending), "--out", tmp_path / "scores.jsonl").out
    found = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["row"] for row in found] == ([1, 3, 5, 7] if ending == ".txt" else [1, 2, 3, 4])
    assert [row["tokens"] for row in found] == [len(WORDS.document(text)) - 1 for text in TEXTS]
    assert [row["nats"] for row in found] == pytest.approx(expected, rel=1e-5)
    mean = sum(expected) / sum(row["tokens"] for row in found)
    assert f"scores.jsonl: 4 texts, {sum(row['tokens'] for row in found)} tokens, {mean:.4f} nats per token" in out


def test_one_text_in_a_forward_or_all_is_the_same_and_so_is_an_export(run, tmp_path, capsys, monkeypatch):
    file = write(tmp_path, ".jsonl")
    together = titan(capsys, run[0], file)
    assert "4 texts" in together.err
    rows = [json.loads(line) for line in together.out.splitlines()]
    monkeypatch.setattr(score, "LOGITS", 1)
    alone = [json.loads(line) for line in titan(capsys, run[0] / "checkpoints/step-00000010", file).out.splitlines()]
    assert cli.main(["checkpoint", "export", str(run[0]), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    exported = [json.loads(line) for line in titan(capsys, tmp_path / "hf", file, "--context", 48).out.splitlines()]
    for other in (alone, exported):
        assert [row["nats"] for row in other] == pytest.approx([row["nats"] for row in rows], rel=1e-5)
    assert [row["nats"] for row in exported] == [row["nats"] for row in alone], "bit by bit"


@pytest.mark.parametrize("context", [1, 7, 48])
def test_a_long_text_is_read_in_windows_that_overlap_by_half(run, tmp_path, capsys, context):
    """Every token is predicted once, from at least half a context of tokens before it, or from all tokens if there are
    fewer.
    """
    folder, weights = run
    text = " ".join(TEXTS * 3)
    ids = WORDS.document(text)
    expected, done, begin = 0.0, 1, 0
    while done < len(ids):
        window = ids[begin : begin + context + 1]
        expected += sum(losses(weights, [window])[0][done - begin - 1 :])
        done = begin + len(window)
        begin = done - 1 - context // 2
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}))
    words = [] if context == 48 else ["--context", context]  # the default is the run's data.seq_len
    row = json.loads(titan(capsys, folder, tmp_path / "long.jsonl", *words).out)
    assert len(ids) > 100 and (row["tokens"], row["nats"]) == (len(ids) - 1, pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', [], "a.jsonl:2: column 'text' holds int, not text"),
        ("a.jsonl", '{"text": "a"}\nnothing\n', [], "a.jsonl:2: not a JSON line"),
        ("a.jsonl", '{"body": "a"}\n', [], "no column 'text', but 'body': set data.text_key (--text-key)"),
        ("a.jsonl.zst", '{"text": "a"}\n', [], "a.jsonl.zst: cannot be read: "),
        ("a.csv", 'text,b\n"a,3\n', [], "a.csv:2: not CSV"),
        ("a.jsonl", "\n", [], "a.jsonl: no text in it"),
        (
            "a.fasta",
            ">p\nACD\n",
            [],
            "a.fasta ends in none of .txt, .md, .jsonl, .json, .csv, .parquet (also with .gz or .zst behind it); ",
        ),
        ("a.txt", "words", ["--context", "0"], "--context=0: must be at least 1; nearest legal: 1"),
        ("a.txt", "words", ["--context", "65"], "--context=65: is more than model.max_seq_len; nearest legal: 64"),
        ("a.txt", "words", ["--step", "7"], "--step=7: run has no such checkpoint; nearest legal: 10"),
    ],
)
def test_what_cannot_be_scored_is_one_line(run, tmp_path, capsys, name, content, words, message):
    (tmp_path / name).write_text(content)
    err = titan(capsys, run[0], tmp_path / name, "--out", tmp_path / "out.jsonl", *words, status=2).err
    assert message in err and err.count("\n") == 1, err


def test_nothing_is_written_over(run, tmp_path, capsys):
    (tmp_path / "out.jsonl").touch()
    assert (
        "exists already"
        in titan(capsys, run[0], write(tmp_path, ".txt"), "--out", tmp_path / "out.jsonl", status=2).err
    )
    assert "no such file" in titan(capsys, run[0], tmp_path / "texts.jsnol", status=2).err
