"""Save and resume: bitwise on the same layout, to 1e-5 on another, and each sample is seen once, whatever the number of
ranks.
"""

import copy
import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.core.train.conftest import losses, rows
from titan_hydra.core import data
from titan_hydra.core.checkpoint import state
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run.checkpoints import complete, held_out_loss, newest, step_of

from .steps import cut_back, tensors

TEN = ("steps=10", "checkpoint.interval=5", "checkpoint.keep_latest_k=0", "data.global_batch=8", "data.local_batch=2")


def on(job, ranks: int, **degrees):
    """Return the same job on another number of ranks."""
    job = copy.deepcopy(job)
    job.gpus = ranks
    for name in ("dp_replicate", "dp_shard"):
        setattr(job.parallelism, name, degrees.get(name, 1))
    return freeze(job)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_where_it_stopped(tiny, run_job, tmp_path, optimizer):
    job = tiny(*TEN, "parallelism=hsdp", "gpus=4", f"optimizer={optimizer}")
    whole = run_job(job)

    same = run_job(job, cut_back(whole, 5, tmp_path / "same"))
    assert losses(same) == losses(whole), "not bitwise the same on the same layout"
    before, after = tensors(newest(whole / "checkpoints")), tensors(newest(same / "checkpoints"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    for name, other in {"two": on(job, 2, dp_shard=2), "one": on(job, 1)}.items():
        resumed = losses(run_job(other, cut_back(whole, 5, tmp_path / name)))
        assert resumed.keys() == set(range(1, 11))
        for step, loss in losses(whole).items():
            assert resumed[step] == pytest.approx(loss, rel=1e-5), (name, step)


def test_random_numbers_go_on(tmp_path):
    """No step of the package draws random numbers, but a user's model may."""
    torch.manual_seed(3)
    torch.rand(5)
    for rank in range(2):
        (tmp_path / state.rank_file(rank)).write_text(state.of_rank(2, {"slots": {}}))
        following = torch.rand(4)
    torch.manual_seed(0)
    state.restore_rank(tmp_path, 1, 2)
    assert torch.equal(torch.rand(4), following)


@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_checkpoint_of_the_lowest_held_out_loss_is_kept(tiny, run_job, tmp_path, name):
    """The learning rate is so high that it soon harms the model. So the lowest loss is neither the first nor the last,
    and no regular checkpoint is due at its step. After a crash, before or after the save, the run still knows which
    loss was the lowest.
    """
    words = (
        "steps=9",
        "validation=on",
        "validation.interval=2",
        "validation.steps=2",
        "optimizer.lr=0.03",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_steps=5",
        f"checkpoint={name}",
        "checkpoint.interval=5",
        "checkpoint.keep_best=true",
    )
    whole = run_job(tiny(*words, "checkpoint.keep_latest_k=0"))
    held_out = losses(whole, "validation_loss")
    best = min(held_out, key=held_out.__getitem__)
    assert best == 6, held_out
    assert [step_of(path) for path in complete(whole / "checkpoints")] == [2, 4, 5, 6, 9]
    for left in (5, 6):
        run = run_job(tiny(*words, "checkpoint.keep_latest_k=1"), cut_back(whole, left, tmp_path / f"left_at_{left}"))
        assert {step_of(path): held_out_loss(path) for path in complete(run / "checkpoints")} == {
            6: held_out[6],
            9: held_out[9],
        }
        result = json.loads((run / "result.json").read_text())
        assert (result["best_checkpoint"], result["lowest_validation_step"]) == ("step-00000006", 6)
        assert [row["step"] for row in rows(run, "events") if row["event"] == "checkpoint"] == [2, 4, 5, 6, 9]
        assert losses(run, "validation_loss") == held_out and newest(run / "checkpoints").name == "step-00000009"


@pytest.mark.parametrize("source", ["embedded", "synthetic"])
def test_another_number_of_ranks_sees_the_same_samples(tiny, source):
    job = tiny(*TEN, f"data={source}", "data.seq_len=32")

    def seen(ranks: int, steps: int, state=None):
        loaders = [data.build(job, rank, ranks) for rank in range(ranks)]
        if state is not None:
            for loader in loaders:
                loader.load(json.loads(json.dumps(state)))
        samples = Counter(
            tuple(row.tolist()) for _ in range(steps) for loader in loaders for row in loader.next()["tokens"]
        )
        state = data.loader.merge([loader.state() for loader in loaders])
        for loader in loaders:
            loader.close()
        return samples, state

    whole, _ = seen(4, 10)
    first, state = seen(4, 5)
    second, _ = seen(2, 5, state)
    assert first + second == whole


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    for name in ("step-00000005", "step-00000010.writing", "step-00000007.damaged", "step-00000008.123.deleting"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path).name == "step-00000005"


def test_old_steps_are_deleted(tiny, run_job):
    directory = run_job(tiny("steps=5", "checkpoint.interval=1", "checkpoint.keep_latest_k=2"))
    assert [path.name for path in sorted((directory / "checkpoints").iterdir())] == ["step-00000004", "step-00000005"]


def test_weights_of_another_run_are_a_start(tiny, run_job):
    first = run_job(tiny("steps=5"))
    source = newest(first / "checkpoints")
    second = run_job(
        tiny("steps=5", f"checkpoint.initial_load_path={source}", "optimizer.lr=0", "data=synthetic", "seed=3")
    )
    start, end = tensors(source), tensors(newest(second / "checkpoints"))
    assert all(torch.equal(start[name], end[name]) for name in start if name.startswith("model."))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_one_clear_line_and_earlier_checkpoints_stay(tiny, run_job, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        job = tiny(
            "steps=5", "checkpoint.interval=1", "checkpoint.keep_latest_k=0", "model.vocab_size=4096", "model.dim=16"
        )
        directory = run_job(job, folder / "run", expect=1)
        message = (directory / "attempts/1/error_0").read_text()
        assert os.strerror(errno.ENOSPC) in message
        assert "Traceback" not in message
        kept = complete(directory / "checkpoints")
        assert kept, "no checkpoint was complete before the disk was full"
        assert kept[-1].name in message
        assert tensors(kept[-1])
        assert not list((directory / "checkpoints").glob("*.writing"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_at_most_one_interval(tmp_path):
    """The whole run, launcher and ranks, is killed five times. Each time the same command line continues from the
    newest complete step.
    """
    launch = Path(__file__).parents[3] / "launch.py"
    line = [
        sys.executable,
        str(launch),
        "debug=tiny",
        "precision=fp32",
        "steps=60",
        "parallelism=fsdp",
        "gpus=2",
        "checkpoint.interval=5",
        "metrics.log_every=1",
    ]
    undisturbed = subprocess.run([*line, f"paths.runs={tmp_path}/whole"], capture_output=True, text=True, check=False)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = losses(next((tmp_path / "whole").glob("*-*")))
    for delay in (4.0, 4.6, 5.1, 5.7, 6.2):
        process = subprocess.Popen(
            [*line, f"paths.runs={tmp_path}/killed"], start_new_session=True, stdout=subprocess.PIPE
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
        process.communicate()
    last = subprocess.run([*line, f"paths.runs={tmp_path}/killed"], capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stdout + last.stderr
    assert losses(next((tmp_path / "killed").glob("*-*"))) == expected


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all processes that it started, in whichever session they are."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
    for child in children:
        kill_tree(int(child))
