"""Test `titan scale` on run directories: what it reads and refuses, what it predicts, and its JSON."""

import json

import numpy as np
import pytest

from titan_hydra import cli
from titan_hydra.instruments.scaling.law import Law

LADDER = {"noise": 0.003, "sizes": 4, "multiples": (5, 12, 30)}


@pytest.fixture
def scale(capsys):
    """Return a function that runs titan scale, and returns its exit status, stdout and stderr."""

    def run(*words):
        status = cli.main(["scale", *map(str, words)])
        return (status, *capsys.readouterr())

    return run


def test_seeds_are_averaged_and_a_larger_run_is_predicted(write_sweep, rows_of, synthetic, chinchilla, scale, tmp_path):
    runs = write_sweep(rows_of(synthetic(1, **LADDER), seeds=(0, 1)))
    words = ("ladder", "--runs", runs, "--size", 1e9, "--tokens", 2e10, "--draws", 40)
    status, out, _ = scale(*words, "--json", "--plot", tmp_path / "plots")
    document = json.loads(out)
    (ladder,), (found,) = document["ladders"], document["predictions"]
    assert status == 0 and len(ladder["cells"]) == 12 and {cell["runs"] for cell in ladder["cells"]} == {2.0}
    assert ladder["notes"][-1] == "losses are means over 2 seeds"
    assert found["loss"]["value"] == pytest.approx(chinchilla.loss(1e9, 2e10), rel=0.03)
    assert found["loss"]["interval"][0] < found["loss"]["value"] < found["loss"]["interval"][1]
    assert found["factor"] == pytest.approx(1e9 * 2e10 / (3e8 * 9e9), rel=0.01)
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        f"scale-{name}.{ending}" for name in ("ladder", "isoflop") for ending in ("png", "svg")
    }
    status, out, _ = scale(*words)
    assert status == 0 and "alpha  0.3" in out and "1B parameters on 20B tokens: held-out loss" in out


def test_too_far_is_refused_with_the_factor(write_sweep, rows_of, synthetic, scale):
    runs = write_sweep(rows_of(synthetic(1, **LADDER)))
    status, out, err = scale("ladder", "--runs", runs, "--flops", 1e24, "--draws", 20)
    assert (
        status == 2 and out == "" and err.count("\n") == 1 and "x beyond the ladder" in err and "support 100 x" in err
    )
    status, out, _ = scale("ladder", "--runs", runs, "--flops", 1e24, "--draws", 20, "--reach", 1e6)
    assert status == 0 and "x beyond the ladder" in out


def test_runs_that_are_not_done_are_left_out_and_named(write_sweep, rows_of, synthetic, scale):
    rows = rows_of(synthetic(1, **LADDER))
    rows[3] = (*rows[3][:4], None, *rows[3][5:])
    status, out, _ = scale("ladder", "--runs", write_sweep(rows), "--draws", 20)
    assert status == 0 and "left out: 1 of 12 runs, " in out and "(cell 3)" in out and "11 cells of 4 sizes" in out


@pytest.mark.parametrize(
    ("keep", "reason"),
    [(slice(0, 5), "5 cells"), (slice(0, 6), "2 different sizes"), (slice(0, 0), "no run has a held-out loss")],
)
def test_too_few_runs_are_one_line(write_sweep, rows_of, synthetic, scale, keep, reason):
    rows = rows_of(synthetic(1, **LADDER))
    rows = [row if row in rows[keep] else (*row[:4], None, *row[5:]) for row in rows]
    status, out, err = scale("ladder", "--runs", write_sweep(rows))
    assert (status, out, err.count("\n")) == (2, "", 1) and reason in err and "left out" in err


@pytest.mark.parametrize(
    "key, value", [("optimizer.lr", 9e-3), ("optimizer.name", "muon"), ("validation.steps", 3), ("data.seq_len", 64)]
)
def test_two_recipes_in_one_sweep_are_refused(write_sweep, rows_of, synthetic, scale, key, value):
    rows = rows_of(synthetic(1, **LADDER), seeds=(0, 1))
    rows[4] = (*rows[4][:6], {key: value})
    status, _, err = scale("ladder", "--runs", write_sweep(rows))
    assert status == 2 and err.startswith(f"ladder: {key} differs between runs (") and err.count("\n") == 1


def test_a_number_may_follow_the_size_and_a_word_may_not(write_sweep, rows_of, synthetic, scale):
    rows = rows_of(synthetic(1, **LADDER))
    by_size = [(*row[:6], {"optimizer.lr": 1e-2 / row[1]}) for row in rows]
    status, out, _ = scale("ladder", "--runs", write_sweep(by_size), "--draws", 20)
    assert status == 0 and "varies with the size or the tokens: " in out and "optimizer.lr" in out
    words = [(*row[:6], {"lr_scheduler.name": "cosine" if row[1] > 3 else "wsd"}) for row in rows]
    status, _, err = scale("words", "--runs", write_sweep(words, "words"))
    assert status == 2 and "lr_scheduler.name differs" in err


def test_parameters_may_be_counted_without_embedding_and_head(write_sweep, rows_of, synthetic, scale, base_config):
    rows = rows_of(synthetic(1, **LADDER))
    status, out, _ = scale("ladder", "--runs", write_sweep(rows), "--draws", 20, "--count", "body", "--json")
    ends = 2 * base_config["model"]["vocab_size"]
    assert status == 0
    counted = {cell["parameters"] for cell in json.loads(out)["ladders"][0]["cells"]}
    assert counted == {float(parameters - ends * dim) for dim, _, parameters, *_ in rows}


def test_two_sweeps_are_compared(write_sweep, rows_of, synthetic, scale):
    write_sweep(rows_of(synthetic(1, **LADDER)), "adamw")
    better = Law(1.6, 380.0, 0.34, 400.0, 0.28)
    runs = write_sweep(rows_of(synthetic(2, law=better, **LADDER)), "muon")
    status, out, _ = scale("adamw", "muon", "--runs", runs, "--draws", 40, "--json")
    verdict = json.loads(out)["comparison"]
    assert status == 0 and verdict["first_wins"] < 0.05 and verdict["difference"]["value"] < 0
    status, out, _ = scale("adamw", "muon", "--runs", runs, "--draws", 40)
    assert "muon has the lower curve there in" in out


def test_the_backtest_names_how_many_were_inside(write_sweep, rows_of, synthetic, scale):
    runs = write_sweep(rows_of(synthetic(6, **LADDER)))
    status, out, _ = scale("ladder", "--runs", runs, "--draws", 20, "--backtest", 3, "--json")
    found = json.loads(out)["backtest"]
    assert status == 0 and found["inside"] == sum(one["inside"] for one in found["draws"]) and len(found["draws"]) == 3
    assert found["largest"]["cells"] == 9


def test_gpus_and_days_give_size_tokens_layout_and_loss(write_sweep, rows_of, synthetic, chinchilla, scale):
    """The offer is the best of its neighbours: no other size reaches a lower loss in the same time."""
    runs = write_sweep(rows_of(synthetic(1, **{**LADDER, "noise": 0.0005})))
    job = ("model=llama3_1b", "hardware=h100", "data.seq_len=2048", "data.global_batch=64", "compile=block")
    status, out, _ = scale("ladder", *job, "--runs", runs, "--gpus", 8, "--days", 2, "--draws", 20, "--json")
    found = json.loads(out)["plan"]
    rate = found["layout"]["tokens_per_second"]
    assert status == 0 and found["tokens"] == pytest.approx(rate * 8 * 2 * 86400)
    assert found["gpu_hours"] == 384 and found["layout"]["fits"] == "yes"
    assert found["loss"]["value"] == pytest.approx(chinchilla.loss(found["parameters"], found["tokens"]), rel=0.02)
    assert "model.n_heads=" in found["overrides"] and "parallelism.dp_shard=" in found["overrides"]
    # at the same FLOPs per second, the best size would be that of the law; the planner's rates change it a little
    best = chinchilla.best_size(6 * found["parameters"] * found["tokens"])
    assert 0.5 < found["parameters"] / best < 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--size", "1e9"], "--size 1e\\+09: needs --tokens too"),
        (["--draws", "3"], "--draws=3: too few"),
        (["a", "b", "c"], "c: at most two sweeps"),
        (["ladder", "optimizer.lr=1"], "optimizer.lr=1: overrides are for --make and --gpus alone"),
        (["--make", "a b"], "cannot be typed as"),
        (["--make", "mine", "+data.x=1", "validation=on"], "data.x"),
        (["ladder", "--gpus", "0", "--days", "1"], "--gpus"),
    ],
)
def test_mistakes_are_one_line(scale, words, reason, tmp_path):
    import re

    status, out, err = scale(*words, "--runs", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and re.search(reason, err), err


def test_without_scipy_the_command_says_what_to_install(write_sweep, rows_of, synthetic, scale, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    status, _, err = scale("ladder", "--runs", write_sweep(rows_of(synthetic(1, **LADDER))))
    assert status == 2 and "pip install 'titan_hydra[scaling]'" in err


def test_losses_of_damaged_results_are_left_out(write_sweep, rows_of, synthetic, scale):
    rows = rows_of(synthetic(1, **LADDER))
    rows[0] = (*rows[0][:4], -1.0, *rows[0][5:])
    status, out, _ = scale("ladder", "--runs", write_sweep(rows), "--draws", 20)
    assert status == 0 and "with a result that is damaged (cell 0)" in out and np.isfinite(len(out))
