"""Supervised fine-tuning is the same on every layout, with and without packing and resuming; only what the assistant
says is learned.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.core.checkpoint.steps import cut_back, tensors
from tests.core.job.test_load import validations_are_short
from tests.kits import forked
from titan_hydra import cli
from titan_hydra.core import data, models
from titan_hydra.core.checkpoint.carried import facts_at
from titan_hydra.core.data import tokenizer
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models import layers
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.core.train.objectives.language import IGNORED, cross_entropy
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import case
from titan_hydra.instruments.verify.verify import verify
from titan_hydra.recipes.chat.rows import ConversationReader
from titan_hydra.recipes.chat.template_of_run import template_of_facts

ROOT = Path(__file__).parents[3]
CONVERSATIONS = ROOT / "titan_hydra/recipes/chat/assets/train.jsonl"
SMALL = ("data=embedded_chat", "data.seq_len=96", "validation=off", "model.vocab_size=4096")
LAYOUTS = {
    "accumulation 2": (1, "parallelism=single", "data.local_batch=8"),
    "fsdp 2": (2, "parallelism=fsdp", "data.local_batch=4"),
    "cp 2": (2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16"),
    "tp 2": (2, "parallelism=tp", "data.local_batch=16"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "pp 2, zbv": (2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    "fused loss": (2, "parallelism=fsdp", "data.local_batch=8", "loss=linear_cross_entropy"),
}
RECORDING = """
from titan_hydra.core.job.config.registry import ObjectiveKind, register

register(ObjectiveKind("recording", "recording_on_ranks:Recording", needs=("tokens", "trained", "documents")))
"""
RECORDING_ON_RANKS = '''
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.recipes.chat.objective import SupervisedFineTuning


class Recording(SupervisedFineTuning):
    """Writes the loss of every element that a validation measures, in the order in which microbatches come."""

    def measure(self, output, batch):
        losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=IGNORED)
        files = Path(self.job.paths.runs).glob(f"losses_{dist.get_rank()}_*")
        torch.save(losses.view_as(batch["labels"]), Path(self.job.paths.runs) / f"losses_{dist.get_rank()}_{len([*files])}")
        return super().measure(output, batch)
'''


def test_every_layout_learns_what_one_process_learns():
    cases = [case(name, ranks, *words, base=SMALL, gradients=2e-5) for name, (ranks, *words) in LAYOUTS.items()]
    for outcome in verify(cases, steps=2):
        assert outcome.passed, outcome


@pytest.fixture(scope="module")
def recording(user_modules):
    user_modules({"recording.py": RECORDING, "recording_on_ranks.py": RECORDING_ON_RANKS})


def alone(job, batch):
    """Return the loss of every label, with each conversation in a batch of its own."""
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    losses = torch.zeros(batch["labels"].shape)
    for row in range(batch.samples):
        for document in range(batch["documents"][row].max() + 1):
            places = batch["documents"][row] == document
            with torch.no_grad():
                logits = model(batch["tokens"][row, places][None])[0]
            losses[row, places] = F.cross_entropy(
                logits, batch["labels"][row, places], reduction="none", ignore_index=IGNORED
            )
    return losses


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism=single", "data.local_batch=8"),
        ("parallelism=cp", "parallelism.cp_rotate=ulysses", "gpus=2", "data.local_batch=8"),
        ("parallelism=pp", "gpus=2", "data.local_batch=8"),
        ("parallelism=pp", "parallelism.cp=2", "parallelism.cp_rotate=ulysses", "gpus=4", "data.local_batch=4"),
    ],
    ids=["one", "cp", "pp", "pp and cp"],
)
def test_packed_is_unpacked_token_by_token(tiny, run_job, recording, tmp_path, words):
    job = tiny(
        "data=embedded_chat",
        "train.imports=[recording]",
        "objective.name=recording",
        "validation=on",
        "validation.steps=1",
        "data.seq_len=128",
        "steps=1",
        "optimizer.lr=0",
        "data.global_batch=8",
        "model.n_layers=4",
        f"paths.runs={tmp_path}",
        *words,
    )
    run_job(job)
    batch = data.build(job, 0, 1, "validation").next()
    cp, last = job.parallelism.cp, (job.parallelism.pp - 1) * job.parallelism.cp
    parts = []
    for rank in range(last, last + cp):
        files = sorted(tmp_path.glob(f"losses_{rank}_*"), key=lambda file: int(file.name.rpartition("_")[2]))
        parts.append(torch.cat([torch.load(file) for file in files]))
    found = torch.cat(parts, dim=1)
    assert (batch["labels"] != IGNORED).sum() > 100 and batch["documents"].max() > 3
    assert found.shape == batch["labels"].shape
    torch.testing.assert_close(found, alone(job, batch), rtol=1e-6, atol=2e-6)


def test_a_resumed_run_goes_on_bitwise(tiny, run_job, tmp_path):
    job = tiny(
        "data=embedded_chat",
        "validation=off",
        "data.seq_len=64",
        "steps=8",
        "checkpoint.interval=4",
        "checkpoint.keep_latest_k=0",
        "data.global_batch=64",
        "data.local_batch=16",
        "parallelism=fsdp",
        "gpus=2",
    )
    whole = run_job(job)
    same = run_job(job, cut_back(whole, 4, tmp_path / "same"))
    assert run_job.losses(same) == run_job.losses(whole)
    before, after = tensors(newest(whole / "checkpoints")), tensors(newest(same / "checkpoints"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_masked_labels_give_no_gradient():
    job = freeze(compose_job("debug=tiny", "data=embedded_chat", "data.seq_len=128"))
    objective, batch = build_objective(job), data.build(job, 0, 1).next()
    logits = torch.randn(*batch["labels"].shape, job.model.vocab_size, requires_grad=True)
    objective.loss(logits, batch.tensors).backward()
    moved, counts = logits.grad.abs().sum(-1) > 0, batch["labels"] != IGNORED
    assert (
        torch.equal(moved, counts)
        and 0 < counts.sum() < counts.numel()
        and objective.count(batch.tensors) == counts.sum()
    )


def test_the_assistants_words_are_learned_and_the_users_are_not(tiny, run_job):
    """After some steps the held-out loss of the assistant's words has fallen far. The held-out loss of the questions
    has not, as questions are not learned.
    """
    words = (
        "data=embedded_chat",
        "validation=on",
        "validation.interval=40",
        "validation.steps=2",
        "steps=40",
        "optimizer.lr=5e-3",
        "data.global_batch=8",
        "data.local_batch=8",
        "data.seq_len=128",
    )
    directory = run_job(tiny(*words))
    held_out = run_job.losses(directory, "validation_loss")
    assert held_out[40] < 0.5 * run_job.losses(directory)[1]
    other = tiny(*words, "data.train_on=all", f"checkpoint.initial_load_path={directory}")
    other.steps, other.optimizer.lr, other.validation.interval = 1, 0.0, 1
    everything = run_job.losses(run_job(other), "validation_loss")[1]
    assert everything > 2 * held_out[40]


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_is_the_mean_over_held_out_tokens_on_any_layout(tiny, run_job, ranks):
    """The local batches of chats have different numbers of tokens that count, so the mean of the batches' means would
    be another number.
    """
    job = tiny(
        "data=embedded_chat",
        "validation=on",
        "validation.steps=3",
        "steps=1",
        f"gpus={ranks}",
        "data.seq_len=96",
        "data.local_batch=1",
        "data.global_batch=4",
        "optimizer.lr=0",
    )
    directory = run_job(job)
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    loader = data.build(job, 0, 1, split="validation")
    batches = [loader.next() for _ in range(3)]
    loader.close()
    objective, losses, counts = build_objective(job), [], []
    with torch.no_grad():
        for sample in (sample for batch in batches for sample in batch.split(1)):
            first, others = objective.inputs(sample.tensors)
            losses.append(cross_entropy(model(first, **others), sample["labels"]).item())
            counts.append(objective.count(sample.tensors).item())
    mean = sum(losses) / sum(counts)
    assert sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(losses) != pytest.approx(
        mean, rel=1e-4
    )
    assert json.loads((directory / "result.json").read_text())["validation_loss"] == pytest.approx(mean, rel=1e-5)


def test_from_the_command_line_to_an_answer(tmp_path, capsys):
    words = ["experiment=sft_laptop", "steps=30", "gpus=1", "cluster=inline", f"paths.runs={tmp_path}"]
    run = forked.run("launch.py", words, ROOT, os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    directory = next(path for path in tmp_path.iterdir() if not path.name.startswith("_"))
    capsys.readouterr()
    assert (
        cli.main(
            [
                "generate",
                "chat",
                str(directory),
                "--prompt",
                "What is 3 + 4?",
                "--temperature",
                "0",
                "--max-tokens",
                "30",
            ]
        )
        == 0
    )
    answer = capsys.readouterr().out
    assert answer.strip() and "<|" not in answer and "What is 3 + 4?" not in answer
    assert cli.main(["checkpoint", "export", str(directory), str(tmp_path / "exported")]) == 0
    assert "<|start_header_id|>" in (tmp_path / "exported/chat_template.jinja").read_text()


def test_the_validations_of_the_embedded_conversations_are_short():
    validations_are_short("embedded_chat")


def test_the_template_is_that_of_the_heaviest_source_with_one(tmp_path):
    (tmp_path / "own.jinja").write_text("own")
    (tmp_path / "env.json").write_text(json.dumps({"folder": str(tmp_path)}))
    parts = {
        "a": {"name": "chat", "chat_template": "qwen3", "weight": 1.0},
        "b": {"name": "embedded", "weight": 9.0},
        "c": {"name": "embedded_chat", "chat_template": "own.jinja", "weight": 2.0},
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"data": {"name": "mixture", "mixture": parts}, "tokenizer": {"name": "embedded"}})
    )
    assert template_of_facts(facts_at(tmp_path)).source == "own"


def learned(job, batch):
    """Return the texts that the labels of each conversation contain."""
    words = tokenizer.load(job.tokenizer)
    labels, documents = batch["labels"], batch["documents"]
    asked = [
        labels[row][(documents[row] == document) & (labels[row] != IGNORED)]
        for row in range(batch.samples)
        for document in documents[row].unique()
    ]
    return [words.decode(ids.tolist()) for ids in asked if len(ids)]


def is_right(job, batch, rows):
    """Check that the labels are exactly the answers, each with the mark of its end, and that each label has the same
    loss as with its conversation alone in a batch.
    """
    answers = {message["content"] + "<|eot_id|>" for row in rows for message in row if message["role"] == "assistant"}
    texts = [part + "<|eot_id|>" for text in learned(job, batch) for part in text.split("<|eot_id|>")[:-1]]
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    with torch.no_grad():
        logits = model(batch["tokens"], positions=batch["positions"], ends=batch["ends"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=IGNORED)
    return (
        set(texts) <= answers
        and len(texts) > 7
        and torch.allclose(losses.view_as(batch["labels"]), alone(job, batch), atol=2e-6)
    )


@pytest.mark.parametrize("fault", ["none", "mask ahead", "mask behind", "documents see each other"])
def test_planted_faults_are_found(fault, monkeypatch, tmp_path):
    """The faults are a mask that is shifted by one token, and packed conversations that see each other."""
    right = ConversationReader.encode

    def shifted(reader, conversation):
        turns = right(reader, conversation)
        return replace(turns, trained=np.roll(turns.trained, 1 if fault == "mask behind" else -1))

    if fault.startswith("mask"):
        monkeypatch.setattr(ConversationReader, "encode", shifted)
    rows = [json.loads(line)["messages"] for line in CONVERSATIONS.read_text().splitlines()]
    rows = [row for row in rows if not any("tool_calls" in message for message in row)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    job = compose_job(
        "debug=tiny", "precision=fp32", "data=chat", f"data.path={tmp_path}/chat.jsonl", "data.seq_len=128"
    )
    batch = data.build(job, 0, 1).next()
    if fault == "documents see each other":
        monkeypatch.setattr(layers, "document_offsets", lambda ends: None)
    assert is_right(job, batch, rows) == (fault == "none")
