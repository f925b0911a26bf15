"""profiling=on writes files that can be opened, and does not change the rates."""

import gzip
import json


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
