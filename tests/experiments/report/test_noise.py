"""A report shows how noisy its numbers are: uncertain differences are marked, numbers have no digits below the noise,
seeds are averaged with errors.
"""

import csv
import io
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan_hydra.experiments.report.cells import gather
from titan_hydra.experiments.report.charts import curves
from titan_hydra.experiments.report.digits import digits_of, percent, rate, with_error
from titan_hydra.experiments.report.table import build
from titan_hydra.experiments.runs.find import select_runs
from titan_hydra.experiments.runs.rundir import State

ROOT = Path(__file__).parents[3]
MINUS, PM = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}"


def result(rate, iqr=None, steps=100, **further):
    return {
        "tokens_per_second": rate,
        "tokens_per_second_iqr": iqr,
        "measured_steps": steps,
        "device": "H100",
    } | further


def rows_of(out):
    """Return the cells of a Markdown table by its first column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_a_difference_within_the_noise_is_marked(sweep, capsys):
    sweep.cell("base", result=result(1000.0, 20.0))
    sweep.cell("near", result=result(1015.0, 10.0))  # differs by less than the baseline's IQR
    sweep.cell("wide", result=result(1100.0, 150.0))  # differs by less than its own IQR
    sweep.cell("far", result=result(1100.0, 10.0))
    sweep.cell("unknown", result=result(1015.0, None))
    out = sweep.report(capsys, "--md")[1]
    differences = {name: row["difference"] for name, row in rows_of(out).items()}
    assert differences == {
        "base": "\N{EN DASH}",
        "near": "+1 % (noise)",
        "wide": "+10 % (noise)",
        "far": "+10 %",
        "unknown": "+1.50 %",
    }
    assert "- (noise): a difference smaller than the larger of the two IQRs is not significant" in out


def test_few_steps_are_marked(sweep, capsys):
    sweep.cell("base", result=result(1000.0, 1.0))
    sweep.cell("short", result=result(1500.0, 1.0, steps=9))
    out = sweep.report(capsys, "--md")[1]
    assert rows_of(out)["short"]["difference"] == "+50.0 % (few steps)"
    assert "- (few steps): fewer than 10 steps were measured" in out


def test_the_baselines_drift_is_noise_too(sweep, capsys):
    sweep.cell("base", result=result(1000.0, 1.0))
    sweep.cell("near", result=result(1030.0, 1.0))
    sweep.cell("again", result=result(960.0, 1.0), repeat=True)
    assert rows_of(sweep.report(capsys, "--md")[1])["near"]["difference"] == "+3 % (noise)"


@pytest.mark.parametrize(
    ("value", "noise", "shown"),
    [
        (1234.4, None, "1,234"),
        (1234.4, 30.0, "1,234"),
        (1234.4, 300.0, "1,230"),
        (66432.0, 1500.0, "66,400"),
        (83.21, 40.0, "83"),
        (83.21, 0.5, "83.2"),
        (1234.4, 0.0, "1,234"),
        (1234.4, float("nan"), "1,234"),
        (float("nan"), 1.0, "nan"),
        (None, 1.0, None),
    ],
)
def test_a_rate_has_no_digits_in_its_noise(value, noise, shown):
    assert rate(value, noise) == shown


@pytest.mark.parametrize(
    ("noise", "digits"),
    [(None, 2), (0.0, 2), (0.0001, 2), (0.0009, 2), (0.002, 1), (0.03, 0), (0.5, 0), (float("nan"), 2)],
)
def test_a_difference_has_no_digits_in_its_noise(noise, digits):
    assert digits_of(noise) == digits
    assert percent(0.123456, digits) == ("+12 %", "+12.3 %", "+12.34 %")[digits]


def test_a_mean_ends_where_its_error_begins():
    assert with_error(5.123456, 0.0123, 4) == f"5.123 {PM} 0.012"
    assert with_error(12345.6, 321.0, 0) == f"12,346 {PM} 321"
    assert with_error(5.1, None, 4) == "5.1000" and with_error(None, 1.0, 4) is None


def test_losses_are_held_out_or_means_and_never_one_steps(sweep, capsys):
    noisy = [4.0] * 90 + [3.0, 5.0] * 5  # the loss of the last step is 5
    sweep.cell("fine", {"steps": 100}, losses=noisy, result=result(1000.0))
    sweep.cell("few rows", {"steps": 4}, losses=[9.0, 3.0, 4.0, 5.0], result=result(1000.0))
    out = sweep.report(capsys, "--md", "--allow", "steps")[1]
    assert [row["mean loss"] for row in rows_of(out).values()] == ["4.0000", "5.2500"] and "held-out" not in out
    newer = sweep.cell("means", {"steps": 4}, losses=[9.0, 3.0, 4.0, 5.0], result=result(1000.0))
    text = (newer / "metrics.jsonl").read_text().replace('"loss":', '"loss_mean": 4.5, "loss":')
    (newer / "metrics.jsonl").write_text(text)
    assert rows_of(sweep.report(capsys, "--md", "--allow", "steps")[1])["means"]["mean loss"] == "4.5000"
    sweep.cell("validated", losses=noisy, result=result(1000.0, validation_loss=4.4321))
    assert rows_of(sweep.report(capsys, "--md", "--allow", "steps")[1])["validated"]["held-out loss"] == "4.4321"


def load(directory, cores, start, end):
    (directory / "attempts/1").mkdir(parents=True)
    (directory / "attempts/1/rank_0.json").write_text(
        json.dumps({"exit_status": 0, "load": {"cores": cores, "start": start, "end": end}})
    )


def test_runs_side_by_side_are_not_compared_without_a_word(sweep, capsys):
    alone, beside = (sweep.cell(name, result=result(rate)) for name, rate in (("alone", 1000.0), ("beside", 700.0)))
    assert "shared" not in sweep.report(capsys, "--md")[1]
    for number in (1, 2):  # one attempt is enough
        (beside / "attempts" / str(number)).mkdir(parents=True)
    (beside / "attempts/1/ranks.json").write_text(json.dumps({"ranks": [], "beside": ["x-1", "y-2"]}))
    (beside / "attempts/2/ranks.json").write_text(json.dumps({"ranks": []}))
    out = sweep.report(capsys, "--md")[1]
    assert rows_of(out)["beside"]["difference"].endswith("(shared)") and "- beside: ran beside other runs" in out
    assert [row["beside"] for row in json.loads(sweep.report(capsys, "--json")[1])["rows"]] == [0, 2]
    (alone / "attempts/1").mkdir(parents=True)
    (alone / "attempts/1/ranks.json").write_text(json.dumps({"ranks": [], "beside": ["x-1"]}))
    assert "- all 2 cells: ran beside other runs" in sweep.report(capsys, "--md")[1]


def test_a_busy_machine_is_told(sweep, capsys):
    load(sweep.cell("quiet", result=result(1000.0)), 2, 0.1, 2.2)
    load(sweep.cell("loud", result=result(900.0)), 2, 3.0, 14.25)
    out = sweep.report(capsys, "--md")[1]
    assert "- loud: other programs used the machine too (load up to 14.2 on 2 cores)" in out and "- quiet" not in out
    load(sweep.cell("louder", result=result(900.0)), 2, 3.0, 24.25)
    assert (
        "- loud, louder: other programs used the machine too (load up to 24.2 on 2 cores)"
        in sweep.report(capsys, "--md")[1]
    )
    lines = sweep.report(capsys, "--csv")[1].splitlines()
    assert lines[2].endswith(",14.25,2,0,,") and "load,cores" in lines[0]


def seeds(sweep, changes, offset, rates, held_out=None):
    """Return three runs of one setting. `offset` is the effect of the setting on the loss; the effects of seeds are far
    larger.
    """
    for seed, speed in enumerate(rates):
        noise = random.Random(seed)
        loss = 4.0 + 0.5 * noise.random() + offset * (1 + 0.1 * seed)
        name = " ".join(f"{key}={value}" for key, value in {**changes, "seed": seed}.items())
        further = {} if held_out is None else {"validation_loss": loss + held_out}
        sweep.cell(name, {**changes, "seed": seed}, losses=[loss] * 20, result=result(speed, 5.0, **further))


def test_seeds_are_averaged_with_their_errors(sweep, capsys):
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0, 1020.0))
    seeds(sweep, {"optimizer.lr": 0.002}, -0.02, (1004.0, 1012.0, 1020.0))
    seeds(sweep, {"optimizer.lr": 0.004}, 0.001, (1200.0, 1210.0, 1220.0))
    status, out, _ = sweep.report(capsys, "--md", "--over", "seed")
    assert status == 0
    table = rows_of(out)
    assert list(table) == ["optimizer.lr=0.001", "optimizer.lr=0.002", "optimizer.lr=0.004"]
    assert [row["runs"] for row in table.values()] == ["3", "3", "3"]
    assert table["optimizer.lr=0.001"]["tokens/s per device"] == f"1,010.0 {PM} 5.8"
    assert [row["difference"] for row in table.values()] == ["\N{EN DASH}", "+0 % (noise)", "+19 %"]
    # Seeds are compared one by one, so their own differences, a hundred times as large, are not in the error.
    assert table["optimizer.lr=0.002"]["to the baseline"] == f"{MINUS}0.0220 {PM} 0.0012"
    assert "seed differs" not in out
    assert "- optimizer differs (on purpose): losses have no band\n" in out
    assert "- (noise): a difference smaller than twice a mean's standard error" in out


def test_seeds_that_both_rows_have_are_paired_and_held_out_losses_come_first(sweep, capsys):
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0, 1020.0), held_out=0.5)
    seeds(sweep, {"optimizer.lr": 0.002}, -0.02, (1000.0, 1010.0), held_out=0.4)
    table = rows_of(sweep.report(capsys, "--md", "--over", "seed", "--baseline", "optimizer.lr=0.001 seed=1")[1])
    said = table["optimizer.lr=0.002"]["to the baseline"]
    assert said == f"{MINUS}0.1210 {PM} 0.0010"  # the third seed, which only one row has, is left out
    assert table["optimizer.lr=0.001"]["held-out loss"].startswith("4.8")


def test_a_row_of_one_run_is_marked(sweep, capsys):
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0, 1020.0))
    seeds(sweep, {"optimizer.lr": 0.002}, -0.02, (1200.0,))
    out = sweep.report(capsys, "--md", "--over", "seed")[1]
    row = rows_of(out)["optimizer.lr=0.002"]
    assert row["difference"].endswith("(one run)") and row["to the baseline"] == f"{MINUS}0.0200 (one run)"
    assert "- (one run): " in out
    (_, single) = json.loads(sweep.report(capsys, "--json", "--over", "seed")[1])["rows"]
    assert (single["doubt"], single["loss_difference_error"]) == ("one run", None)


@pytest.mark.parametrize(("others", "ends"), [((1200.0, 1210.0), "higher loss"), ((1200.0,), "no conclusion: 3 and 1")])
def test_the_script_of_the_page_concludes_only_from_rows_that_have_an_error(sweep, capsys, others, ends):
    """The last lines of docs/metrics.md read the report as it is."""
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0, 1020.0))
    seeds(sweep, {"optimizer.lr": 0.002}, 0.05, others)
    document = json.loads(sweep.report(capsys, "--json", "--over", "seed")[1])
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.S)
    end = loop[loop.index("baseline, other =") :]
    try:
        exec(end, {"titan": lambda *words: document, "sys": sys})
        said = capsys.readouterr().out
    except SystemExit as stop:
        said = str(stop.code)
    assert ends in said


def test_seeds_that_failed_are_named(sweep, capsys):
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0))
    sweep.cell(
        "optimizer.lr=0.001 seed=7",
        {"optimizer.lr": 0.001, "seed": 7},
        failure={
            "exit_status": 76,
            "error": {"type": "OutOfMemoryError", "message": "no", "traceback": "x", "time": 1.0, "secondary": False},
        },
    )
    out = sweep.report(capsys, "--md", "--over", "seed")[1]
    assert "- optimizer.lr=0.001: seed=7: OOM, and left out" in out and f"| 1,005.0 {PM} 5.0 |" in out
    status, _, err = sweep.report(capsys, "--over", "sed")
    assert (status, err) == (2, "--over sed: no cell has such a key; did you mean seed?\n")


def test_a_sweep_that_runs_still_has_rows_of_what_has_begun_alone(sweep, capsys):
    sweep.cells += [
        {"name": f"optimizer.lr={lr} seed=7", "overrides": [], "directory": f"later-{lr}"} for lr in (0.001, 0.004)
    ]
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0))
    # no result, as it has not ended
    sweep.cell("optimizer.lr=0.002 seed=0", {"optimizer.lr": 0.002, "seed": 0}, losses=[4.0] * 20)
    status, out, _ = sweep.report(capsys, "--md", "--over", "seed", baseline="optimizer.lr=0.004 seed=7")
    assert status == 0 and [*rows_of(out)] == ["optimizer.lr=0.001", "optimizer.lr=0.002"]
    assert "- not started, and left out: 2 of 5 cells\n" in out and "later" not in out
    out = sweep.report(capsys, "--md")[1]
    assert out.count("not started") == 2 and "left out" not in out  # each cell has a row of its own
    status, _, err = sweep.report(capsys, "--over", "seed", "--baseline", "optimizer.lr=0.004 seed=7")
    assert (status, err) == (2, "--baseline optimizer.lr=0.004 seed=7: has not started\n")
    selection = select_runs(sweep.name, sweep.runs)
    cells = [replace(cell, state=State("running")) if "seed=0" in cell.name else cell for cell in gather(selection)]
    assert "not started, and left out: 2 of 5 cells; still running: 2" in build(selection, cells, over="seed").notes


def test_means_are_drawn_with_their_errors(sweep, capsys, tmp_path):
    seeds(sweep, {"optimizer.lr": 0.001}, 0.0, (1000.0, 1010.0, 1020.0))
    seeds(sweep, {"optimizer.lr": 0.002}, -0.02, (1004.0, 1012.0, 1020.0))
    assert sweep.report(capsys, "--over", "seed", "--plots", "--html", "-o", str(tmp_path))[0] == 0
    assert "(thin lines: standard errors)" in (tmp_path / "throughput.svg").read_text()
    assert '"low": [4.' in (tmp_path / "report.html").read_text()


def test_sizes_and_tokens_are_in_the_csv_and_in_the_table_where_they_differ(sweep, capsys):
    size = {"tokens_per_second": 100.0, "parameters": 1234567, "flops_per_token": 2.5e9}
    sweep.cell("a", {"model.dim": 64}, result=size | {"tokens": 4096})
    sweep.cell("b", {"model.dim": 128}, result=size | {"tokens": 8192})
    _, out, _ = sweep.report(capsys, "--md")
    assert "| tokens seen |" in out and "8,192 |" in out and "| parameters |" not in out
    _, out, _ = sweep.report(capsys, "--csv")
    first = next(csv.DictReader(io.StringIO(out)))
    assert (first["parameters"], first["flops_per_token"], first["tokens"]) == ("1234567", "2500000000.0", "4096")


def test_the_plot_of_losses_draws_means(sweep, capsys):
    """The loss of one step is noisy. For a run that logs every tenth step, the mean of the ten steps is drawn; version
    0.1 recorded no means.
    """
    for name, means in (("a", True), ("b", False)):
        directory = sweep.cell(name, result={"tokens_per_second": 100.0})
        rows = [{"step": 10 * row, "loss": 9.0} | ({"loss_mean": 5.0 - row} if means else {}) for row in range(1, 4)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep.report(capsys)
    selection = select_runs("table", sweep.runs)
    loss = next(curves(build(selection, gather(selection))))
    assert [line.y for line in loss.lines] == [[4.0, 3.0, 2.0], [9.0, 9.0, 9.0]]


def test_goodput_is_shown_where_a_run_was_started_twice(sweep, capsys):
    directory = sweep.cell("base", result=result(1000.0, 1.0, goodput=0.875))
    sweep.cell("other", result=result(1000.0, 1.0, goodput=0.9))
    assert "goodput" not in rows_of(sweep.report(capsys, "--md")[1])["base"]
    assert [row["goodput"] for row in csv.DictReader(io.StringIO(sweep.report(capsys, "--csv")[1]))] == ["0.875", "0.9"]
    for number in (1, 2):
        (directory / f"attempts/{number}").mkdir(parents=True)
    assert [row["goodput"] for row in rows_of(sweep.report(capsys, "--md")[1]).values()] == ["87.5%", "90.0%"]
