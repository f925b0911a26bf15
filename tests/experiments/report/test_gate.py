"""`titan report --gate` passes only what was judged and met, and its file is checked as every configuration is."""

import json
import shutil
from dataclasses import fields

import pytest

from titan_hydra.core.base.errors import Exit
from titan_hydra.experiments.report.gate import Gate

DONE = {"tokens_per_second": 100.0, "device": "H100", "memory_gib": 60.0, "validation_loss": 4.5}


@pytest.fixture
def judged(sweep, capsys, tmp_path):
    """Return `judged(text, ...)`, which judges the sweep by a gate and returns status, checks by (name, cell), stderr."""

    def judge(text, *more, target=None):
        file = tmp_path / "gate.yaml"
        file.write_text(text)
        status, out, err = sweep.report(capsys, "--gate", str(file), "--json", *more, target=target)
        document = json.loads(out) if out else {"checks": []}
        assert not out or document["passed"] is (status == Exit.DONE)
        return status, {(one["name"], one["cell"]): one for one in document["checks"]}, err

    return judge


def timed(directory, seconds, **columns):
    """Replace a run's rows by rows with these step times, after a first row that is slow."""
    rows = [
        {"step": step, "loss": 5.0, "step_seconds": time, "tokens_per_second": 1 / time} | columns
        for step, time in enumerate([9.0, *seconds], start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_thresholds_of_one_number_are_met_or_missed(sweep, judged):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    sweep.cell("b", losses=[5.0, 5.0], result=DONE | {"memory_gib": 70.0, "validation_loss": 4.7})
    status, checks, _ = judged("mean_loss: 4.6\nheld_out_loss: 4.6\nmemory_gib: 65\n")
    assert status == Exit.MISSED
    assert [one["passed"] for one in checks.values()] == [True, True, False, True, False, True, False]
    assert checks["memory_gib", "b"] | {"reason": None} == {
        "name": "memory_gib", "cell": "b", "passed": False, "value": 70.0, "allowed": 65, "reason": None,
    }  # fmt: skip
    assert judged("mean_loss: 5.0\nheld_out_loss: 4.7\nmemory_gib: 70\n")[0] == Exit.DONE  # a threshold itself is met


@pytest.mark.parametrize(
    ("own", "tolerance", "passed"),
    [(1.05, 0, True), (1.2, 0, False), (1.2, 0.25, True), (0.5, 0, True), (1.05, 0.01, True)],
)
def test_speed_is_missed_only_outside_the_noise_or_the_tolerance(sweep, judged, own, tolerance, passed):
    timed(sweep.cell("a", result=DONE), [0.9, 1.1] * 6)  # mean 1, spread 0.104
    timed(sweep.cell("b", {"parallelism.tp": 2}, result=DONE), [own] * 12)
    status, checks, _ = judged(f"speed_baseline: a\nspeed_tolerance: {tolerance}\n")
    assert (status, checks["step_seconds", "b"]["passed"]) == (Exit.DONE if passed else Exit.MISSED, passed)
    assert checks["step_seconds", "b"]["value"] == pytest.approx(own)
    assert checks["step_seconds", "b"]["allowed"] == pytest.approx(max(1.1044, 1 + tolerance), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "result", "rows", "reason"),
    [
        ({}, {"device": "A100"}, 12, "device"),
        ({}, {"device": None}, 12, "device"),
        ({"data.seq_len": 4096}, {}, 12, "data.seq_len"),
        ({"data.path": "other.bin"}, {}, 12, "data.path"),
        ({}, {}, 1, "row"),
        ({}, {}, 0, "row"),
    ],
)
def test_speed_that_cannot_be_judged_is_missed(sweep, judged, changes, result, rows, reason):
    timed(sweep.cell("a", result=DONE), [1.0] * 12)
    timed(sweep.cell("b", changes, result=DONE | result), [1.0] * rows)
    status, checks, _ = judged("speed_baseline: a\nspeed_tolerance: 0.5\n")
    check = checks["step_seconds", "b"]
    assert (status, check["passed"], check["value"]) == (Exit.MISSED, False, None) and reason in check["reason"]
    if changes or result == {"device": "A100"}:
        assert judged("speed_baseline: a\nspeed_tolerance: 0.5\n", "--allow", reason)[0] == Exit.DONE


@pytest.mark.parametrize("baseline", ["nothing", "a"])
def test_a_baseline_that_is_missing_or_the_only_run_is_a_miss(sweep, judged, baseline):
    timed(sweep.cell("a", result=DONE), [1.0] * 12)
    status, checks, _ = judged(f"speed_baseline: {baseline}\n")
    assert (status, checks["step_seconds", None]["passed"]) == (Exit.MISSED, False)


@pytest.mark.parametrize(
    "text", ["mean_loss: 9\n", "mean_loss: '9'\n", "held_out_loss: 9\n", "memory_gib: 99\n", "failed_cells: 5\n"]
)
def test_runs_without_the_number_or_not_over_are_a_miss(sweep, judged, text):
    result = DONE | {"memory_gib": None}
    del result["validation_loss"]
    sweep.cell("a", losses=[5.0, 4.0], result=result)
    name = text.partition(":")[0]
    assert judged(text)[0] == (Exit.DONE if name in ("mean_loss", "failed_cells") else Exit.MISSED)
    sweep.cell("b", losses=[5.0, 4.0])  # has rows, and counts as interrupted
    shutil.rmtree(sweep.cell("c"))  # has never started
    status, checks, _ = judged(text)
    assert checks["failed_cells", None]["value"] == 1
    assert status == Exit.MISSED and not checks["failed_cells", "c"]["passed"]


def test_losses_that_are_not_finite_are_a_miss(sweep, judged):
    sweep.cell("a", losses=[5.0, float("nan")], result=DONE)
    assert judged("mean_loss: 1e9\n")[0] == Exit.MISSED


def test_failed_runs_are_counted_and_judged_by_nothing_else(sweep, judged):
    error = {"type": "E", "message": "m", "traceback": "x", "time": 1.0, "secondary": False}
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    sweep.cell("b", losses=[5.0, 9.0], failure={"exit_status": 76, "error": error})
    status, checks, _ = judged("mean_loss: 5\n")
    assert status == Exit.MISSED and checks["failed_cells", None]["value"] == 1 and ("mean_loss", "b") not in checks
    assert judged("mean_loss: 5\nfailed_cells: 1\n")[0] == Exit.DONE


def test_no_such_run_is_a_miss_with_a_verdict(sweep, judged):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    status, checks, _ = judged("mean_loss: 5\n", target="nothing")
    assert status == Exit.MISSED and "nothing" in checks["failed_cells", None]["reason"]


FAULTS = [  # a gate's file, and the words of each line that it is refused with
    ("men_loss: 3\nmemory_gib: -1\n", [("men_loss=3", "mean_loss"), ("memory_gib=-1", "more than 0")]),
    ("mean_loss: low\nfailed_cells: 1.5\n", [("mean_loss=low", "number"), ("failed_cells=1.5", "2")]),
    ("mean_loss: true\nspeed_baseline: 3\n", [("mean_loss=true", "number"), ("speed_baseline=3", "'3'")]),
    ("mean_loss: .nan\nheld_out_loss:\n", [("mean_loss=nan", "finite"), ("held_out_loss=null", "no value")]),
    ("speed_baseline: 01234567\nfailed_cells: [1]\n", [("speed_baseline", "must be text"), ("failed_cells=[1]",)]),
    ("speed_baseline: [a]\nmean_loss: .inf\n", [("speed_baseline=[a]",), ("mean_loss=inf", "finite")]),
    ("speed_tolerance: 0.1\n", [("speed_tolerance=0.1", "speed_baseline")]),
    ("speed_tolerance: 1\nspeed_baseline: a", [("speed_tolerance=1", "less than 1")]),
    ("mean_loss: 3\nmean_loss: 4\n", [("mean_loss",)]),
    ("[1, 2]\n", [("keys: mean_loss",)]),
    ("", [("is empty", "keys: mean_loss")]),
    ("mean_loss: [\n", [(":2", "not YAML")]),
    ("mean_loss: \x07\n", [("not YAML",)]),
    ("2024-13-45: 3\n? {a: 1}\n: 2\n", [()]),
]


@pytest.mark.parametrize(("text", "lines"), FAULTS)
def test_every_fault_of_the_file_is_a_line(sweep, judged, text, lines):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    status, checks, err = judged(text)
    assert (status, checks, err.count("\n")) == (2, {}, len(lines)), err
    for line, words in zip(err.splitlines(), lines, strict=True):
        assert "gate.yaml" in line and all(word in line for word in words), line


def test_a_gate_takes_no_other_form(sweep, judged):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    for option in ("--csv", "--html", "--plots", "--over=seed", "--baseline=a"):
        assert judged("mean_loss: 5\n", option)[0] == 2
    assert judged("mean_loss: 5\n", "--gate=nowhere.yaml")[0] == 2


def test_the_page_has_every_key():
    from tests.experiments.launch.conftest import ROOT

    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{one.name}` |" in page for one in fields(Gate))
