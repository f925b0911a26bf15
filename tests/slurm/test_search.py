"""A search on a cluster: its trials are jobs, a node is lost, its driver is killed, and it goes on."""

import json
import os
import signal

import pytest

from titan_hydra.instruments.search.journal import Journal

from .test_preemption import SLOW

LINE = (
    *("-m", "search=optuna", "optimizer.lr=tag(log,interval(1e-4,1e-1))", "optimizer.weight_decay=interval(0,0.3)"),
    *("search.pruner=halving", "search.first_steps=30", "search.trials=6", "search.parallel=3", "search.confirm=0"),
    *("steps=90", "lr_scheduler=constant", "checkpoint.interval=10", "validation=on", "validation.steps=1"),
    *("validation.interval=1000", "cluster.gpus_per_node=1"),
)


@pytest.mark.slow  # SLURM needs half a minute to notice that a node is gone
def test_a_search_survives_a_lost_node_and_a_killed_driver(submit):
    submit.sabotage(SLOW.format(seconds=0.1))
    driver = submit.start(*submit.line(*LINE))
    found = []
    submit.wait(lambda: found.extend(run for run in submit.cells() if 12 <= submit.step(run) < 25) or found, 400)
    hit = found[0]
    submit.cluster.manage("crash", submit.job(hit)["BatchHost"])
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    driver = submit.start(*submit.line(*LINE))
    out, err = driver.communicate(timeout=900)
    assert driver.returncode == 0, out + err + submit.story()
    (sweep,) = (submit.folder / "runs/_sweeps").glob("*-search-*")
    trials = Journal(sweep).trials()
    assert [trial.number for trial in trials] == list(range(6)) and not any(trial.reason for trial in trials)
    assert {trial.state for trial in trials} == {"complete", "pruned"} and all(30 in trial.values for trial in trials)
    assert sorted(run for trial in trials for run in trial.runs.values()) == [run.name for run in submit.cells()]
    assert submit.attempts(hit) == [1, 2], "the job of the lost node was requeued, and went on"
    for run in submit.cells():
        submit.losses(run)  # a step that was made twice has the same loss
    cells = json.loads((sweep / "manifest.json").read_text())["cells"]
    assert [cell["trial"] for cell in cells] == list(range(6))
