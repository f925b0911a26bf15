"""A recipe is deleted by deleting its folder and the files named in its files.txt; recipes that import it are deleted
with it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra.core.job.config.additions import names_of_additions
from titan_hydra.core.job.config.registry import REGISTRIES

ROOT = Path(__file__).parents[2]
RECIPES = names_of_additions("recipes")
# Other pages link to the recipe's page, and cases of the GPU kit and of the pretended device name its model.
OTHERS = ("tests/test_docs.py", "tests/gpu", "tests/pretended_cuda")


@pytest.mark.parametrize("name", RECIPES)
def test_its_files_are_there(name):
    assert all((ROOT / file).exists() for file in files_of(name))


@pytest.mark.parametrize("name", RECIPES)
def test_the_core_names_none_of_its_parts(name):
    """The parts of a recipe are the sources, objectives and families that it registers. In the core, no string begins
    with one of their names, and no `key=` names one.
    """
    parts = [
        part
        for registry in REGISTRIES.values()
        for part, record in registry.items()
        if f"titan_hydra.recipes.{name}." in str(record)
    ]
    assert parts
    named = re.compile(rf"""["'=`]({"|".join(parts)})\b""")
    for file in (ROOT / "titan_hydra").rglob("*.py"):
        if not file.is_relative_to(ROOT / "titan_hydra/recipes"):
            assert not named.search(file.read_text()), file


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_without_a_recipe_the_quick_tests_pass(tmp_path, name):
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]
    for file in kept:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file, follow_symlinks=False)
    for file in [
        file for other in with_those_that_import(name) for file in (f"titan_hydra/recipes/{other}", *files_of(other))
    ]:
        shutil.rmtree(tmp_path / file) if (tmp_path / file).is_dir() else (tmp_path / file).unlink()
    subprocess.run(
        [sys.executable, "-m", "titan_hydra.experiments.compose.describe", "docs/configuration.md"],
        cwd=tmp_path,
        check=True,
    )
    words = ["-q", "-m", "quick", *(f"--ignore={file}" for file in OTHERS)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def with_those_that_import(name: str) -> list[str]:
    importing = f"titan_hydra.recipes.{name}"
    files = {other: (ROOT / "titan_hydra/recipes" / other).rglob("*.py") for other in RECIPES}
    return [other for other in RECIPES if other == name or any(importing in file.read_text() for file in files[other])]


def files_of(name: str) -> list[str]:
    return (ROOT / "titan_hydra/recipes" / name / "files.txt").read_text().split()
