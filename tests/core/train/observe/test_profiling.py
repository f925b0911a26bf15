"""profiling=on writes files that can be opened, and does not change the rates."""

import gzip
import json
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import memory, profiling
from titan_hydra.core.train.observe.watchdog import Watchdog
from titan_hydra.experiments.compose.compose import compose_job


def test_a_run_is_profiled_without_disturbing_its_rates(run_job, tiny):
    job = tiny(
        "parallelism=fsdp",
        "gpus=2",
        "steps=7",
        "checkpoint=off",
        "profiling=on",
        "profiling.first_step=4",
        "profiling.steps=2",
    )
    run = run_job(job)
    folder = run / "attempts/1/profile"
    assert sorted(file.name for file in folder.iterdir()) == [
        "phases_0.json",
        "phases_1.json",
        "summary.txt",
        "trace_0.json.gz",
    ]
    with gzip.open(folder / "trace_0.json.gz", "rt") as file:
        names = {row["name"] for row in json.load(file)["traceEvents"] if row.get("cat") == "user_annotation"}
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    summary = (folder / "summary.txt").read_text()
    assert "Self CPU time total" in summary and "aten::mm" in summary and "c10d" in summary
    marked = {row["step"]: row.get("profiled_steps") for row in run_job.rows(run)}
    assert marked == {1: None, 2: None, 3: 1, 4: 1, 5: 1, 6: None, 7: None}  # step 3 is the profiler's warm-up
    assert json.loads((run / "result.json").read_text())["measured_steps"] == 3  # steps 2, 6 and 7
    assert [row["event"] for row in run_job.rows(run, "events")] == ["profile"]
    for rank in range(2):
        phases = json.loads((folder / f"phases_{rank}.json").read_text().rstrip().rstrip(",") + "]")
        spans = [(row["name"], row["args"]["step"]) for row in phases if row["ph"] == "X" and row["args"]["step"] == 5]
        assert [name for name, _ in spans] == ["data", "forward, backward", "optimizer", "checkpoint"]
        assert all(row["dur"] >= 0 and row["pid"] == rank for row in phases if row["ph"] == "X")


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("first_step", [1, 2, 5])
def test_the_end_of_the_first_step_does_not_end_the_profilers_record_of_memory(monkeypatch, tmp_path, first_step):
    """Both record on CUDA with the same function of torch. While it records, checkpoints do not stop early: an autograd
    function would lose the exception that stops them (pytorch#179536; seen on an H200).
    """
    on = []
    monkeypatch.setattr(memory, "record_memory_history", lambda enabled, **_: on.append(enabled))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiling, "profile", MagicMock())
    job, run = compose_job("debug=tiny", "profiling=on", f"profiling.first_step={first_step}"), Run(tmp_path, tmp_path)
    with Watchdog(job, run) as watch:
        profiler = profiling.Profiler(job.profiling, run, torch.device("cuda"), MagicMock(), watch)
        profiler.clock.profiled = False
        profiler.begins(1)
        assert not stops_early()
        watch.settle(1)
        assert on == (["state", None] if first_step == 5 else ["state", "all"])
        assert stops_early() == (first_step == 5)
        memory.record(None)
        assert stops_early()


def stops_early():
    """Return whether a checkpoint leaves out the last operator of its recomputation, whose result no backward reads."""
    calls = []

    def block(x):
        y = x.sin()
        calls.append(x)
        return y + 1

    x = torch.ones(1, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).backward()
    return len(calls) == 1
