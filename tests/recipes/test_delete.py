"""A recipe is deleted by deleting its folder and the files that its files.txt names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra import recipes

ROOT = Path(__file__).parents[2]
# Other pages link to the recipe's, and cases of the kit and of the pretended device name its model.
OTHERS = ("tests/test_docs.py", "tests/gpu", "tests/pretended_cuda")


@pytest.mark.parametrize("name", recipes.NAMES)
def test_its_files_are_there(name):
    assert all((ROOT / file).exists() for file in files_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.NAMES)
def test_without_a_recipe_the_quick_tests_pass(tmp_path, name):
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    for file in kept:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file, follow_symlinks=False)
    for file in (f"titan_hydra/recipes/{name}", *files_of(name)):
        shutil.rmtree(tmp_path / file) if (tmp_path / file).is_dir() else (tmp_path / file).unlink()
    subprocess.run([sys.executable, "-m", "titan_hydra.config.describe", "docs/configuration.md"], cwd=tmp_path, check=True)
    words = ["-q", "-m", "quick", *(f"--ignore={file}" for file in OTHERS)]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def files_of(name: str) -> list[str]:
    return (ROOT / "titan_hydra/recipes" / name / "files.txt").read_text().split()
