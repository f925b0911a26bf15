"""`titan rates calibrate`, `titan rates tune` and `titan report --predicted` on real runs of a tiny model on this machine's
CPU.
"""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan_hydra.core.job.config.files import load_yaml, read_json
from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan.predict import predict
from titan_hydra.instruments.rates import calibrate
from titan_hydra.instruments.rates.command_calibrate import target_file

LINE = ["debug=tiny", "data=synthetic", "data.global_batch=4", "hardware=cpu"]


def titan(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "titan_hydra.cli", *words], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return a folder with a tuned sweep, and what was printed."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "conf").mkdir()
    return folder, titan(
        folder, "rates", "tune", *LINE, "--gpus", "2", "--layouts", "2", "--steps", "4", "--into", "here"
    )


def test_tune_runs_calibrates_and_keeps_the_rates(tuned):
    folder, done = tuned
    assert done.returncode == 0, done.stderr[-2000:]
    assert "round 1: 2 layouts" in done.stdout and "\nfastest: gpus=2" in done.stdout
    manifest = max((folder / "runs/_sweeps").glob("tune-*/manifest.json"), key=lambda file: file.stat().st_mtime)
    cells = json.loads(manifest.read_text())["cells"]
    assert len(cells) >= 2 and all((folder / "runs" / cell["directory"] / "result.json").is_file() for cell in cells)
    rates = load_yaml(folder / "conf/hardware/here.yaml")
    assert rates["name"] == "here" and rates["measured"] and rates["bf16_tflops"] != 0.1
    assert read_json(manifest.parent / "hardware.json")["bf16_tflops"] == pytest.approx(rates["bf16_tflops"], rel=1e-3)


def test_the_same_command_goes_on_where_it_stopped(tuned):
    folder, _ = tuned
    results = {file: file.stat().st_mtime for file in (folder / "runs").glob("*/result.json")}
    again = titan(folder, "rates", "tune", *LINE, "--gpus", "2", "--layouts", "2", "--steps", "4")
    assert again.returncode == 0 and again.stdout.count("\nfastest: gpus=2") == 1
    assert {file: file.stat().st_mtime for file in (folder / "runs").glob("*/result.json")} == results


def test_a_report_shows_predicted_beside_measured(tuned):
    folder, _ = tuned
    shown = titan(folder, "report", "--predicted", "--csv")
    assert shown.returncode == 0, shown.stderr
    head, *rows = shown.stdout.splitlines()
    assert {"predicted_tokens_per_second", "to_prediction_percent", "predicted_memory_gib"} <= set(
        head.split(",")
    ) and len(rows) >= 2
    assert "predicted" not in titan(folder, "report", "--csv").stdout


def test_runs_are_written_as_rows_that_the_score_reads(tuned, tmp_path):
    folder, _ = tuned
    rows = titan(folder, "report", "--row").stdout
    (tmp_path / "rows.yaml").write_text(rows)
    scored = json.loads(titan(folder, "rates", "score", str(tmp_path / "rows.yaml"), "--json").stdout)
    assert len(scored["rows"]) == rows.count("- id: ") >= 2 and scored["skipped"] == {}


def test_a_run_slower_than_predicted_is_flagged(tuned):
    folder, _ = tuned
    newest = max((folder / "runs/_sweeps").glob("tune-*"), key=lambda place: (place / "manifest.json").stat().st_mtime)
    file = newest / "hardware.json"
    kept = file.read_text()
    file.write_text(
        json.dumps(
            {
                name: value * 1000 if name.endswith(("tflops", "tbs", "gbs", "per_second")) and value else value
                for name, value in json.loads(kept).items()
            }
        )
    )
    shown = titan(folder, "report", "--predicted", newest.name)
    file.write_text(kept)
    assert shown.returncode == 0 and "% slower than predicted for hardware=cpu" in shown.stdout


def test_calibrate_prints_residuals_and_writes_once(tuned):
    folder, _ = tuned
    done = titan(folder, "rates", "calibrate", *LINE, "--from", "tune", "--into", "mine")
    assert done.returncode == 0 and "residual" in done.stdout and "of another length parts them" in done.stdout
    text = (folder / "conf/hardware/mine.yaml").read_text()
    again = titan(folder, "rates", "calibrate", *LINE, "--from", "tune", "--into", "mine")
    assert (again.returncode, again.stdout) == (2, "") and (folder / "conf/hardware/mine.yaml").read_text() == text
    assert again.stderr == "--into=mine: conf/hardware/mine.yaml already exists; nearest legal: mine_2\n"
    planned = titan(folder, "plan", *LINE[:-1], "hardware=mine", "gpus=2", "--cell", "--config-dir", "conf")
    assert planned.returncode == 0 and "tokens/s/device" in planned.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rates", "calibrate", *LINE, "--from", "nowhere"], "nowhere: no such run or sweep in "),
        (
            ["rates", "calibrate", *LINE, "--from", "tune", "--into", "a b"],
            "--into a b: cannot be typed as hardware=NAME; letters, digits, _ and - can",
        ),
        (
            ["rates", "calibrate", *LINE, "--from", "unfinished-00000000"],
            "no finished run with a measured speed among unfinished-00000000",
        ),
        (
            ["plan", *LINE, "--gpus", "2", "--prove", "0"],
            "--prove=0: is the number of layouts to count, at least 1; nearest legal: 1",
        ),
        (["rates", "tune", *LINE, "--layouts", "4"], "gpus=null: a search needs the number of GPUs, such as gpus=64"),
        (
            ["rates", "tune", *LINE, "--gpus", "0", "--layouts", "4"],
            "--gpus=0: a job needs at least one; nearest legal: 1",
        ),
        (
            ["rates", "tune", *LINE, "--gpus", "2", "--layouts", "0"],
            "--layouts=0: is the number of layouts to compare, at least 2; nearest legal: 2",
        ),
        (
            ["rates", "tune", *LINE, "--gpus", "2", "--layouts", "4", "--steps", "1"],
            "--steps=1: the first ones are not measured; nearest legal: 3",
        ),
        (
            ["rates", "tune", *LINE, "--gpus", "2", "--layouts", "4", "--into", "here"],
            "--into=here: conf/hardware/here.yaml already exists; nearest legal: here_2",
        ),
    ],
)
def test_bad_input_is_one_line(tuned, words, expected):
    folder, _ = tuned
    (folder / "runs/unfinished-00000000/attempts").mkdir(parents=True, exist_ok=True)
    done = titan(folder, *words)
    assert (
        (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(expected) and done.stderr.count("\n") == 1
    )


def test_two_lengths_part_attention_from_matmuls():
    """From runs whose times were computed with known rates, these rates are found again."""

    def job(length: int, hardware: str = "h100"):
        return freeze(
            compose_unchecked(
                "model=llama3_8b",
                "data=synthetic",
                f"data.seq_len={length}",
                f"hardware={hardware}",
                "gpus=8",
                "compile=block",
                "model.max_seq_len=65536",
                "cluster=slurm",
            )
        )

    truth = replace(job(8192).hardware, bf16_tflops=500.0, attention_tflops=600.0)
    runs = [
        calibrate.measured(str(length), job(length), predict(calibrate.on(job(length), truth)).speed.tokens_per_second)
        for length in (4096, 32768)
    ]
    both, one = (calibrate.fit(chosen, job(8192).hardware) for chosen in (runs, runs[:1]))
    assert both.hardware.bf16_tflops == pytest.approx(
        500, rel=0.05
    ) and both.hardware.attention_tflops == pytest.approx(600, rel=0.1)
    assert not both.notes and one.notes[0].startswith("attention_tflops: all runs have sequences of 4096 tokens")
    assert max(abs(both.residual(run)) for run in runs) < 0.02
    assert "nic_gbs" not in both.fitted  # all messages stay inside a node


@pytest.mark.slow
def test_the_predicted_winner_is_among_the_measured_best_two(tmp_path):
    """The eight layouts of the debug model run on two gloo ranks."""
    done = titan(
        tmp_path,
        "rates",
        "tune",
        "model=llama3_debug",
        "data=synthetic",
        "data.seq_len=256",
        "data.global_batch=8",
        "hardware=cpu",
        "--gpus",
        "2",
        "--layouts",
        "8",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    newest = max(
        (tmp_path / "runs/_sweeps").glob("tune-*"), key=lambda place: (place / "manifest.json").stat().st_mtime
    )
    head, *lines = csv.reader(titan(tmp_path, "report", "--predicted", "--csv", newest.name).stdout.splitlines())
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert len(rows) >= 8
    # one of several layouts whose schedules differ only in memory
    most = max(float(row["predicted_tokens_per_second"]) for row in rows)
    best = sorted(rows, key=lambda row: -float(row["tokens_per_second"]))[:2]
    assert any(float(row["predicted_tokens_per_second"]) == most for row in best)


def test_fitted_rates_are_written_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert target_file("mine").resolve() == tmp_path / "conf/hardware/mine.yaml"
