"""The tasks of a run have lm-eval's numbers on the exported model, for every answer (`pip install lm-eval`; this
package does not use it otherwise).
"""

import json

import pytest
import torch

from titan_hydra.core.checkpoint.convert import export_hf
from titan_hydra.core.job.run.checkpoints import newest

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it serves this comparison alone")

# Rank 0 writes the score of every request; the last evaluation of the run remains.
ANSWERS = """
import json
score_requests = loop.score_requests
def recorded(trainer, requests):
    found = score_requests(trainer, requests)
    if rank == 0:
        with open("answers.jsonl", "a") as file:
            file.write(json.dumps(found) + "\\n")
    return found
loop.score_requests = recorded
"""
WORDS = (
    "tensor",
    "rank reads",
    "of the file",
    "def f(x):\n",
    "\N{GREEK SMALL LETTER ALPHA}\N{WHITE SMILING FACE}",
    "the",
)
LAYOUTS = {
    "one process": ("gpus=1", "parallelism=single"),
    "fsdp_tp": ("gpus=4", "parallelism=fsdp_tp", "parallelism.tp=2"),
}
MULTIPLE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
FOLLOW = {"output_type": "loglikelihood", "doc_to_target": "target"}
METRICS = {"choose": ("acc", "acc_norm", "acc_bytes"), "follow": ("acc", "perplexity")}


def choose(number):
    """Return a row with prompts of several kinds: empty, with blanks at the end, and plain."""
    prompt = ("", "The function returns  ", f"In line {number} of {WORDS[number % 6]}")[number % 3]
    choices = [f"{WORDS[(number + other) % 6]} {WORDS[(number * other) % 5]}" * (1 + other % 2) for other in range(4)]
    return {"prompt": prompt, "choices": choices[: 2 + number % 3], "gold": number % 2}


def expected(folder, files):
    """Return lm-eval's numbers and answers for the export in a folder."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tasks = [
        {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(files / f"{name}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "prompt",
            "metric_list": [{"metric": metric} for metric in METRICS[name]],
        }
        | keys
        for name, keys in (("choose", MULTIPLE), ("follow", FOLLOW))
    ]
    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=8)
    found = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, log_samples=True)
    answers = {
        name: [
            tuple(answer)
            for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
            for answer in sample["filtered_resps"]
        ]
        for name in METRICS
    }
    return found["results"], answers


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_answer_is_lm_evals(launcher, monkeypatch, name):
    monkeypatch.setenv("HF_HOME", str(launcher.folder / "hf_home"))
    rows = {
        "choose": [choose(number) for number in range(24)],
        "follow": [{"prompt": WORDS[number % 6], "target": "the" * (number % 2 + 1)} for number in range(8)],
    }
    for task, own in rows.items():
        (launcher.folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    launcher.sabotage(ANSWERS)
    words = ("steps=8", "optimizer.lr=0.01", "validation=on", "validation.steps=1", "validation.interval=8")
    tasks = "validation.tasks=[choose.jsonl,follow.jsonl]"
    done = launcher.run(*launcher.TINY, "data.global_batch=4", *words, tasks, *LAYOUTS[name])
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (launcher.folder / "runs").glob("*-*")
    export_hf(newest(directory / "checkpoints"), launcher.folder / "hf", torch.float32)
    results, answers = expected(launcher.folder / "hf", launcher.folder)
    ours = [json.loads(line) for line in (launcher.folder / "answers.jsonl").read_text().splitlines()]
    numbers = json.loads((directory / "result.json").read_text())["tasks"]
    for task, own in zip(METRICS, ours, strict=True):
        assert [hit for _, hit in own] == [hit for _, hit in answers[task]]
        assert [log for log, _ in own] == pytest.approx([log for log, _ in answers[task]], rel=1e-5)
        for metric in METRICS[task]:
            assert numbers[task][metric] == pytest.approx(results[task][f"{metric},none"], rel=1e-5)
    assert 0 < numbers["choose"]["acc"] < 1
