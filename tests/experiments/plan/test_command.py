"""Test `titan plan`, and what launch.py prints about cells before they start."""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from tests.kits import forked
from titan_hydra import cli
from titan_hydra.core.job.config.family import FAMILIES, decoder_parameters
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.plan.predict import predict

ROOT = Path(__file__).parents[3]
LINE = ["model=llama3_8b", "data=synthetic", "data.seq_len=8192", "hardware=h100_500w", "compile=block"]


def plan(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main(["plan", *words])
    return status, *capsys.readouterr()


def launch(tmp_path: Path, *words: str) -> subprocess.CompletedProcess:
    return forked.run("launch.py", [*words, f"paths.runs={tmp_path / 'runs'}"], tmp_path, os.environ)


def test_a_search_prints_lines_to_paste_and_draws(capsys, tmp_path, monkeypatch):
    bands, span = [], Axes.axvspan
    monkeypatch.setattr(
        Axes, "axvspan", lambda axes, low, high, **how: bands.append((low, high)) or span(axes, low, high, **how)
    )
    status, out, _ = plan(capsys, *LINE, "data.global_batch=16", "--gpus", "8", "--plot", str(tmp_path / "new"))
    assert status == 0 and "legal points on 8 x h100_500w of 95 GiB" in out
    line = f" 1  python launch.py {' '.join(LINE)} cluster=slurm gpus=8 parallelism.dp_shard=8 ac="
    assert any(text.startswith(line) for text in out.splitlines())
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        f"plan-{name}.{end}" for name in ("memory", "speed") for end in ("png", "svg")
    }
    for name in ("memory", "speed"):
        assert ">llama3_8b on h100_500w: " in (tmp_path / f"new/plan-{name}.svg").read_text()
    # it surely fits below the first number, and is refused above the second
    assert bands == [pytest.approx((0.92 * 95, 1.10 * 95))]


@pytest.mark.parametrize(
    "words",
    [
        ["model=llama3_70b", "data.seq_len=8192", "gpus=64"],
        ["model=qwen3_30b_a3b", "data.seq_len=8192", "gpus=8"],
        # words that a layout replaces, degrees of an option that it does not name, and a word for the shell
        ["model=llama3_8b", "parallelism=fsdp_tp_pp", "ac=full", "data.seq_len=8192", "compile=block", "gpus=16"],
        ["model=llama3_8b", "cluster=local", "parallelism.async_tp=true", "compile=block", "gpus=8", "notes='a b'"],
    ],
)
def test_each_line_of_a_search_is_whole_and_composes_the_layout_of_its_row(capsys, words):
    _, out, _ = plan(capsys, *words, "hardware=h100")
    _, found, _ = plan(capsys, *words, "hardware=h100", "--json")
    lines = [text.partition("python launch.py ")[2] for text in out.splitlines() if "python launch.py " in text]
    rows = json.loads(found)
    assert len(lines) == len(rows) > 3
    for line, row in zip(lines, rows, strict=True):
        job = freeze(compose_job(*shlex.split(line)))
        assert not check(job) and job.notes == ("a b" if len(words) == 6 and "notes" in words[-1] else "")
        again = predict(job)
        assert again.peak.gib == pytest.approx(row["memory_gib"], rel=1e-6), line
        assert again.speed.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=1e-6), line


def test_layouts_that_fit_stand_before_tight_ones_which_are_faster(capsys):
    words = ["model=qwen3_30b_a3b", "data.seq_len=8192", "hardware=h100", "gpus=8"]
    rows = json.loads(plan(capsys, *words, "--json")[1])
    fits = [row["fits"] for row in rows]
    rates = [row["tokens_per_second"] for row in rows]
    sure = fits.count("yes")
    assert 0 < sure < len(rows) and fits == ["yes"] * sure + ["tight"] * (len(rows) - sure)
    assert rates[:sure] == sorted(rates[:sure], reverse=True) and min(rates[sure:]) > rates[0]
    table = plan(capsys, *words)[1].partition("\n\n")[0].splitlines()
    assert table[2 + 1 + sure].startswith("---") and table[2 + 1 + sure - 1].split()[-4] != "tight"
    rows = json.loads(plan(capsys, *words[:2], "hardware=h100", "gpus=2", "--json")[1])  # nothing fits
    assert {row["fits"] for row in rows} == {"no"}
    assert [row["memory_gib"] for row in rows] == sorted(row["memory_gib"] for row in rows)


def test_the_table_of_layouts_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for words in (["model=llama3_70b", "gpus=64"], ["model=qwen3_30b_a3b", "gpus=64"]):
        _, out, _ = plan(capsys, *words, "data.seq_len=8192", "hardware=h100")
        assert max(map(len, out.partition("\n\n")[0].splitlines())) <= 80


def test_several_numbers_of_devices_are_a_curve(capsys, tmp_path):
    line = ["model=llama3_70b", *LINE[1:], "data.global_batch=256"]
    status, out, _ = plan(capsys, *line, "--gpus", "32,4,64", "--plot", str(tmp_path))
    rows = [text.split() for text in out.splitlines()[2:5]]
    assert status == 0 and [row[0] for row in rows] == ["4", "32", "64"] and "-" in rows[0] and "100%" in rows[1]
    assert {path.name for path in tmp_path.iterdir()} == {"plan-speed.png", "plan-speed.svg"}
    alone = plan(capsys, *line, "--gpus", "64", "--json")[1]
    status, out, _ = plan(capsys, *line, "--gpus", "4,64", "--json")
    few, many = json.loads(out)
    assert status == 0 and few["fits"] == "no" and few["gpu_hours_of_a_billion_tokens"] is None
    assert many["overrides"] == json.loads(alone)[0]["overrides"]
    assert many["gpu_hours_of_a_billion_tokens"] == pytest.approx(1e9 / many["tokens_per_second"] / 3600)
    assert plan(capsys, *line, "--gpus", "4", "--json")[0] == plan(capsys, *line, "--gpus", "3,4", "--json")[0] == 2
    out = plan(capsys, *line, "--gpus", "8,32")[
        1
    ]  # 8 fit only with the host's memory, and are no base of linear scaling
    assert out.splitlines()[3].count("100%") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "8,16", "--cell"], "--gpus=8,16: --cell takes one number of GPUs; nearest legal: 8"),
        (["--gpus", "0,8"], "--gpus=0: a job needs at least one; nearest legal: 1"),
        (["--gpus", "8;16"], "'8;16' is not a whole number, or several with commas between them, as 8,16,64"),
    ],
)
def test_numbers_of_devices_that_cannot_be_used_are_one_line(words, text):
    run = forked.run("titan", ["plan", *LINE, *words], ROOT, os.environ)
    assert run.returncode == 2 and run.stdout == "" and text in run.stderr.splitlines()[-1]


def test_one_cell_as_json(capsys):
    status, out, _ = plan(capsys, *LINE, "gpus=8", "data.local_batch=2", "ac=op", "--cell", "--json")
    found = json.loads(out)
    assert status == 0 and found["fits"] == "yes" and found["hardware"] == "h100_500w" and found["rules"] == []
    assert found["memory_gib"] == pytest.approx(sum(term["gib"] for term in found["terms"]))
    assert found["memory_gib_band"] == pytest.approx([0.9 * found["memory_gib"], 1.1 * found["memory_gib"]])
    low, high = found["tokens_per_second_band"]
    assert low < found["tokens_per_second"] < high


def test_a_cell_that_does_not_fit_is_status_2_as_in_a_search(capsys):
    line = [*LINE, "gpus=8", "data.local_batch=8", "--cell"]
    status, out, err = plan(capsys, *line)
    assert status == 2 and err == "" and ": does not fit; " in out and "saved activations (counted)" in out
    status, out, _ = plan(capsys, *line, "--json")
    assert status == 2 and json.loads(out)["fits"] == "no"
    status, out, _ = plan(capsys, *line[:-1], "--why", "ac=none")  # --why is a question that this layout can answer
    assert status == 0 and ": does not fit; " in out


def test_why_names_the_rule_or_the_terms(capsys):
    status, out, _ = plan(capsys, *LINE, "--gpus", "8", "--why", "parallelism.dp_shard=4 parallelism.tp=2 ac=full")
    assert status == 0 and out.startswith("dropped: ac.name=full: this torch cannot compile it")
    status, out, _ = plan(capsys, *LINE, "--gpus", "8", "--why", "ac=op data.local_batch=2")
    assert status == 0 and "saved activations (counted)" in out and "####" in out and "matmuls" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpus", "0"], "--gpus=0: a job needs at least one; nearest legal: 1"),
        (["--gpus", "-4"], "--gpus=-4: a job needs at least one; nearest legal: 1"),
        (["--gpus", "17"], "--gpus=17: not whole nodes of 8; nearest legal: 16 or 24"),
        ([], "gpus=null: a search needs the number of GPUs, such as gpus=8"),
        (["hardware=h1000", "--gpus", "8"], "hardware=h1000: no such option; did you mean h100"),
        (
            ["hardware=unknown", "--gpus", "8"],
            "hardware=unknown: a prediction needs the device's memory and rates, such as hardware=h100; one of a100,",
        ),
        (
            ["hardware=a100", "precision=float8_rowwise", "--gpus", "8"],
            "precision=float8_rowwise: hardware=a100 has no matmuls in this format",
        ),
        (
            ["hardware=b200", "precision=nvfp4", "--gpus", "8", "--cell"],
            "precision=nvfp4: nobody has measured the rate of its matmuls; memory is predicted: ",
        ),
        (
            ["parallelism.tp=16", "gpus=16", "--cell"],
            "parallelism.tp=16: 8 key/value heads cannot be split over it; nearest legal: 8",
        ),
        (["hardware.bf16_tflops=0", "--gpus", "8"], "hardware.bf16_tflops=0.0: must be more than 0"),
    ],
)
def test_bad_input_is_one_line(capsys, words, expected):
    status, out, err = plan(capsys, *[word for word in LINE if word.split("=")[0] not in " ".join(words)], *words)
    assert (status, out) == (2, "") and err.startswith(expected) and err.count("\n") == 1


def test_a_model_with_a_tower_and_another_objective_is_one_line(capsys):
    for more in (["--gpus", "1"], ["--gpus", "1,8"], ["gpus=1", "--cell"]):
        assert cli.main(["plan", "model=llama3_8b_vision", "objective=language", "hardware=h100", *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("objective.name=language: ") and line.endswith("nearest legal: image_text")


def test_a_model_without_a_formula_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "formless.py").write_text(
        "from titan_hydra.core.models import Family, register\nfrom titan_hydra.core.models.llama3 import Llama3Config\n"
        "register(Family('formless', Llama3Config, 'nothing:here', flops=None, parameters=lambda config: 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = plan(capsys, *LINE, "--gpus", "8", "train.imports=[formless]", "model.family=formless")
    FAMILIES.pop("formless")
    assert (status, err) == (
        2,
        "model.family=formless: has no formula for its flops (Family(flops=...)), so nothing can be predicted\n",
    )


def test_a_cell_that_cannot_fit_is_refused_before_anything_starts(tmp_path):
    line = [*LINE, "cluster=slurm", "gpus=8", "data.local_batch=8", "launch.mode=dry"]
    refused = launch(tmp_path, *line)
    assert (
        refused.returncode == 2
        and refused.stderr.startswith("ac=none: takes about ")
        and refused.stderr.count("\n") == 1
    )
    warned = launch(tmp_path, *line, "launch.oom_check=warn")
    assert (
        warned.returncode == 0
        and warned.stderr.startswith("warning: ac=none: takes about ")
        and "does not fit" in warned.stdout
    )
    silent = launch(tmp_path, *line, "launch.oom_check=off")
    assert (silent.returncode, silent.stderr) == (0, "") and "does not fit" in silent.stdout


def test_a_dry_run_shows_what_is_predicted_only_where_the_hardware_is_named(tmp_path):
    shown = launch(tmp_path, *LINE, "cluster=slurm", "gpus=8", "data.local_batch=2", "ac=op", "launch.mode=dry").stdout
    assert "predicted GiB" in shown and "+-10% of 95.0" in shown and "fits" in shown and "GPU-hours" in shown
    plain = launch(tmp_path, "cluster=slurm", "gpus=8", "launch.mode=dry").stdout
    assert (
        "predicted" not in plain and "parameters" in plain and f" {decoder_parameters(compose_job().model):,} " in plain
    )


@pytest.mark.slow
def test_predictions_of_ninety_six_cells_take_little_time(tmp_path):
    line = [
        "-m",
        "model=llama3_70b",
        "data=synthetic",
        "data.seq_len=8192",
        "cluster=slurm",
        "launch.mode=dry",
        "launch.oom_check=warn",
        "gpus=64,128,256",
        "parallelism=fsdp,fsdp_tp,fsdp_pp,fsdp_tp_pp",
        "ac=op,full",
        "precision=bf16,float8_rowwise",
        "data.local_batch=2,4",
    ]

    def seconds(*more: str) -> float:
        start = time.monotonic()
        done = launch(tmp_path, *line, *more)
        assert done.returncode == 0 and "96 cells: 96 to start" in done.stdout, done.stderr[-500:]
        return time.monotonic() - start

    without, with_them = (min(seconds(*more) for _ in range(3)) for more in ([], ["hardware=h100"]))
    assert with_them < 1.5 * without
