"""Searches with real runs: what is drawn, carried on, refused and confirmed, and that a killed driver loses nothing."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.kits import forked
from titan_hydra.experiments.runs import rundir

from .conftest import HALVING, SPACE, TINY, Searches


def table(searches: Searches):
    """Return what a search has found, without the names of runs, which depend on the folder."""
    return [(one.number, one.overrides, one.state, one.values, one.objectives) for one in searches.trials()]


def runs(searches: Searches) -> list[str]:
    return sorted(path.parent.name for path in (searches.folder / "runs").glob("*/config.json"))


def test_a_killed_search_goes_on_and_loses_and_doubles_nothing(searches, tmp_path):
    searches.run(*TINY, *SPACE, *HALVING)
    wanted = table(searches)
    assert len(wanted) == 5 and {*wanted[0][3]} >= {2} and any(9 in values for _, _, _, values, _ in wanted)
    assert {state for _, _, state, _, _ in wanted} == {"complete", "pruned"}
    other = Searches(tmp_path / "two")
    line = (*TINY, *SPACE, *HALVING)
    other.killed_when(lambda: '"op_code":4' in other.text, *line)  # drawn, not started
    other.killed_when(lambda: list(other.folder.glob("runs/*/attempts/1/rank_0.json")), *line)  # it runs
    other.killed_when(lambda: '"op_code":7' in other.text, *line)  # its first loss is in the journal
    other.killed_when(lambda: other.text.count('"op_code":4') == 4, *line)
    other.run(*line)
    assert table(other) == wanted
    named = sorted(run for one in other.trials() for run in one.runs.values())
    assert named == runs(other), "each run belongs to one trial"
    manifest = json.loads((other.sweep / "manifest.json").read_text())
    assert [cell["trial"] for cell in manifest["cells"]] == [0, 1, 2, 3, 4]
    before = (other.sweep / "optuna.journal").read_text()
    assert "winner: trial" in other.run(*line) and (other.sweep / "optuna.journal").read_text() == before


def test_runs_outlive_their_driver_and_the_next_one_attaches_to_them(searches):
    """Two trials run at once, as processes of this machine, while the driver is killed; none starts again."""
    line = [
        *TINY,
        *SPACE,
        "cluster=local",
        "steps=200",
        "search.parallel=2",
        "search.trials=3",
        "search.sampler=random",
    ]
    stepping = lambda: len(list(searches.folder.glob("runs/*/attempts/1/status.json"))) == 2  # noqa: E731
    searches.killed_when(stepping, *line)
    text = searches.run(*line)
    assert not re.search("trial [01]: .*attempt", text), text
    assert [one.state for one in searches.trials()] == ["complete"] * 3
    assert all(len(list(run.glob("attempts/*"))) == 1 for run in searches.folder.glob("runs/*-*"))
    assert not list(searches.folder.glob("runs/_sweeps/*/manifest.json.*")), "no temporary file is left"


def test_a_length_is_the_same_run_carried_on(searches):
    """The loss of the last length is that of a run that had all steps from the start."""
    searches.run(*TINY, *SPACE, *HALVING)
    (best, *_) = [one for one in searches.trials() if one.state == "complete"]
    line = [word for word in (*TINY, *best.overrides, "steps=9", "paths.runs=again") if not word.startswith("search")]
    done = forked.run("launch.py", line, searches.folder, os.environ)
    assert done.returncode == 0, done.stderr
    (result,) = searches.folder.glob("again/*/result.json")
    assert json.loads(result.read_text())["validation_loss"] == best.values[9] == best.objectives[0]
    assert 2 in best.values and best.values[2] != best.values[9]


def test_the_best_are_run_again_over_seeds_and_a_report_shows_all(searches):
    line = (*TINY, *SPACE, "steps=3", "search.trials=4", "search.confirm=2", "search.seeds=2", "search.sampler=random")
    text = searches.run(*line)
    assert "winner: trial" in text and "mean over 2 seeds" in text
    assert text.count("seed 1: validation_loss") == 2
    done = forked.run("titan", ["report", "--json", "--html"], searches.folder, os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["search"]
    assert [one["trial"] for one in found["trials"]] == [0, 1, 2, 3] and found["winner"] in found["best"]
    assert sum(len(one["seeds"]) == 2 for one in found["trials"]) == 2
    assert found["importance"].keys() == {"optimizer.lr", "optimizer.weight_decay"}
    assert found["steps"] == 12 and found["spent_gpu_hours"] > 0
    assert "importance of the keys" in (searches.sweep / "report.html").read_text()
    results = sorted(searches.folder.glob("runs/*/result.json"))
    for file in results:  # a changed digit of a result does not reach the journal
        file.write_text(re.sub(r'("validation_loss": )\d', r"\g<1>1", file.read_text()))
    again = searches.run(*line)
    assert "warning" not in again and again.splitlines()[-1] == text.splitlines()[-1], again


def test_trials_that_cannot_run_cost_nothing_and_a_grid_ends(searches):
    """Values that do not fit together are a refused trial; a grid draws every cell once."""
    line = (
        *TINY,
        "steps=2",
        "search.sampler=grid",
        "model.n_heads=1,3",
        "model.n_kv_heads=1,3",
        "search.objective=both",
    )
    text = searches.run(*line)
    states = {tuple(one.overrides): (one.state, one.reason, one.runs) for one in searches.trials()}
    assert len(states) == 4
    state, reason, started = states["model.n_heads=1", "model.n_kv_heads=3"]
    assert state == "pruned" and "n_kv_heads" in reason and not started
    assert all(len(one.objectives) == 2 for one in searches.trials() if one.state == "complete")
    assert "refused" in text and "winner" not in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("search=off", "optimizer.lr=interval(1e-4,1e-1)"), "search draw values from the interval"),
        (("search.sampler=magic", *SPACE), "search.sampler=magic"),
        (("optimizer.lr=interval(1e-4)",), "an interval has two bounds"),
        (("optimizer.lr=tag(log,interval(0,1))",), "a logarithmic interval begins above 0"),
        (("optimizer.lr=interval(-1,1)",), "optimizer.lr=-1"),
        (("optimizer.lrr=interval(0,1)",), "optimizer.lrr: no such key"),
        (("search.trials=100001", *SPACE), "search.trials=100001"),
        (("validation=off", *SPACE), "search.objective=loss: needs a held-out loss"),
        (("search.sampler=grid", SPACE[0]), "search.sampler=grid takes lists"),
        (("lr_scheduler=cosine", *HALVING, *SPACE), "lr_scheduler=cosine: the learning rates of 6 and 9 steps differ"),
        (("checkpoint=off", *HALVING, *SPACE), "carries runs on from checkpoints"),
        (("checkpoint.interval=1,2",), "two of its values make the same experiment"),
        (("steps=5",), "no key has values to choose from"),
        (("search.parallel=2", *SPACE), "runs one trial, in this process"),
        ((*HALVING, "search.objective=tokens_per_second", *SPACE), "compares held-out losses"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(searches, words, line):
    text = searches.run(*TINY, *words, status=2)
    assert line in text and len(text.splitlines()) == 1, text
    assert not (searches.folder / "runs").exists()


@pytest.mark.parametrize("asked", ["by a signal", "by titan stop"])
def test_a_search_stops_while_the_parent_of_its_ranks_still_starts(searches, monkeypatch, asked):
    """Until the ranks run, the attempt is the driver's own, and the driver lives: the attempt must not count as active."""
    start = "titan_hydra.experiments.launch.executors.ranks.start"
    monkeypatch.setattr(start, lambda *_: subprocess.Popen(["sleep", "600"], start_new_session=True))
    process = searches.start(*TINY, *SPACE, "cluster=local", "search.trials=2")
    deadline = time.monotonic() + 300
    while not (claims := list(searches.folder.glob("runs/*/attempts/1/attempt.json"))):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    if asked == "by a signal":
        os.kill(process.pid, signal.SIGTERM)
    else:
        rundir.mark_cancelled(claims[0].parent)
    process.join(60)
    hangs = process.is_alive()
    if hangs:
        os.killpg(process.pid, signal.SIGKILL)
    assert not hangs and process.exitcode == 128 + signal.SIGTERM, searches.out.read_text()
    assert rundir.state(claims[0].parents[2]).kind == "interrupted"
