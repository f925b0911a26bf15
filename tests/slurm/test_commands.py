"""Run the titan commands on SLURM runs that wait, run, are requeued or cancelled, and while SLURM is down."""

import json
import subprocess
import sys

import pytest

from tests.experiments.launch.conftest import ROOT


def cells(submit, *target):
    done = submit.titan("status", *target, "--json")
    assert done.returncode == 0, done.stderr
    return {cell["cell"]: cell for cell in json.loads(done.stdout)["cells"]}


@pytest.mark.slow
def test_runs_are_followed_cancelled_and_retried(submit):
    submitted = submit.run("-m", *submit.SLURM, *submit.ENDLESS, "seed=1,2,3", "cluster.max_parallel=1")
    assert submitted.returncode == 0, submitted.stderr
    runs = {name: submit.cell(name) for name in ("seed=1", "seed=2", "seed=3")}
    submit.wait(lambda: submit.step(runs["seed=1"]) > 5)
    seen = cells(submit)
    assert [cell["state"] for cell in seen.values()] == ["running", "queued", "queued"]
    assert seen["seed=1"]["where"].startswith("node") and seen["seed=1"]["to_go_seconds"] > 0
    assert seen["seed=2"]["job"]["reason"] == "JobArrayTaskLimit" and seen["seed=2"]["where"] is None
    assert "max_parallel" in submit.titan("status").stdout

    command = [sys.executable, "-m", "titan_hydra.cli", "logs", "-f", "seed=1"]
    follower = subprocess.Popen(
        command,
        cwd=submit.folder,
        env=submit.env | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert "running, attempt 1" in follower.stdout.readline()
    assert submit.titan("stop", "seed=2", "--yes").returncode == 0  # before the run has started
    assert (runs["seed=2"] / "attempts" / "1" / "cancelled").exists()
    submit.cluster.call("scontrol", "requeue", submit.job_id(runs["seed=1"]))
    submit.wait(lambda: submit.step(runs["seed=3"]) > 0)  # the next task gets the free place
    assert submit.titan("stop", "seed=3", "--yes").returncode == 0  # while the run is running
    submit.wait(lambda: submit.step(runs["seed=1"], 2) > 0)
    seen = cells(submit)
    assert {name: (cell["state"], cell["attempt"]) for name, cell in seen.items()} == {
        "seed=1": ("running", 2),
        "seed=2": ("interrupted", 1),
        "seed=3": ("interrupted", 1),
    }
    # the batch script did not requeue it
    assert seen["seed=3"]["cancelled_by"] and submit.attempts(runs["seed=3"]) == [1]

    submit.cluster.manage("crash", "slurmctld")
    down = submit.titan("status")
    assert down.returncode == 0 and "slurm does not answer" in down.stdout and " running " in down.stdout
    assert submit.titan("stop", "--yes").returncode == 1
    submit.cluster.up()

    assert submit.titan("stop", "--yes").returncode == 0
    out, _ = follower.communicate(timeout=300)
    assert "--- attempt 2" in out and out.count("its checkpoint is written") == 2 and out.endswith("interrupted\n")
    again = submit.titan("resume", "--only", "interrupted", "seed=2")
    assert again.returncode == 0 and "1 queued" in again.stdout, again.stderr
    submit.wait(lambda: submit.step(runs["seed=2"], 2) > 0)
    assert cells(submit)["seed=2"]["state"] == "running"


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_in_another_layout(submit):
    submit.sabotage(
        "import time\nupdate = trainer.Trainer.update\n"
        "trainer.Trainer.update = lambda self, *given: time.sleep(0.2) or update(self, *given)"
    )
    line = (
        "gpus=4",
        "steps=40",
        "data.global_batch=8",
        "checkpoint.interval=10",
        "cluster.gpus_per_node=2",
        "parallelism=fsdp",
    )
    submit.submit(*line)
    (run,) = submit.cells()
    submit.wait(lambda: submit.step(run) > 12)
    running = submit.titan("resume", run.name, "gpus=2")
    assert running.returncode == 2 and "is running; stop it first" in running.stderr, running
    assert submit.titan("stop", run.name, "--yes").returncode == 0
    submit.settle()
    nodes = submit.job(run)["NumNodes"]
    resumed = submit.titan("resume", run.name, "gpus=2", "parallelism=tp")
    assert resumed.returncode == 0 and "1 queued" in resumed.stdout, resumed.stdout + resumed.stderr
    submit.settle()
    assert submit.done(run) and submit.attempts(run) == [1, 2], submit.story()
    assert (nodes, submit.job(run, 2)["NumNodes"]) == ("2", "1")
    assert sorted(submit.losses(run)) == list(range(1, 41))
    assert json.loads((run / "config.json").read_text())["parallelism"]["tp"] == 2


@pytest.mark.slow
def test_runs_whose_jobs_slurm_still_has_are_not_removed(submit):
    line = ("-m", *submit.SLURM, *submit.ENDLESS, "launch.packed=true", "steps=3,1000000", "sweep.name=packed")
    submitted = submit.run(*line)
    assert submitted.returncode == 0, submitted.stderr
    submit.wait(lambda: [cell["state"] for cell in cells(submit).values()][:2] == ["done", "running"])
    first, second = [cell["directory"].rpartition("/")[2] for cell in cells(submit).values()][:2]
    refused = submit.titan("runs", "remove", second, "--force", "--yes")
    assert refused.returncode == 2 and f"titan stop {second}" in refused.stderr
    refused = submit.titan("runs", "move", first, "--to", "there")
    assert refused.returncode == 2 and "RUNNING" in refused.stderr.splitlines()[0]
    assert submit.titan("stop", "packed", "--yes").returncode == 0
    submit.wait(lambda: "interrupted" in [cell["state"] for cell in cells(submit).values()])
    submit.wait(lambda: submit.titan("runs", "archive", "packed", "--to", "packed.tar.zst").returncode == 0)
    assert submit.titan("runs", "restore", "packed.tar.zst").returncode == 0
    assert [cell["state"] for cell in cells(submit).values()][:2] == ["done", "interrupted"]
