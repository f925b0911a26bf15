"""A wheel is enough: with the package installed outside the checkout, `titan init` writes a project whose launch.py,
test and sweep run.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.experiments.launch.conftest import ROOT

BUILD = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "titan_hydra", "conf", "sweeps")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install the wheel of this checkout into a separate folder. Return `run(folder, *command)`, which runs a command
    in a folder with this installation.
    """
    place = tmp_path_factory.mktemp("wheel")
    (place / "source").mkdir()
    for name in BUILD:  # a build writes into its folder, and would include files of an earlier build
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / "source" / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, place / "source")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(place), str(place / "source")], check=True
    )
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(place / "site"), *map(str, place.glob("*.whl"))], check=True
    )
    shutil.rmtree(place / "source")

    def run(folder, *command: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(place / "site"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_wheel_has_every_option_of_the_checkout(site, tmp_path):
    code = (
        "import titan_hydra; from titan_hydra.core.job.config.files import CONF; print(CONF)\n"
        "print(*sorted(str(file.relative_to(CONF)) for file in CONF.rglob('*.*')))"
    )
    conf, files = site(tmp_path, "-c", code).stdout.splitlines()
    assert conf.endswith("site/titan_hydra/conf")
    assert files.split() == sorted(
        str(file.relative_to(ROOT / "conf"))
        for file in [*(ROOT / "conf").rglob("*.*"), *(ROOT / "conf/sweeps").glob("*.*")]
        if file.is_file()
    )


def test_a_project_of_ones_own_runs_with_the_installed_package_alone(site, tmp_path):
    written = site(tmp_path, "-m", "titan_hydra.cli", "init", "mylab")
    assert written.returncode == 0 and "python launch.py" in written.stdout, written.stderr
    project = tmp_path / "mylab"
    done = site(project, "launch.py", "debug=tiny", "model=parallel_llama")
    assert done.returncode == 0, done.stdout + done.stderr
    (config,) = project.glob("runs/*/config.json")
    assert json.loads(config.read_text())["model"]["family"] == "parallel_llama"
    dry = site(project, "launch.py", "+sweeps=blocks", "launch.mode=dry")
    assert "2 cells: 2 to start" in dry.stdout, dry.stdout + dry.stderr
    wrong = site(project, "launch.py", "model=parallel_lama")
    assert wrong.returncode == 2 and "did you mean parallel_llama?" in wrong.stderr and wrong.stderr.count("\n") == 1, (
        wrong.stderr
    )


def test_the_ci_of_a_new_project_passes_its_gate_and_fails_another(site, tmp_path):
    site(tmp_path, "-m", "titan_hydra.cli", "init", "mylab")
    project = tmp_path / "mylab"
    workflow = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())
    lines = [step["run"] for step in workflow["jobs"]["train"]["steps"] if "run" in step]
    *_, launch, gate = [line.replace("titan ", "-m titan_hydra.cli ").removeprefix("python ").split() for line in lines]
    trained = site(project, *launch)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    passed = site(project, *gate)
    assert passed.returncode == 0 and json.loads(passed.stdout)["passed"], passed.stdout + passed.stderr
    (project / "gate.yaml").write_text("mean_loss: 0.5\n")
    missed = site(project, *gate)
    assert missed.returncode == 3 and json.loads(missed.stdout)["missed"] == 1, missed.stdout + missed.stderr


@pytest.mark.slow
def test_the_test_and_the_sweep_of_a_new_project_pass_and_its_model_is_verified(site, tmp_path):
    site(tmp_path, "-m", "titan_hydra.cli", "init", "mylab")
    test = site(tmp_path / "mylab", "-m", "pytest", "-q", "tests")
    assert test.returncode == 0 and "1 passed" in test.stdout, test.stdout
    sweep = site(tmp_path / "mylab", "launch.py", "+sweeps=blocks")
    assert sweep.returncode == 0 and sweep.stdout.count("done, 20 steps") == 2, sweep.stdout + sweep.stderr
    proof = site(
        tmp_path / "mylab",
        "-m",
        "titan_hydra.cli",
        "verify",
        "--only",
        "simple_fsdp 2, tied",
        "--config-dir",
        "conf",
        "model=parallel_llama",
    )
    assert proof.returncode == 0 and "simple_fsdp 2, tied embeddings" in proof.stdout, proof.stdout + proof.stderr


def test_init_writes_into_a_new_or_empty_folder_only(tmp_path, capsys):
    from titan_hydra.cli import main

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "empty").mkdir()
    for folder, words in (("full", "is not empty"), ("full/notes", "File exists")):
        assert main(["init", str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes"]
    assert main(["init", str(tmp_path / "empty")]) == 0 and (tmp_path / "empty" / ".gitignore").is_file()
