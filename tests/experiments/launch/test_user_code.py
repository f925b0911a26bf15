"""A user's module is part of a run's identity: with an edited module, the same command line is another run. The copy of
the code from which SLURM jobs run contains the module.
"""

import json
import subprocess
import sys

import pytest

from titan_hydra.core.job.config.user_code import digest_of_code, sources
from titan_hydra.core.job.run import code as run_code
from titan_hydra.core.job.run.code import USER, code_in

from .conftest import ROOT

MODULE = "import helper\nprint('the scale is', helper.SCALE)\n"


@pytest.fixture
def project(launcher):
    """Create a project: launch.py is started in another folder than the one that holds the module and the script."""
    project = launcher.folder.parent / "project"
    project.mkdir()
    (project / "mine.py").write_text(MODULE)
    (project / "helper.py").write_text("SCALE = 1\n")
    (project / "start.py").write_text(
        f"import runpy\nrunpy.run_path({str(ROOT / 'launch.py')!r}, run_name='__main__')\n"
    )
    return project


def start(launcher, project, *overrides: str) -> subprocess.CompletedProcess:
    return launcher.python(str(project / "start.py"), *launcher.TINY, "train.imports=[mine]", *overrides)


def test_an_edited_module_is_another_run(launcher, project):
    done = start(launcher, project, "steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the scale is 1" in (launcher.attempt() / "rank_0.log").read_text(), "the ranks find it where launch.py did"
    first = launcher.run_directory
    again = start(launcher, project, "steps=2", "launch.mode=dry")
    assert first.name in again.stdout and "1 done" in again.stdout
    (project / "helper.py").write_text("SCALE = 2\n")
    other = start(launcher, project, "steps=2", "launch.mode=dry")
    assert first.name not in other.stdout and "1 to start" in other.stdout, other.stdout


def test_all_cells_of_a_line_run_the_code_of_the_first(launcher, project):
    """A module is edited while the first cell runs, here by the first rank itself."""
    edit = f"""
import os, pathlib
SCALE = 1
if 'GOMP_SPINCOUNT' in os.environ:
    pathlib.Path({str(project)!r}, 'helper.py').write_text('SCALE = 2')
"""
    (project / "helper.py").write_text(edit)
    done = start(launcher, project, "-m", "seed=1,2", "steps=1")
    assert done.returncode == 0 and (project / "helper.py").read_text() == "SCALE = 2", done.stdout + done.stderr
    runs = [path.parent for path in sorted((launcher.folder / "runs").glob("*/config.json"))]
    assert len(runs) == 2 and len({json.loads((run / "env.json").read_text())["code"] for run in runs}) == 1
    for run in runs:
        assert "the scale is 1" in (run / "attempts/1/rank_0.log").read_text()


def test_ranks_and_retry_refuse_modules_that_were_edited_since(launcher, project):
    (project / "helper.py").write_text(
        "SCALE = 1\nimport os\nif 'GOMP_SPINCOUNT' in os.environ:\n    raise RuntimeError('a bug')\n"
    )
    failed = start(launcher, project)
    assert failed.returncode == 2 and "a bug" in failed.stderr, failed.stdout + failed.stderr
    (project / "helper.py").write_text("SCALE = 2\n")
    launcher.env["PYTHONPATH"] = f"{project}:{ROOT}"
    rank = launcher.python("-m", "titan_hydra.core.train.worker", str(launcher.run_directory), "2")
    assert rank.returncode == 2
    assert "they were edited since" in json.loads((launcher.attempt(2) / "rank_0.json").read_text())["error"]["message"]
    retry = launcher.python("-m", "titan_hydra.cli", "resume", str(launcher.run_directory))
    assert retry.returncode == 2 and "they were edited since" in retry.stderr and retry.stderr.count("\n") == 1, (
        retry.stderr
    )
    assert not (launcher.attempt(3)).exists()


def test_the_snapshot_holds_the_modules_and_jobs_import_them_from_there(launcher, project, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(project)
    code = run_code.take_snapshot(tmp_path / "runs", sources(["mine"]))
    assert (code / USER / "helper.py").read_text() == "SCALE = 1\n" and (code / "titan_hydra/cli.py").is_file()
    assert digest_of_code(code_in(code)) == code.name
    (project / "helper.py").write_text("SCALE = 2\n")
    assert (
        run_code.take_snapshot(tmp_path / "runs", sources(["mine"]))
        != code
        != run_code.take_snapshot(tmp_path / "runs", {})
    )
    slurm, copy = ("cluster=slurm", "cluster.gpus_per_node=1", "launch.mode=dry"), f"{launcher.folder}/runs/_code/HASH"
    assert f" PYTHONPATH={copy}:{copy}/{USER}${{PYTHONPATH" in start(launcher, project, *slurm).stdout
    assert f" PYTHONPATH={copy}${{PYTHONPATH" in launcher.run(*launcher.TINY, *slurm).stdout


def test_a_rank_imports_from_the_snapshot_first(tmp_path, project):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/mine.py").write_text("WHERE = 'the snapshot'")
    load = "from titan_hydra.core.job.config.user_code import load_user_modules\nload_user_modules(['mine'])"
    code = f"{load}\nimport mine\nprint(mine.WHERE)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}/first:{ROOT}", "PYTHONSAFEPATH": "1"},
    )
    assert done.stdout == "the snapshot\n"
