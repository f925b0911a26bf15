"""A user's module can add a part of every kind that has a record. The modules are those of docs/extend.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.registry import OPTIMIZERS, TRACKERS, OptimizerKind, TrackerKind, register, resolve

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path):
    """Return a folder with the modules and options of docs/extend.md. Each block of code begins with a comment that
    names its file.
    """
    text = (ROOT / "docs/extend.md").read_text()
    for name, code in re.findall(r"```(?:python|yaml)\n# ([\w/.]+)\n(.*?)```", text, re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    return tmp_path


def launch(project, *arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "launch.py"), "--config-dir=conf", "debug=tiny", "precision=fp32", *arguments]
    return subprocess.run(line, cwd=project, capture_output=True, text=True, check=False)


def test_one_run_with_a_source_a_tracker_an_optimizer_and_a_rate_of_ones_own(project):
    line = (
        "train.imports=[parts]",
        "data.name=lines",
        "data.path=*.txt",
        "data.at_least=10",
        "optimizer=adagrad",
        "lr_scheduler.name=steps",
        "metrics.trackers=[csv]",
        "steps=8",
    )
    run = launch(project, *line)
    assert run.returncode == 2 and "data.path=*.txt: no such file" in run.stderr and run.stderr.count("\n") == 1, (
        run.stdout + run.stderr
    )
    (project / "poem.txt").write_text("\n".join(f"The {number}th line of a long poem." for number in range(200)))
    run = launch(project, *line)
    assert run.returncode == 0, run.stdout + run.stderr
    (table,) = project.glob("runs/*/metrics.csv")
    rows = [line.split(",") for line in table.read_text().splitlines()]
    rates = [float(row[rows[0].index("lr")]) for row in rows[1:]]
    assert rates == pytest.approx([1e-2] * 4 + [1e-3] * 4), "warmed up at once, a tenth from the middle on"
    losses = [float(row[rows[0].index("loss")]) for row in rows[1:]]
    assert losses[-1] < losses[0]


def test_a_pipeline_schedule_of_ones_own_runs_and_its_record_is_asked_by_the_rules(project):
    line = ("train.imports=[parts]", "parallelism=pp", "pp_schedule.name=patient", "data.local_batch=8")
    refused = launch(project, *line, "pp_schedule.microbatches=2")
    assert refused.returncode == 2 and "pp_schedule.microbatches=2: patient needs 4" in refused.stderr, refused.stderr
    run = launch(project, *line, "steps=3")
    assert run.returncode == 0, run.stdout + run.stderr
    plain = launch(
        project, "parallelism=pp", "pp_schedule=gpipe", "pp_schedule.microbatches=4", "data.local_batch=8", "steps=3"
    )
    losses = [re.findall(r"loss (\d+\.\d+)", result.stdout) for result in (run, plain)]
    assert losses[0] and losses[0] == losses[1]


def test_a_number_format_of_ones_own_learns_the_same_on_two_layouts_and_is_not_plain(project):
    halves, norms = ("train.imports=[halves]", "precision=halves"), []
    batch = ("steps=3", "data.global_batch=4", "data.local_batch=2", "metrics.log_every=1")
    for line in ((*halves, "parallelism=single"), (*halves, "parallelism=fsdp_tp", "gpus=4"), ("parallelism=single",)):
        run = launch(project, *line, *batch, f"paths.runs=runs{len(norms)}")
        assert run.returncode == 0, run.stdout + run.stderr
        assert "halves: 14 linears converted" in run.stdout or line == ("parallelism=single",), run.stdout
        (metrics,) = project.glob(f"runs{len(norms)}/*/metrics.jsonl")
        norms.append([row["grad_norm"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row])
    one, split, plain = norms
    assert len(one) == 3 and one == pytest.approx(split, rel=1e-6) and one != pytest.approx(plain, rel=1e-6)
    run = launch(project, *halves, "precision.recipe=rowwise")
    text = "precision.recipe=rowwise: precision.converter=halves does not read it; float8 would"
    assert run.returncode == 2 and text in run.stderr, run.stderr


def test_without_the_import_the_names_are_refused_in_one_line(project):
    for arguments, text in (
        (
            ("data.name=lines",),
            "data.name=lines: not one of the choices; one of your own needs train.imports=[ITS_MODULE]; ",
        ),
        (("metrics.trackers=[csv]",), "metrics.trackers=[csv]: csv is not one of the choices"),
        (
            ("train.imports=[parts]", "optimizer=adagrad", "optimizer.beta1=0.5"),
            "optimizer.beta1=0.5: optimizer.name=adagrad does not read it; adamw or muon would",
        ),
    ):
        run = launch(project, *arguments)
        assert run.returncode == 2 and text in run.stderr and run.stderr.count("\n") == 1, run.stdout + run.stderr


def test_a_name_is_given_once():
    register(OPTIMIZERS["adamw"])
    with pytest.raises(ConfigError, match=r"optimizer\.name=adamw: this name is taken"):
        register(OptimizerKind("adamw", "mine:adamw"))
    with pytest.raises(ConfigError, match=r"metrics\.trackers=wandb: this name is taken"):
        register(TrackerKind("wandb", "mine:WandB"))


def test_every_record_of_the_package_refers_to_something():
    from titan_hydra.core.job.config.registry import DATA_SOURCES, FORMATS, LR_SCHEDULES, PIPELINE_SCHEDULES

    references = [
        *(kind.build for kind in (*DATA_SOURCES.values(), *OPTIMIZERS.values())),
        *(kind.open for kind in TRACKERS.values()),
        *(kind.factor for kind in LR_SCHEDULES.values()),
        *(kind.schedule for kind in PIPELINE_SCHEDULES.values()),
        *(kind.convert for kind in FORMATS.values()),
    ]
    assert all(callable(resolve(reference)) for reference in references)
    for wrong in ("titan_hydra.nowhere:x", "titan_hydra.cli:nothing"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            resolve(wrong)
