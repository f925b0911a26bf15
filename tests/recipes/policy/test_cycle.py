"""The cycle of docs/fine-tuning.md, three times by its commands: draw answers, score them, train on each once, and draw
with the new weights. One training is killed in the middle.
"""

import json
import os
import signal

import pytest

from tests.core.train.conftest import rows
from tests.experiments.launch.conftest import launcher as launcher
from titan_hydra import cli
from titan_hydra.core.checkpoint.opened import open_model
from titan_hydra.core.train.generate import Sampling, continuation, load_model

ANSWERS, LENGTH, IDS = 96, 12, 64  # answers are drawn from the first ids
TINY = ("debug=tiny", "precision=fp32", "data.seq_len=64", "model.vocab_size=4096", "metrics.log_every=1")
STEER = ("optimizer.lr=5e-3", "lr_scheduler.warmup_steps=0", "objective.kl=0.05", "objective.clip_high=0.28")


def draw(run, file, seed):
    """Write answers of a run's model, with the advantages of a reward for some tokens: that of a token, minus the
    mean. `old_logprobs` are to be scored. Return the mean reward.
    """
    opened = open_model(run)
    model = load_model(opened.reader, opened.config, 2 + LENGTH, "float32")
    answers = []
    for number in range(ANSWERS):
        prompt = [10 + number % 7, 20 + number % 5]
        answers.append((prompt, list(continuation(model, prompt, LENGTH, Sampling(), seed + number, IDS))))
    rewards = [[float(token < IDS // 4) for token in answer] for _, answer in answers]
    mean = sum(map(sum, rewards)) / ANSWERS / LENGTH
    lines = [
        {
            "tokens": prompt + answer,
            "old_logprobs": [0.0] * LENGTH,
            "advantages": [reward - mean for reward in numbers],
        }
        for (prompt, answer), numbers in zip(answers, rewards, strict=True)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return mean


def score(run, source, out, column):
    assert cli.main(["data", "score-rollouts", str(run), str(source), "--column", column, "--out", str(out)]) == 0


def the_run(folder, before):
    (run,) = {path for path in (folder / "runs").glob("*-*") if not path.name.startswith("_")} - before
    return run


def test_the_cycle_goes_round_three_times_and_over_a_kill(launcher, tmp_path, capsys):
    folder = launcher.folder
    start = launcher.run(*TINY, "data=embedded_chat", "steps=2", "validation=off", "data.local_batch=4")
    assert start.returncode == 0, start.stderr
    base = policy = the_run(folder, set())
    known, rewards = {base}, []
    for cycle in range(3):
        drawn, scored, ready = (folder / f"{name}.jsonl" for name in ("drawn", "scored", "ready"))
        for file in (drawn, scored, ready):
            file.unlink(missing_ok=True)
        rewards.append(draw(policy, drawn, 1000 * cycle))
        score(policy, drawn, scored, "old_logprobs")
        score(base, scored, ready, "ref_logprobs")
        words = ("data=rollouts", f"data.path={ready}", f"checkpoint.initial_load_path={policy}", "steps=epoch", *STEER)
        line = (*TINY, *words, "parallelism=fsdp", "gpus=2", "data.local_batch=1", "data.global_batch=2")
        line = (*line, "validation=off", "checkpoint.interval=3")
        if cycle == 1:
            kill_at(4, launcher, line, known)
        done = launcher.run(*line)
        assert done.returncode == 0, done.stderr
        policy = the_run(folder, known)
        known.add(policy)
        check_rows(policy, cycle)
        assert [event for event in rows(policy, "events") if event["event"] == "warning"] == []
        if cycle == 1:
            assert len(list((policy / "attempts").iterdir())) == 2
    assert rewards[0] < rewards[1] < rewards[2], rewards
    # scored with the weights of the start, the old log-probabilities are not those of the model that is trained
    draw(policy, drawn, 9000)
    scored.unlink()
    score(base, drawn, scored, "old_logprobs")
    wrong = (
        "data=rollouts",
        f"data.path={scored}",
        f"checkpoint.initial_load_path={policy}",
        "steps=1",
        "validation=off",
    )
    done = launcher.run(*TINY, *wrong, "data.local_batch=2")
    assert done.returncode == 0, done.stderr
    (event,) = [event for event in rows(the_run(folder, known), "events") if event["event"] == "warning"]
    assert event["step"] == 1 and "old_logprobs" in event["reason"]
    with capsys.disabled():
        print("\nrewards", [round(reward, 4) for reward in rewards])
        for number, run in enumerate(sorted(known - {base}, key=lambda path: path.stat().st_ctime), 1):
            for row in rows(run)[:: len(rows(run)) - 1]:
                print(
                    f"cycle {number}",
                    {key: round(value, 5) for key, value in row.items() if "/" in key or key == "step"},
                )


def check_rows(run, cycle):
    """The first step has a ratio of 1; then it moves, and so does the divergence from the reference."""
    first, *_, last = rows(run)
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, json.loads((run / "config.json").read_text())["steps"] + 1)) and len(steps) > 8
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4) and first["policy/log_ratio_abs"] < 1e-4
    assert first["policy/kl_old"] == pytest.approx(0, abs=1e-6) and first["policy/clip_share"] == 0
    assert last["policy/log_ratio_abs"] > 10 * first["policy/log_ratio_abs"] and last["policy/kl_old"] > 1e-6
    reference = first["policy/kl_reference"]
    assert reference == pytest.approx(0, abs=1e-6) if cycle == 0 else reference > 1e-5
    assert all(0 < row["policy/entropy"] < 8.4 for row in rows(run))


def kill_at(step, launcher, line, known):
    """Start a run, and kill it with all its ranks once it has made a step."""
    process = launcher.start(*line)

    def made():
        new = set((launcher.folder / "runs").glob("*-*")) - known
        return any(row["step"] >= step for run in new for row in rows(run))

    launcher.wait(made)
    for pid in launcher.processes():
        os.kill(pid, signal.SIGKILL)
    process.communicate()
