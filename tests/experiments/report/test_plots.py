"""The diagrams show the numbers of the table and their origin, and label each line with its run."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from types import SimpleNamespace

import pytest

from titan_hydra import cli
from titan_hydra.core.job.pipeline import stage_count, stages_of_ranks
from titan_hydra.core.job.rules.pipeline import wrong_with
from titan_hydra.core.parallel import pipeline
from titan_hydra.experiments.compose.compose import CONF, compose_job
from titan_hydra.experiments.report.charts import looks
from titan_hydra.experiments.report.style import DASHES, LIGHT, LINES, line_style
from titan_hydra.experiments.report.timeline import TIME, Timeline, play

RESULT = {"tokens_per_second": 100.0, "tokens_per_second_iqr": 5.0, "memory_gib": 10.0, "device": "H100"}
CURVE = [3 + math.exp(-step / 10) for step in range(40)]


def text(file) -> str:
    return file.read_text()


def test_bars_say_what_the_table_says(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE, result=RESULT)
    sweep.cell(
        "wrong", losses=[2 * loss for loss in CURVE], result=RESULT | {"tokens_per_second": 150.0, "memory_gib": 7.5}
    )
    status, out, _ = sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert status == 0
    names = ("throughput", "memory", "loss", "difference")
    paths = [str(tmp_path / f"{name}.{ending}") for name in names for ending in ("png", "svg")]
    assert out == sweep.report(capsys)[1] + "\n" + "".join(f"{path}\n" for path in paths)  # below the table
    assert sweep.report(capsys, "--md", "--plots", "-o", str(tmp_path))[1].split() == [
        str(tmp_path / "report.md"),
        *paths,
    ]
    for said in (
        ">150<",
        ">+50 %, loss left the band<",
        ">baseline<",
        ">tokens/s per device (thin lines: half the IQR to each side)<",
    ):
        assert said in text(tmp_path / "throughput.svg")
    for said in (">7.5<", "\N{MINUS SIGN}25.00 %", "GiB"):
        assert said in text(tmp_path / "memory.svg")
    for said in (">base (baseline)<", ">wrong<", ">nats per token<", ">step<"):
        assert said in text(tmp_path / "loss.svg")
    assert ">wrong: left at step 1, +100.00 % (more than 0.01 %)<" in text(tmp_path / "difference.svg")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in names:
        origin = "  \N{MIDDLE DOT}  ".join(
            ("table", "llama3_debug, 1 rank, H100, commit 0123456", "python launch.py +sweeps=table")
        )
        assert f">{origin}<" in text(tmp_path / f"{name}.svg")


def test_the_largest_difference_is_a_number(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE, result=RESULT)
    sweep.cell("near", losses=[loss * (1 + 3e-8 * (step == 5)) for step, loss in enumerate(CURVE)], result=RESULT)
    sweep.cell("twin", losses=CURVE, result=RESULT)
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert ">near: at most 5.0e-09<" in text(tmp_path / "difference.svg")  # 3e-8 divided by six rows
    assert ">twin: the same bits<" in text(tmp_path / "difference.svg")


def test_lines_over_tokens_and_seconds_with_logarithms(sweep, capsys, tmp_path):
    sweep.cell("base", {"data.global_batch": 8, "data.seq_len": 128}, losses=CURVE, result=RESULT)
    for axis, said in (("tokens", "10,000"), ("seconds", "seconds of training")):
        assert sweep.report(capsys, "--plots", "--x", axis, "--log", "-o", str(tmp_path / axis))[0] == 0
        assert f">{said}<" in text(tmp_path / axis / "loss.svg")


def test_marks_on_the_axis_of_steps_are_whole_steps(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE[:20], result=RESULT)
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert ">10<" in text(tmp_path / "loss.svg") and ">7.5<" not in text(tmp_path / "loss.svg")


def test_lines_of_neighbours_differ_in_colour_and_dashes():
    looks = [line_style(number) for number in range(28)]
    assert len(set(looks)) == 28 and len(set(LINES)) == 7
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


def test_the_same_report_draws_the_same_bytes(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE, result=RESULT)
    for folder in ("one", "two"):
        sweep.report(capsys, "--plots", "--html", "-o", str(tmp_path / folder))
    for name in ("throughput.svg", "loss.svg", "report.html"):
        assert text(tmp_path / "one" / name) == text(tmp_path / "two" / name)


def test_scaling_is_drawn_against_the_ideal(sweep, capsys, tmp_path):
    for gpus, rate in ((8, 100.0), (16, 90.0), (32, 75.0)):
        sweep.cell(
            f"fsdp gpus={gpus}",
            {"gpus": gpus, "parallelism.dp_shard": gpus, "data.global_batch": 2 * gpus},
            result=RESULT | {"tokens_per_second": rate},
        )
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert ">fsdp, weak: 75%<" in text(tmp_path / "scaling.svg")
    assert ">ideal<" in text(tmp_path / "scaling.svg")


def study(sweep, cells):
    """Add runs whose held-out losses were measured every ten steps; each run has changes, a number of parameters and a
    last held-out loss.
    """
    for name, (changes, parameters, last) in cells.items():
        result = RESULT | {
            "validation_loss": last,
            "parameters": parameters,
            "flops_per_token": 6 * parameters,
            "tokens": 1000,
        }
        directory = sweep.cell(name, changes, losses=CURVE, result=result)
        rows = [
            {"event": "validation", "step": step, "validation_loss": last + 2 - step / 20} for step in (10, 20, 30, 40)
        ]
        (directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_held_out_and_training_loss_are_one_figure_and_a_run_alone_has_a_colour(sweep, capsys, tmp_path):
    study(sweep, {"alone": ({}, 1_000_000, 3.0)})
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert not (tmp_path / "compute.svg").exists() and not (tmp_path / "parameters.svg").exists(), "there is one size"
    drawn = text(tmp_path / "validation.svg")
    assert ">Held-out and training loss<" in drawn and drawn.count(">alone<") == 1
    assert "stroke-width: 0.8" in drawn and "stroke-width: 1.3" in drawn and LIGHT["blue"] in drawn
    for name in ("validation", "loss", "throughput"):
        assert "baseline" not in text(tmp_path / f"{name}.svg") and LIGHT["base"] not in text(
            tmp_path / f"{name}.svg"
        ), name


def test_held_out_loss_is_drawn_against_what_cells_differ_in(sweep, capsys, tmp_path):
    study(sweep, {"narrow": ({"model.dim": 128}, 1_000_000, 3.5), "wide": ({"model.dim": 512}, 30_000_000, 3.0)})
    assert sweep.report(capsys, "--plots", "--html", "-o", str(tmp_path))[0] == 0
    for name, said in (("compute", "training FLOPs"), ("parameters", "parameters")):
        drawn = text(tmp_path / f"{name}.svg")
        assert f">{said}<" in drawn and f">Held-out loss against {name}<" in drawn
        assert all(f">{cell}<" in drawn for cell in ("narrow (baseline)", "wide")) and "e+" not in drawn


def test_two_keys_of_a_sweep_are_colours_and_dashes():
    def shown(*cells):
        rows = [
            SimpleNamespace(cell=SimpleNamespace(overrides=cell.split()), baseline=not number)
            for number, cell in enumerate(cells)
        ]
        report = SimpleNamespace(rows=rows, own=rows, reference=rows[0] if len(rows) > 1 else None)
        return [(look.colour, look.dash, look.baseline) for look in looks(report)]

    widths, seeds = (1, 2, 3), (0, 1)
    grid = shown(*(f"steps=9 model.dim={width} seed={seed}" for width in widths for seed in seeds))
    assert grid == [(LINES[width - 1], DASHES[seed], False) for width in widths for seed in seeds]
    assert shown("model.dim=1", "model.dim=2") == [(*line_style(0), True), (*line_style(1), False)]
    assert shown("seed=1") == [(*line_style(0), False)]
    many = shown(*(f"model.dim={width} seed={seed}" for width in range(8) for seed in seeds))
    assert many[3] == (*line_style(3), False), "more values than colours"
    layouts = (
        "parallelism=single",
        "parallelism=ddp gpus=2",
        "parallelism=fsdp gpus=2",
        "parallelism=tp",
        "parallelism=fsdp gpus=4",
    )
    assert shown(*layouts)[:2] == [(*line_style(0), True), (*line_style(1), False)], "few of the combinations are rows"


def test_a_long_command_stands_whole_below_the_figure(sweep, capsys, tmp_path):
    sweep.cell("a", losses=CURVE, result=RESULT)
    command = ["-m", *(f"data.mixture.part{number}.weight=0.{number}" for number in range(1, 9))]
    sweep.report(capsys)
    manifest = next(sweep.runs.glob("_sweeps/*/manifest.json"))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"command": command}))
    assert cli.main(["report", "table", "--runs", str(sweep.runs), "--plots", "-o", str(tmp_path)]) == 0
    drawn = text(tmp_path / "loss.svg")
    assert all(word in drawn for word in command) and "\N{HORIZONTAL ELLIPSIS}" not in drawn


# matplotlib warns if a plot does not fit; files of earlier tests may be garbage-collected here
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_a_single_cell_is_drawn_well_formed(sweep, capsys, tmp_path):
    sweep.cell("a <b> & c", losses=CURVE, result=RESULT)
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    files = sorted(file.name for file in tmp_path.glob("*.svg"))
    assert files == ["loss.svg", "memory.svg", "throughput.svg"]
    for file in files:
        ElementTree.parse(tmp_path / file)


def recorded(job):
    """Return what a run of a job records of its schedule, without starting its ranks: a schedule reads only a few
    attributes of a stage before it runs.
    """
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=stage_count(job),
            group_size=job.parallelism.pp,
            group_rank=0,
            group=None,
            is_first=index == 0,
            is_last=index == stage_count(job) - 1,
            submod=None,
            has_backward=True,
        )
        for index in stages_of_ranks(job)[0]
    ]
    return pipeline.actions_of_ranks(pipeline.build_schedule(stages, job, None), job)


SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "looped_bfs": 2,
    "interleaved_1f1b": 2,
    "interleaved_zb": 2,
    "zbv": 2,
    "dualpipe_v": 2,
}


@pytest.mark.parametrize("name", [*SCHEDULES, "csv"])
def test_every_schedule_is_played_to_its_end(name):
    ranks = (
        ["parallelism.pp=2", f"pp_schedule.csv={CONF / 'pp_schedule' / 'zb_h1.csv'}"]
        if name == "csv"
        else ["parallelism.pp=4"]
    )
    job = compose_job("parallelism=pp", f"pp_schedule={name}", "data.local_batch=8", "model.n_layers=8", *ranks)
    actions = recorded(job)
    assert wrong_with(actions, job) is None
    timeline = Timeline(name, stage_count(job), play(actions, stage_count(job)))
    for own, played in zip(actions, timeline.ranks, strict=True):
        assert [action for _, action in played] == own
        ends = [start + TIME[action[1]] for start, action in played]
        # actions of a rank do not overlap
        assert all(start >= end for (start, _), end in zip(played[1:], ends, strict=False))
    assert 0 < timeline.idle < 0.5


def test_the_bubble_is_the_textbooks():
    """For 1F1B and GPipe the bubble is (p - 1) / (m + p - 1) of the time (Narayanan et al., 2021)."""
    for name in ("gpipe", "1f1b"):
        job = compose_job("parallelism=pp", f"pp_schedule={name}", "data.local_batch=8", "parallelism.pp=4")
        assert Timeline(name, 4, play(recorded(job), 4)).idle == pytest.approx(3 / 11)


def test_a_run_without_a_recorded_schedule_has_no_timeline(sweep, capsys, tmp_path):
    """Runs made before version 0.2 recorded no schedule. Cells with the same schedule share a timeline."""
    for name in ("pp", "pp lr=1"):
        sweep.cell(name, {"parallelism.pp": 2}, losses=CURVE, result=RESULT, pipelined=True)
    sweep.cell("old", {"parallelism.pp": 2}, losses=CURVE, result=RESULT)
    _, out, err = sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert [line for line in out.split() if "pipeline-" in line] == [
        str(tmp_path / f"pipeline-1.{ending}") for ending in ("png", "svg")
    ]
    assert ">1f1b: pp, pp lr=1<" in text(tmp_path / "pipeline-1.svg")
    assert err == "old: no timeline of the pipeline, as the run recorded no schedule\n"


def test_a_users_settings_of_matplotlib_do_not_reach_a_figure(tmp_path):
    """A kernel of Jupyter exports a backend that may not be installed here, and paper writers set text.usetex."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.dpi: 7\n")
    code = (
        "from titan_hydra.experiments.report.style import drawing\nfrom titan_hydra.experiments.report.plots import figure\n"
        "with drawing('plan'):\n drawn, axes = figure(2)\n axes.set_title('a_b')\n drawn.savefig('out.png')\n assert drawn.dpi == 100"
    )
    environment = {**os.environ, "MPLBACKEND": "module://no_such_backend", "MATPLOTLIBRC": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "out.png").stat().st_size > 1000
