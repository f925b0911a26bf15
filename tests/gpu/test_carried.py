"""The kit runs from a carried tree: where only the packages that titan_hydra needs are installed, and not titan_hydra."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in ("benchmarks/gpu", "tests/gpu")
    for file in (ROOT / folder).glob("*.py")
    if "__main__" in file.read_text()
)
IMPORTS = """
import ast, importlib, runpy, sys
from pathlib import Path

path = list(sys.path)
for script in sys.argv[1:]:
    sys.path[:] = [str(Path(script).parent), *path[1:]]  # as Python does for a script
    runpy.run_path(script, run_name="imported")
    for node in ast.walk(ast.parse(Path(script).read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in getattr(node, "names", [])]
        for name in names:
            if isinstance(node, ast.Import | ast.ImportFrom) and name.startswith("titan_hydra"):
                importlib.import_module(name)
    for name in [name for name in sys.modules if name.startswith(("titan_hydra", "gpu_")) or name in ("run", "card")]:
        del sys.modules[name]
    print(script, "is well")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a Python that has every installed package but titan_hydra. Processes that it starts have no other."""
    folder = tmp_path_factory.mktemp("bare")
    packages = folder / "packages"
    packages.mkdir()
    for place in (Path(place) for place in sys.path if place.endswith("-packages")):
        for file in place.iterdir():
            if "titan_hydra" not in file.name and file.suffix != ".pth" and not (packages / file.name).exists():
                (packages / file.name).symlink_to(file)
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(str(packages))
    python = str(folder / "venv/bin/python")
    question = "import importlib.util as u, yaml; raise SystemExit(u.find_spec('titan_hydra') is not None)"
    subprocess.run([python, "-c", question], check=True, cwd=folder)
    return python


def environment():
    """Return an environment that adds nothing to Python's path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_every_script_imports_the_package_of_its_own_tree(bare, tmp_path):
    done = subprocess.run(
        [bare, "-c", IMPORTS, *(str(ROOT / script) for script in SCRIPTS)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("is well") == len(SCRIPTS) >= 6, done.stdout + done.stderr


def test_rows_are_measured_and_published(bare, tmp_path):
    """The whole way of a row and of a case, with every process that they start."""
    where = ["--device", "cpu", "--dry-run", "--out", str(tmp_path)]
    for script, *words in (
        ("benchmarks/gpu/run.py", "pairs", "--only", "ours"),
        ("tests/gpu/run.py", "--only", "launch.py, cluster=local", "validation"),
    ):
        done = subprocess.run(
            [bare, str(ROOT / script), *words, *where], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    _, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [row["status"] for row in rows] == ["done"] * 3
    assert len(yaml.safe_load((tmp_path / "rows.yaml").read_text())) == 3
    _, *cases = map(json.loads, (tmp_path / "tests.jsonl").read_text().splitlines())
    assert [case["status"] for case in cases] == ["passed"] * 3, cases
