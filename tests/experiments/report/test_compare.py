"""Comparisons that are not allowed are refused with one line for each reason, or noted under the table; cells without
numbers have rows too.
"""

import time

import pytest

from titan_hydra import cli

FAST, SLOW = {"tokens_per_second": 150.0, "device": "H100"}, {"tokens_per_second": 100.0, "device": "H100"}


def test_everything_that_must_be_equal_is_named_at_once(sweep, capsys):
    sweep.cell("a", result=SLOW | {"versions": {"torch": "2.12"}})
    sweep.cell(
        "b",
        {"data.seq_len": 4096, "optimizer.lr": 1.0},
        result=FAST | {"device": "A100", "versions": {"torch": "2.13"}},
        env={"git_sha": "fedcba9876543210"},
        swept=False,
    )
    status, out, err = sweep.report(capsys)
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "optimizer differs: optimizer.lr=0.002 (a); optimizer.lr=1.0 (b); leave cells out, or --allow optimizer",
        "data.seq_len differs: 256 (a); 4096 (b); leave cells out, or --allow data.seq_len",
        "device differs: H100 (a); A100 (b); leave cells out, or --allow device",
        "code differs: 0123456 (a); fedcba9 (b); leave cells out, or --allow code",
        "versions.torch differs: 2.12 (a); 2.13 (b); leave cells out, or --allow versions.torch",
    ]


def test_what_is_allowed_is_said_under_the_table(sweep, capsys):
    sweep.cell("a", losses=[5.0, 4.0], result=SLOW)
    sweep.cell("b", {"seed": 1}, losses=[5.0, 4.0], result=FAST | {"device": "A100"}, swept=False)
    assert sweep.report(capsys, "--allow", "seed")[0] == 2
    status, out, _ = sweep.report(capsys, "--allow", "seed, device")
    assert status == 0
    assert "seed differs (allowed): 0 (a); 1 (b): losses are not compared" in out
    assert "device differs (allowed): H100 (a); A100 (b)" in out
    assert "+50.00 %" in out
    assert "yes" not in out  # a loss with another seed is in no band


def test_a_sweep_may_vary_what_it_varies(sweep, capsys):
    sweep.cell("short", result=SLOW)
    sweep.cell("long", {"data.seq_len": 4096}, result=FAST)
    status, out, _ = sweep.report(capsys)
    assert status == 0
    assert (
        "data.seq_len differs (on purpose): 256 (short); 4096 (long): no difference in tokens/s, losses are not compared"
        in out
    )
    assert "%" not in out
    assert "+50.00 %" in sweep.report(capsys, "--allow", "data.seq_len")[1]


def test_a_note_lists_at_most_three_cells_of_a_value(sweep, capsys):
    for number in range(6):
        sweep.cell(f"c{number}", {"data.seq_len": 4096 if number else 256}, result=SLOW)
    out = sweep.report(capsys)[1]
    assert "data.seq_len differs (on purpose): 256 (c0); 4096 (c1, c2, c3 and 2 more): " in out


def test_models_of_one_name_are_told_apart(sweep, capsys):
    sweep.cell("dense", {"model.name": "dense"}, result=SLOW)
    sweep.cell("sparse", {"model.name": "sparse"}, result=SLOW)
    sweep.cell("wide", {"model.name": "sparse", "model.dim": 512}, result=FAST)
    shown = "model differs (on purpose): dense (dense); sparse, model.dim=256 (sparse); sparse, model.dim=512 (wide):"
    assert shown in sweep.report(capsys)[1]


def test_a_recipe_may_vary_everything_but_the_machine(sweep, capsys):
    sweep.cell("a", {"experiment": "one"}, result=SLOW)
    sweep.cell("b", {"experiment": "two"}, result=FAST)
    sweep.report(capsys)
    assert sweep.report(capsys)[0] == 0
    sweep.cell("c", {"experiment": "three"}, result=FAST | {"device": "A100"})
    assert sweep.report(capsys)[2].startswith("device differs: H100 (a, b); A100 (c)")


def test_a_folder_of_runs_varies_nothing_on_purpose(sweep, capsys):
    sweep.cell("short", result=SLOW)
    sweep.cell("long", {"data.seq_len": 4096}, result=FAST)
    assert sweep.report(capsys)[0] == 0
    status, _, err = sweep.report(capsys, target=str(sweep.runs))
    assert (status, err.count("data.seq_len differs")) == (2, 1)


def test_the_same_commit_with_other_changes_is_other_code(sweep, capsys):
    sweep.cell("a", result=SLOW, env={"git_diff": "one"})
    sweep.cell("b", result=FAST, env={"git_diff": "two"})
    status, _, err = sweep.report(capsys)
    assert status == 2
    assert err.startswith("code differs: 0123456+")


@pytest.mark.parametrize(("gpus", "samples", "fine"), [(2, 16, True), (2, 8, True), (2, 12, False)])
def test_scaling_is_strong_or_weak_or_refused(sweep, capsys, gpus, samples, fine):
    sweep.cell("one", {"gpus": 1, "data.global_batch": 8}, result=SLOW)
    sweep.cell("two", {"gpus": gpus, "data.global_batch": samples}, result=FAST)
    for cell in sweep.cells:  # the batch follows from the degrees; no override sets it
        cell["overrides"] = [override for override in cell["overrides"] if not override.startswith("data.")]
    assert (sweep.report(capsys)[0] == 0) is fine


def test_techniques_may_differ(sweep, capsys):
    sweep.cell("a", result=SLOW)
    sweep.cell(
        "b",
        {
            "parallelism.tp": 2,
            "precision.name": "fp32",
            "ac.name": "full",
            "compile.name": "block",
            "data.local_batch": 1,
            "pp_schedule.name": "zbv",
            "model.attention": "flash",
        },
        result=FAST,
        swept=False,
    )
    assert sweep.report(capsys)[0] == 0


OOM = {
    "exit_status": 76,
    "error": {
        "type": "OutOfMemoryError",
        "message": "CUDA out of memory",
        "traceback": "x",
        "time": 1.0,
        "secondary": False,
    },
}


def test_cells_without_numbers_are_rows(sweep, capsys):
    sweep.cell("fine", losses=[5.0, 4.0], result=SLOW)
    sweep.cell("burst", rates=[1.0, 900.0, 900.0], failure=OOM)
    sweep.cell("stopped", {"metrics.log_every": 1}, rates=[1.0, 90.0, 110.0, 120.0])
    sweep.cells.append({"name": "later", "overrides": [], "directory": "later-12345678"})
    status, out, _ = sweep.report(capsys, "--md")
    assert status == 0
    assert "| burst | OOM | \N{EN DASH} |" in out
    assert "- burst: OOM after step 3: rank 0: OutOfMemoryError: CUDA out of memory" in out
    assert "| stopped | 110\\* |" in out
    assert "- \\* stopped: interrupted at step 4 of 80; over 3 logged rows so far" in out
    assert "| later | not started |" in out
    assert "900" not in out


def test_the_baseline_again_shows_the_noise_of_the_nodes(sweep, capsys):
    sweep.cell("a", result=SLOW)
    sweep.cell("b", result=FAST)
    sweep.cell("a again", result=SLOW | {"tokens_per_second": 99.2}, repeat=True)
    _, out, _ = sweep.report(capsys)
    assert "baseline again at the end: \N{MINUS SIGN}0.80 %" in out
    assert "a again" not in out


def test_the_baseline_is_the_one_asked_for(sweep, capsys):
    sweep.cell("first", result=SLOW)
    sweep.cell("second", result=FAST)
    assert "| first | 100 | \N{EN DASH} |" in sweep.report(capsys, "--md")[1]
    assert "| first | 100 | \N{MINUS SIGN}33.34 % |" in sweep.report(capsys, "--md", baseline="second")[1]
    assert "| second | 150 | +50.00 % |" in sweep.report(capsys, "--md", "--baseline", "first", baseline="second")[1]


def test_mistakes_are_one_line(sweep, capsys):
    sweep.cell("first", result=None)
    assert sweep.report(capsys)[::2] == (2, "table: no cell has numbers yet (first: interrupted)\n")
    sweep.cell("second", result=FAST)
    assert sweep.report(capsys, "--baseline", "secnd")[::2] == (
        2,
        "--baseline secnd: no such cell; did you mean second?\n",
    )
    _, _, err = sweep.report(capsys, "--allow", "data.seqlen")
    assert err.startswith("--allow data.seqlen: not a key that must be equal; did you mean data.seq_len")
    (sweep.runs / "empty").mkdir()
    status, _, err = sweep.report(capsys, target=str(sweep.runs / "empty"))
    assert (status, err.count("\n")) == (2, 1)
    sweep.cells.clear()
    assert sweep.report(capsys)[::2] == (2, "table: no runs\n")


def test_without_a_target_it_is_the_newest_sweep_as_for_status(sweep, capsys, monkeypatch):
    sweep.cell("a", result=SLOW)
    sweep.report(capsys)
    sweep.cell("alone", {"data.seq_len": 4096}, result=FAST)  # a run with another sequence length, outside the sweep
    monkeypatch.chdir(sweep.runs.parent)
    assert cli.main(["report", "--md"]) == 0
    assert "| a | 100 |" in (out := capsys.readouterr().out) and "alone" not in out
    assert cli.main(["report", "runs"]) == 2
    assert "data.seq_len differs" in capsys.readouterr().err


def test_a_sweep_is_meant_though_a_newer_one_has_a_cell_of_its_name(sweep, new_sweep, capsys):
    newer = new_sweep(sweep.runs)
    newer.name = "newer"
    for one, cells in ((sweep, ("dense", "sparse")), (newer, ("table", "other"))):
        for cell in cells:
            one.cell(cell, losses=[5.0, 4.0], result={"tokens_per_second": 100.0})
        one.report(capsys)
    assert (
        all(cell in (shown := newer.report(capsys, target="table")[1]) for cell in ("dense", "sparse"))
        and "other" not in shown
    )
    assert "other" in (shown := sweep.report(capsys, target="other")[1]) and "dense" not in shown


def test_hundreds_of_cells_are_read_quickly(sweep, capsys):
    for number in range(200):
        sweep.cell(f"cell{number}", losses=[5.0] * 20, result=SLOW)
    began = time.perf_counter()
    assert sweep.report(capsys, "--md")[0] == 0
    assert time.perf_counter() - began < 6
