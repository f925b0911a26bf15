"""Submit while things go wrong: the controller dies, two people submit at once, launch.py is killed during its work.
Each cell must run exactly once.
"""

import re
import subprocess
import time

import pytest

from .conftest import ROOT, desk, running

# A launch.py that kills itself at a call of the given function, before or after the call's work.
KILLED = """
import importlib, os, runpy, sys
sys.path.insert(0, {root!r})
module = importlib.import_module("titan_hydra.{module}")
work, calls = {owner}.{name}, []
def dying(*args, **kwargs):
    calls.append(1)
    if len(calls) == {call} and {before}:
        os.kill(os.getpid(), 9)
    result = work(*args, **kwargs)
    if len(calls) == {call}:
        os.kill(os.getpid(), 9)
    return result
{owner}.{name} = dying
sys.argv = ["launch.py", *sys.argv[1:]]
runpy.run_path({root!r} + "/launch.py", run_name="__main__")
"""
# where launch.py is killed while it submits two cells: module, class or module of the function, function, number of the
# call, before or after it
MOMENTS = {
    "first cell claimed": ("experiments.runs.rundir", "module", "claim", 1, False),
    "all cells claimed": ("experiments.launch.executors.slurm.submit", "module", "hand_over", 1, True),
    "one cell knows its array": ("experiments.runs.rundir", "module", "note", 1, False),
    "right before sbatch": ("experiments.launch.executors.slurm.sbatch", "module.SlurmBatch", "submit_all", 1, True),
    "right after sbatch": ("experiments.launch.executors.slurm.sbatch", "module.SlurmBatch", "submit_all", 1, False),
    "one cell knows its job": ("experiments.runs.rundir", "module", "note", 3, False),
}


def trained_once(submit, runs, steps: int = 5) -> None:
    """Check that each cell is done, that only one of its attempts has made steps, and that it has made each step once."""
    for run in runs:
        assert submit.done(run), submit.story()
        began = [path for path in run.glob("attempts/*/rank_0.log") if re.search("step +1/", path.read_text())]
        assert len(began) == 1, (run.name, began)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == steps


def test_submission_killed_half_way(submit):
    before = set(submit.cluster.active())
    with submit.cluster.closed():
        for index, (moment, (module, owner, name, call, first)) in enumerate(MOMENTS.items()):
            line = submit.line("-m", "gpus=1", f"seed={10 * index + 1},{10 * index + 2}")
            code = KILLED.format(root=str(ROOT), module=module, owner=owner, name=name, call=call, before=first)
            killed = submit.python("-c", code, *line)
            assert killed.returncode == -9, (moment, killed.stderr)
            again = submit.run(*line)
            assert again.returncode == 0 and "2 queued" in again.stdout, (moment, again.stdout, again.stderr)
            assert len(submit.cluster.active()) == 2 * (index + 1) + len(before), (moment, submit.story())
    submit.settle(seconds=150)
    assert len(submit.cells()) == 2 * len(MOMENTS)
    trained_once(submit, submit.cells())


@pytest.mark.slow
def test_sbatch_that_outlives_its_launcher(submit):
    """launch.py dies while sbatch runs. The same command line, entered again, submits the cell. Then the first job
    arrives late, and must not train.
    """
    folder = submit.folder.parent / "bin"
    folder.mkdir()
    sbatch = subprocess.run(
        ["which", "sbatch"], env=submit.env, capture_output=True, text=True, check=True
    ).stdout.strip()
    (folder / "sbatch").write_text(
        f'#!/bin/sh\ntouch {folder}/called\nuntil [ -e {folder}/go ]; do sleep 0.2; done\n{sbatch} "$@"\ntouch {folder}/late\n'
    )
    (folder / "sbatch").chmod(0o755)
    path = submit.env["PATH"]
    line = submit.line("-m", "gpus=1", "seed=1,2")
    with submit.cluster.closed():
        submit.env["PATH"] = f"{folder}:{path}"
        first = submit.start(*line)
        submit.wait(lambda: (folder / "called").exists())
        first.kill()
        first.wait()
        submit.env["PATH"] = path
        assert "2 queued" in submit.run(*line).stdout
        (folder / "go").touch()
        submit.wait(lambda: (folder / "late").exists())
        assert len(submit.cluster.active()) == 4
    submit.settle(seconds=120)
    trained_once(submit, submit.cells())
    assert {cell["state"] for cell in submit.status().values()} == {"done"}


def test_two_people_submit_the_same_sweep(submit):
    line = submit.line("-m", "gpus=1", "seed=1,2,3")
    with submit.cluster.closed():
        both = [submit.start(*line) for _ in range(2)]
        texts = [process.communicate(timeout=300) for process in both]
        assert [process.returncode for process in both] == [0, 0], texts
        assert len(submit.cluster.active()) == 3, texts
    submit.settle(seconds=120)
    trained_once(submit, submit.cells())


@pytest.mark.slow
@pytest.mark.parametrize("timeouts", ["short", "slurm"])
def test_controller_dies_during_a_sweep(tmp_path, timeouts):
    """Jobs continue while the controller is down. Nothing is submitted twice meanwhile, and afterwards the controller
    takes the jobs up again. The controller may start a job again whose end it has missed; the started job finds that
    everything is done.
    """
    with running(timeouts=timeouts) as cluster, desk(cluster, tmp_path / "work") as submit:
        line = submit.line("-m", "gpus=1", "steps=40", "seed=1,2,3", "cluster.max_parallel=2")
        submit.sabotage(
            "import time\nupdate = trainer.Trainer.update\n"
            "trainer.Trainer.update = lambda self, *given: time.sleep(0.3) or update(self, *given)"
        )
        assert submit.run(*line).returncode == 0
        training = [run for run in submit.cells() if "seed=3" not in (run / "overrides.txt").read_text()]
        submit.wait(lambda: all(submit.step(run) > 0 for run in training))
        submit.cluster.saved()
        submit.cluster.manage("crash", "slurmctld")
        out = submit.run(*line)
        assert out.returncode == 0 and "its queue does not answer; nothing was started" in out.stdout, (
            out.stdout + out.stderr
        )
        states = [cell["state"] for cell in submit.status().values()]
        assert sorted(states) in (
            ["running", "running", "unknown"],
            ["done", "done", "unknown"],
            ["done", "running", "unknown"],
        ), states
        submit.cluster.up()
        submit.settle(seconds=300)
        trained_once(submit, submit.cells(), steps=40)
        assert len({submit.job_id(run).split("_")[0] for run in submit.cells()}) == 1


@pytest.mark.slow
def test_submission_killed_at_any_moment(submit):
    """Kill the submission twelve times, each time after another delay; then enter the same line once more."""
    for index in range(12):
        line = submit.line("-m", "gpus=1", f"seed={100 + index},{200 + index}")
        process = submit.start(*line)
        time.sleep(0.5 + index * 0.25)
        process.kill()
        process.wait()
        again = submit.run(*line)
        assert again.returncode == 0, again.stderr
    submit.settle(seconds=400)
    assert len(submit.cells()) == 24
    trained_once(submit, submit.cells())
