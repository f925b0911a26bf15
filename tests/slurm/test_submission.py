"""Test what is submitted to SLURM: it is checked before, frozen at submission, and refused if it was changed
afterwards.
"""

import json
import shutil
from pathlib import Path

from .conftest import ROOT


def edit(file, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_edits_while_the_job_waits_change_nothing(submit):
    """A single cell without -m is submitted from a checkout in which a configuration file and a source file change
    before the job starts.
    """
    submit.code = submit.folder.parent / "checkout"
    for folder in ("conf", "titan_hydra", "sweeps"):
        shutil.copytree(ROOT / folder, submit.code / folder)
    shutil.copy(ROOT / "launch.py", submit.code)
    with submit.cluster.closed():
        out = submit.submit("gpus=1")
        (run,) = submit.cells()
        assert submit.job_id(run) in out and "_" not in submit.job_id(run)
        edit(submit.code / "conf/debug/tiny.yaml", "steps: 5", "steps: 7")
        edit(
            submit.code / "titan_hydra/core/train/loop.py",
            "def train(",
            "raise SystemExit('the edited file runs')\n\n\ndef train(",
        )
        assert submit.status()[run]["state"] == "queued"
    submit.settle()
    assert submit.done(run) and len(submit.losses(run)) == 5, submit.story()
    assert submit.job(run)["JobState"] == "COMPLETED"


def test_changed_runs_are_refused(submit):
    with submit.cluster.closed():
        submit.submit("-m", "gpus=1", "seed=1,2")
        config, code = submit.cell("seed=1"), submit.cell("seed=2")
        edit(config / "config.json", '"seed": 1', '"seed": 3')
        (snapshot,) = filter(Path.is_dir, (submit.folder / "runs" / "_code").iterdir())
        edit(snapshot / "titan_hydra/core/train/loop.py", "def train(", "# changed\ndef train(")
    submit.settle()
    for run, words in ((config, "it was changed after it was submitted"), (code, "the code is")):
        assert submit.job(run)["JobState"] == "FAILED"
        cell = submit.status()[run]
        assert (cell["state"], cell["failure"]["kind"], cell["failure"]["status"]) == ("failed", "config", 2), cell
        assert words in cell["failure"]["line"], cell
        assert not (run / "metrics.jsonl").exists()
    assert json.loads((config / "config.json").read_text())["seed"] == 3


def test_one_wrong_cell_stops_all_before_sbatch(submit):
    before = set(submit.cluster.jobs())
    refused = submit.run(*submit.line("-m", "gpus=2", "parallelism.tp=1,3,5", "optimizer.lr=1e-3,2e-3"))
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert all(f"(cells {first} and {first + 1} of 6)" in refused.stderr for first in (3, 5)), refused.stderr
    assert set(submit.cluster.jobs()) == before
    assert not (submit.folder / "runs").exists()
    refused = submit.run(*submit.line("-m", "gpus=1", "seed=1,2", "cluster.partition=nowhere"))
    assert refused.returncode != 0 and "invalid partition" in refused.stderr.lower(), refused.stderr
    assert set(submit.cluster.jobs()) == before
    with submit.cluster.closed():
        out = submit.submit("-m", "gpus=1", "seed=1,2")  # a job that SLURM refused can be submitted again
        assert "2 queued" in out and len(submit.cluster.active()) == 2, out
        submit.cluster.clear()


def test_one_pass_is_counted_before_the_submission(submit):
    """Each cell of the array has its own number of steps."""
    file = submit.folder / "drawn.jsonl"
    row = {"tokens": list(range(20)), "old_logprobs": [-8.0] * 10, "advantages": 1.0}
    file.write_text((json.dumps(row) + "\n") * 22)
    words = ("data=rollouts", f"data.path={file}", "data.seq_len=32", "data.local_batch=1", "steps=epoch")
    with submit.cluster.closed():
        submit.submit("-m", "gpus=2", "data.global_batch=2,4", *words)
        frozen = {run: json.loads((run / "config.json").read_text()) for run in submit.cells()}
        assert sorted(one["steps"] for one in frozen.values()) == [6, 11]
    submit.settle()
    for run, config in frozen.items():
        assert submit.done(run) and len(submit.losses(run)) == config["steps"], submit.story()
        assert config["data"]["samples"] == 22


def test_ranks_import_the_users_modules_as_they_were_submitted(submit):
    module = submit.folder / "mine.py"
    module.write_text("print('the module as submitted')\n")
    with submit.cluster.closed():
        submit.submit("gpus=1", "train.imports=[mine]")
        (run,) = submit.cells()
        module.write_text("raise RuntimeError('the edited module runs')\n")
    submit.settle()
    assert submit.done(run), submit.story()
    assert "the module as submitted" in (run / "attempts/1/rank_0.log").read_text()


def test_the_submitting_shell_and_a_purge_change_nothing(submit):
    """sbatch and srun prefer variables of the shell to the script. A purge of the file system removes single files of
    the copied code.
    """
    variables = {
        "SBATCH_PARTITION": "urgent",
        "SBATCH_TIMELIMIT": "3",
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_ARRAY_INX": "0-1",
        "SRUN_EXPORT_ENV": "NONE",
        "SLURM_EXPORT_ENV": "NONE",
    }
    own, line = submit.env, ("gpus=1", "cluster.partition=main", "cluster.time_minutes=60")
    submit.env = {**own, **variables, "BASH_FUNC_ls%%": '() {  command ls --color=always "$@"\n}'}
    submit.submit(*line, "seed=1")
    submit.env = own
    submit.settle()
    first = submit.cell("seed=1")
    job = submit.job(first)
    assert submit.done(first) and (job["Partition"], job["TimeLimit"], job["Requeue"]) == ("main", "01:00:00", "1"), (
        submit.story()
    )
    assert job["JobName"].endswith(json.loads((first / "attempts/1/attempt.json").read_text())["token"])
    (code,) = filter(Path.is_dir, (submit.folder / "runs" / "_code").iterdir())
    (code / "titan_hydra/core/train/loop.py").unlink()
    submit.submit(*line, "seed=2")
    submit.settle()
    assert submit.done(submit.cell("seed=2")), submit.story()
