"""A run has one owner, even if sbatch fails after SLURM took the job, jobs are requeued after their end, or a script is
submitted again.
"""

import contextlib
import json
import subprocess

from .conftest import Submitter, running

# An sbatch that reports a time-out although SLURM gets the job, at once or some seconds later.
SBATCH = """#!/bin/sh
{{ sleep {late}; {sbatch} "$@"; }} >/dev/null 2>&1 {background}
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""
# A training that fails in step 3 until the file `healed` exists; its steps are slow enough to be observed.
ILL = """
import time
update, count = trainer.Trainer.update, []
def ill(self, *given):
    count.append(1)
    if len(count) == 3 and not os.path.exists("healed"):
        raise ValueError("not healed")
    time.sleep(0.3)
    update(self, *given)
trainer.Trainer.update = ill
"""


@contextlib.contextmanager
def replaced(submit, **programs: str):
    """Replace these programs of SLURM by scripts of ours while the block runs."""
    folder, path = submit.folder.parent / "bin", submit.env["PATH"]
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    submit.env["PATH"] = f"{folder}:{path}"
    try:
        yield
    finally:
        submit.env["PATH"] = path
        for name in programs:
            (folder / name).unlink()


def failing(submit, late: int = 0) -> str:
    """Return the sbatch above; with `late` the job arrives `late` seconds later."""
    sbatch = subprocess.run(
        ["which", "sbatch"], env=submit.env, capture_output=True, text=True, check=True
    ).stdout.strip()
    return SBATCH.format(sbatch=sbatch, late=late, background="&" if late else "")


def steps(run) -> list[int]:
    """Return the steps in metrics.jsonl, in the order in which they were written."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_job_that_sbatch_denies_is_found_and_trains_once(submit):
    at_once, silent, late = (
        submit.line("-m", "gpus=1", "seed=1,2"),
        submit.line("gpus=1", "seed=3"),
        submit.line("gpus=1", "seed=4"),
    )
    before = len(submit.cluster.active())
    with submit.cluster.closed():
        with replaced(submit, sbatch=failing(submit)):
            done = submit.run(*at_once)
        assert done.returncode == 0 and "2 queued" in done.stdout, done.stdout + done.stderr
        with replaced(submit, sbatch=failing(submit), squeue="#!/bin/sh\nexit 1\n"):
            done = submit.run(*silent)
        assert done.returncode == 1 and "Socket timed out" in done.stderr, done.stdout + done.stderr
        assert "not known whether" in done.stderr, done.stderr
        with replaced(submit, sbatch=failing(submit, late=9)):
            done = submit.run(*late)
        assert done.returncode == 1 and "SLURM refused 1 cell" in done.stderr, done.stdout + done.stderr
        submit.wait(lambda: len(submit.cluster.active()) == before + 4)
        assert {cell["state"] for cell in submit.status().values()} == {"queued"}, submit.status()
        for line, count in ((at_once, 2), (silent, 1), (late, 1)):
            again = submit.run(*line)
            assert again.returncode == 0 and f"{count} queued" in again.stdout, again.stdout + again.stderr
        assert len(submit.cluster.active()) == before + 4, submit.story()
    submit.settle(seconds=120)
    for run in submit.cells():
        assert submit.done(run) and submit.attempts(run) == [1] and steps(run) == [1, 2, 3, 4, 5], submit.story()


def test_a_job_that_is_over_comes_back(submit):
    """The administrator requeues two failed jobs. The one that nobody has retried continues to train; the other one
    finds that its run has a new owner.
    """
    submit.sabotage(ILL)
    line = submit.line("gpus=1", "steps=30")
    for seed in (1, 2):
        assert submit.run(*line, f"seed={seed}", "paths.runs=runs/odd %j").returncode == 0
    submit.settle()
    first, second = sorted(
        (submit.folder / "runs" / "odd %j").glob("*/config.json"), key=lambda file: json.loads(file.read_text())["seed"]
    )
    first, second = first.parent, second.parent
    old = {run: submit.job_id(run) for run in (first, second)}
    # the refusal is recorded
    assert [cell["state"] for cell in submit.status("runs/odd %j").values()] == ["failed", "failed"], submit.story()
    assert list((first / "attempts/1/submission").glob(f"{old[first]}.log")), "the path was taken for a pattern"
    (submit.folder / "healed").touch()

    retried = submit.run(*line, "seed=2", "paths.runs=runs/odd %j", "launch.retry=failed")
    assert retried.returncode == 0, retried.stderr
    submit.wait(lambda: submit.step(second, 2) > 0)
    with submit.cluster.closed():
        for run in (first, second):
            submit.cluster.call("scontrol", "requeue", old[run])
        assert submit.status("runs/odd %j")[first]["state"] == "queued"
        again = submit.cluster.call("sbatch", "--parsable", str(second / "sbatch.sh"))  # submitted again by hand
    submit.wait(lambda: submit.step(first, 2) > 0)
    cell = submit.status("runs/odd %j")[first]
    assert (cell["state"], cell["attempt"], cell["job"]["id"]) == ("running", 2, old[first]), cell
    assert submit.run(*line, "seed=1", "paths.runs=runs/odd %j", "launch.retry=failed").returncode == 0
    submit.settle(seconds=120)
    for run in (first, second):
        assert submit.done(run) and submit.attempts(run) == [1, 2] and steps(run) == list(range(1, 31)), submit.story()
        assert (run / "attempts/2/rank_0.log").read_text().count("; steps ") == 1
    assert submit.job(second, 2)["JobState"] == "COMPLETED"
    for job in (old[second], again):
        assert submit.cluster.jobs()[job]["JobState"] == "FAILED", submit.story()


def test_a_run_of_another_cluster_is_left_alone(submit):
    """Two SLURMs share a file system. On the login node of the other SLURM a job is unknown, so it must neither be
    ended nor started again there.
    """
    line = submit.line("-m", "gpus=1", "seed=1,2", "steps=1000000", "checkpoint.interval=200", "cluster.max_parallel=1")
    assert submit.run(*line).returncode == 0
    runs = submit.cell("seed=1"), submit.cell("seed=2")
    submit.wait(lambda: submit.step(runs[0]) > 5)
    with running(name="other") as other:
        there = Submitter(submit.folder, other)
        for _ in range(2):
            states = there.status()
            assert [states[run]["state"] for run in runs] == ["running", "unknown"], states
            assert {states[run]["where"] for run in runs} == {"cluster fake"}, states
            again = there.run(*line)
            assert again.returncode == 0 and "unknown (on cluster fake); nothing was started" in again.stdout, (
                again.stdout + again.stderr
            )
        retried = there.titan("resume", "--only", "interrupted")
        assert "nothing to run again" in retried.stdout, retried.stdout + retried.stderr
        refused = there.titan("stop", "--yes")
        assert refused.returncode == 1 and "is a job of the cluster fake; cancel it there" in refused.stderr, (
            refused.stderr
        )
        assert other.active() == [] and len(submit.cluster.active()) == 2
    before = submit.step(runs[0])
    submit.wait(lambda: submit.step(runs[0]) > before)
    assert [submit.attempts(run) for run in runs] == [[1], []] and submit.status()[runs[1]]["state"] == "queued"
