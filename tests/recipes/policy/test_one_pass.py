"""One pass in real runs: the ranks of a run train on each row once, on several layouts, and over a stop and another
layout.
"""

import json
from collections import Counter

import pytest

from tests.core.checkpoint.steps import cut_back
from titan_hydra.experiments.launch.layouts import relaid

ROWS, FIRST = 110, 1000
# An objective of a stranger that records the rows whose labels count in a batch that is trained on.
SEEN = {
    "seen.py": """
from titan_hydra.core.job.config.registry import ObjectiveKind, register
from titan_hydra.recipes.policy import OF_ROLLOUTS
from titan_hydra.recipes.policy.config import PolicyGradient

register(ObjectiveKind("seen", "seen_on_ranks:Seen", PolicyGradient, needs=OF_ROLLOUTS, head_loss=True, split_logits=True))
""",
    "seen_on_ranks.py": """
import os

from titan_hydra.recipes.policy.objectives import ClippedPolicy


class Seen(ClippedPolicy):
    def count(self, batch):
        if len(batch["tokens"]) == self.job.data.global_batch // self.job.parallelism.dp_shard:  # no microbatch, no blank example
            rows = [
                int(token)
                for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
                for token in tokens
                if 1000 <= token < 1110 and (labels >= 0).any()
            ]
            with open(os.path.join(os.path.dirname(self.job.data.path), "seen", str(os.getpid())), "a") as file:
                file.write(" ".join(map(str, rows)) + "\\n")
        return super().count(batch)
""",
}


@pytest.fixture
def seen(tmp_path):
    """Return a function that returns the rows that the ranks of the last run have trained on, by step."""
    folder = tmp_path / "seen"
    folder.mkdir()

    def take(start: int = 0, readers: int = 1):
        """The run began after step `start`, and `readers` of its ranks read each sample."""
        found = {}
        for file in folder.iterdir():
            for step, line in enumerate(file.read_text().splitlines(), start + 1):
                found[step] = found.get(step, Counter()) + Counter(map(int, line.split()))
            file.unlink()
        assert all(count % readers == 0 for rows in found.values() for count in rows.values())
        return {step: Counter({row: count // readers for row, count in rows.items()}) for step, rows in found.items()}

    return take


def test_each_row_is_trained_on_once_in_real_runs(tiny, run_job, user_modules, seen, tmp_path, monkeypatch):
    monkeypatch.chdir(user_modules(SEEN))
    once = Counter(range(FIRST, FIRST + ROWS))
    file = tmp_path / "drawn.jsonl"
    rows = [
        {"tokens": [7, FIRST + n, *[9] * (n % 11 + 1)], "old_logprobs": [-1.0] * (n % 11 + 1), "advantages": 1.0}
        for n in range(ROWS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("train.imports=[seen]", "data=rollouts", f"data.path={file}", "objective.name=seen", "data.seq_len=32")
    words = (*words, "data.global_batch=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0", "steps=epoch")
    job = tiny(*words, "parallelism=fsdp", "gpus=2", "data.local_batch=2")
    assert job.data.samples % 4 and job.steps > 4
    whole = run_job(job)
    by_step = seen()
    assert sum(by_step.values(), Counter()) == once and by_step.keys() == set(range(1, job.steps + 1))
    for name, layout, readers in (
        ("pp 2", ("parallelism=pp", "gpus=2", "data.local_batch=4"), 2),
        ("one", ("parallelism=single", "gpus=1", "data.local_batch=2"), 1),
    ):
        other = relaid(job, layout)
        assert (other.steps, other.data.samples) == (job.steps, job.data.samples)
        resumed = run_job(other, cut_back(whole, 4, tmp_path / name))
        assert seen(4, readers) == {step: rows for step, rows in by_step.items() if step > 4}, name
        assert run_job.losses(resumed) == pytest.approx(run_job.losses(whole), rel=1e-5), name
