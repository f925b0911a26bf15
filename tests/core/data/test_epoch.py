"""One pass (steps=epoch): each row is read exactly once, on every layout, across a stop and a change of the layout."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import loader as loaders
from titan_hydra.core.job.config import Job, from_dict, identity, to_dict
from titan_hydra.core.job.config.registry import OBJECTIVES
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.experiments.launch.cell import Cell, of_another_pass
from titan_hydra.experiments.launch.longer import not_extended
from titan_hydra.experiments.runs.rundir import directory_of

ROWS = 110
BATCH = 8


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Pack few rows together, so that an epoch of a small file has several windows."""
    monkeypatch.setattr("titan_hydra.recipes.chat.rows.WINDOW", 40)
    monkeypatch.setattr("titan_hydra.core.data.epoch._counted", {})


def chat(folder):
    (folder / "chat.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"row {n}"},
                        {"role": "assistant", "content": "x" * (n % 23 + 1)},
                    ]
                }
            )
            + "\n"
            for n in range(ROWS)
        )
    )
    return ("data=chat", f"data.path={folder}/chat.jsonl", "data.seq_len=64")


def preference(folder):
    rows = [
        {
            "prompt": f"row {n}",
            "chosen": "a" * (n % 17 + 1),
            "rejected": "b",
            "ref_chosen_logps": -1.0,
            "ref_rejected_logps": -2,
        }
        for n in range(ROWS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("data=preference", f"data.path={folder}/pairs.jsonl", "data.seq_len=128")


def rollouts(folder):
    rows = [
        {"tokens": [7, 1000 + n, *[9] * (n % 11 + 1)], "old_logprobs": [-1.0] * (n % 11 + 1), "advantages": 1.0}
        for n in range(ROWS)
    ]
    (folder / "drawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("data=rollouts", f"data.path={folder}/drawn.jsonl", "data.seq_len=32")


def tokens(folder):
    """Samples of 32 tokens; the first token of each is its number. The last file has a rest that fills no sample."""
    for part, (begin, end) in enumerate([(0, 40), (40, ROWS)]):
        ids = np.full((end - begin, 32), 5, np.uint16)
        ids[:, 0] = np.arange(begin, end) + 1000
        file = folder / f"part{part}.bin"
        np.append(ids, np.full(20, 6, np.uint16)).tofile(file)
        header = {
            "tokens": ids.size + 20,
            "dtype": "uint16",
            "vocab_size": 4096,
            "tokenizer_sha256": None,
            "bos_id": None,
        }
        Path(f"{file}.json").write_text(json.dumps(header | {"eos_id": None}))
    return ("data=tokens", f"data.path={folder}/part*.bin", "data.seq_len=32")


SOURCES = {"chat": chat, "preference": preference, "rollouts": rollouts, "tokens": tokens}


def job_of(words, *more):
    return compose_job("debug=tiny", *words, f"data.global_batch={BATCH}", "data.local_batch=1", "steps=epoch", *more)


def ids(job, batch):
    """Return the id of each row whose labels count in a batch, by the documents of its samples."""
    found = []
    words = data.Wanted(job, "train", range(0), BATCH, data.shards.BadShards()).tokenizer
    labels = batch["labels"].numpy()
    for place, row in enumerate(batch["tokens"].numpy()):
        if job.data.name in ("tokens", "rollouts"):
            first = [int(token) for token in row if 1000 <= token < 1000 + ROWS]
            found += first if (labels[place] >= 0).any() else []
        else:
            texts = words.decode(row.tolist()).split("row ")[1:]
            found += [int("".join(take_digits(text))) for text in texts] if (labels[place] >= 0).any() else []
    return Counter(found)


def take_digits(text):
    for letter in text:
        if not letter.isdigit():
            return
        yield letter


def read(job, ranks, steps, state=None):
    """Return the rows that some ranks read together in some steps, and the state behind them."""
    found, parts = Counter(), [data.build(job, rank, ranks) for rank in range(ranks)]
    for loader in parts:
        if state:
            loader.load(state)
        for _ in range(steps):
            found += ids(job, loader.next())
        loader.close()
    return found, json.loads(json.dumps(loaders.merge([loader.state() for loader in parts])))


def expected(job):
    """Return each row once; a pair stands in its sample twice, once with each answer."""
    return Counter(
        dict.fromkeys(
            range(ROWS) if job.data.name in ("chat", "preference") else range(1000, 1000 + ROWS),
            2 if job.data.name == "preference" else 1,
        )
    )


@pytest.mark.parametrize(("source", "shuffle"), [*((source, True) for source in SOURCES), ("chat", False)])
def test_each_row_is_read_once_on_every_layout_and_over_a_stop(tmp_path, source, shuffle):
    job = job_of(SOURCES[source](tmp_path), f"data.shuffle={str(shuffle).lower()}")
    assert job.data.samples % BATCH, "the last batch must not be full, or this tests little"
    assert job.steps == -(-job.data.samples // BATCH)
    assert read(job, 1, job.steps + 1)[0] == expected(job), "after the pass, nothing counts"
    for stop, ranks in ((job.steps // 2, 4), (job.steps - 1, 1)):
        before, state = read(job, 2, stop)
        after, _ = read(job, ranks, job.steps - stop, state)
        assert before + after == expected(job), (stop, ranks)


def test_the_number_is_frozen_and_each_batch_and_seed_counts_anew(tmp_path):
    words = chat(tmp_path)
    job, larger = job_of(words), job_of(words, f"data.global_batch={2 * BATCH}")
    assert job.data.samples == larger.data.samples and larger.steps == -(-job.data.samples // (2 * BATCH)) < job.steps
    counted = {job_of(words, f"seed={seed}", "data.seq_len=48").data.samples for seed in range(8)}
    assert len(counted) > 1, "another seed packs other rows together"
    plain = job_of(words, f"steps={job.steps}")
    assert len({identity(one) for one in (job, larger, plain)}) == 3
    with Path(words[1].partition("=")[2]).open("a") as file:
        file.write(
            json.dumps({"messages": [{"role": "user", "content": "new"}, {"role": "assistant", "content": "y"}]}) + "\n"
        )
        file.write(Path(words[1].partition("=")[2]).read_text())
    again = freeze(from_dict(Job, to_dict(job)))
    assert (again.steps, again.data.samples) == (job.steps, job.data.samples), "a frozen job is not counted again"
    assert job_of(words).data.samples > job.data.samples


@pytest.mark.parametrize(
    ("words", "key", "nearest"),
    [
        (("data=embedded",), "steps", "data=tokens"),
        (("data=synthetic",), "steps", "type the number"),
        (
            ("data=mixture", "+data.mixture={a: {weight: 1, name: embedded_chat}}", "objective=sft"),
            "steps",
            "type the number",
        ),
        (("data=embedded_chat", "search=optuna", "validation=on"), "steps", "type the number"),
        (("data=embedded_chat", "data.samples=3"), "data.samples", "null"),
    ],
)
def test_what_has_no_single_pass_is_refused_by_name(words, key, nearest):
    with pytest.raises(ConfigError) as error:
        job_of(words)
    assert str(error.value).startswith(f"{key}=") and nearest in str(error.value) and "\n" not in str(error.value)


def test_other_faults_come_before_the_count(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_hydra.core.data.epoch._samples_in_epoch", lambda job: pytest.fail("counted"))
    job = freeze(compose_unchecked("debug=tiny", *chat(tmp_path), "steps=epoch", "parallelism=tp", "gpus=3"))
    assert all(fault.key != "steps" for fault in check(job)) and check(job)


def test_samples_that_do_not_count_do_not_count():
    """Those of every objective but diffusion, whose values all count: it is refused unless the last batch is full. All
    tensors are contiguous: a pipeline of torch 2.11 refuses others.
    """
    counted = {}
    for name, words in {
        "language": ("data=embedded",),
        "sft": ("data=embedded_chat",),
        "dpo": ("data=preference", "data.path=x"),
        "policy": ("data=rollouts", "data.path=x"),
        "image_text": ("model=llama3_vision_debug", "data=synthetic_image_text"),
        "diffusion": ("model=flux_debug", "data=synthetic_images"),
    }.items():
        objective = build_objective(freeze(compose_unchecked("debug=tiny", *words)))
        tensors = objective.example(2).tensors
        assert all(tensor.is_contiguous() for tensor in tensors.values()), name
        counted[name] = objective.count(tensors).item() > 0
    assert set(counted) == set(OBJECTIVES) and [name for name, counts in counted.items() if counts] == ["diffusion"]


def test_a_rank_that_packs_otherwise_says_so(tmp_path):
    job = job_of(chat(tmp_path))
    job.data.samples -= 1
    with pytest.raises(ConfigError, match="than the launcher counted"):
        read(job, 1, job.steps + 1)


def test_a_file_that_is_damaged_later_costs_its_samples_and_repeats_no_other(tmp_path):
    job = job_of(tokens(tmp_path), "data.max_bad_shards=1")
    with (tmp_path / "part0.bin").open("r+b") as file:
        file.truncate(100)
    assert read(job, 2, job.steps)[0] == Counter(range(1040, 1000 + ROWS))


def test_changed_data_begin_no_new_run_without_a_word_and_a_pass_is_not_extended(tmp_path):
    words = (*chat(tmp_path), f"paths.runs={tmp_path}/runs")
    before, other = job_of(words), job_of(words, "optimizer.lr=0.5")
    for job in (before, other):
        directory_of(job).mkdir(parents=True)
        (directory_of(job) / "config.json").write_text(json.dumps(to_dict(job)))
    file = Path(words[1].partition("=")[2])
    file.write_text(file.read_text() * 2)
    now = job_of(words)
    (fault,) = of_another_pass(Cell(1, [], now, directory_of(now), 1))
    assert fault.key == "steps" and directory_of(before).name in str(fault) and "launch.force=true" in str(fault)
    assert not list(of_another_pass(Cell(1, [], before, directory_of(before), 1)))
    assert not_extended(before) and not not_extended(job_of(words, "steps=3"))
