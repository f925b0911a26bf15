"""An instrument or a recipe is deleted by deleting its folder and what its files.txt names: files, and sections of pages
(docs/PAGE.md#heading); those that import it are deleted with it. Without all of them, core and experiments train as before.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra.core.job.config.additions import WINGS, names_of_additions
from titan_hydra.core.job.config.registry import REGISTRIES

ROOT = Path(__file__).parents[1]
PARTS = [f"{wing}/{name}" for wing in WINGS for name in names_of_additions(wing)]
# Other pages link to a part's page, and cases of the GPU kit and of the pretended device name its model.
DROPPED = {ord(sign): None for sign in "(),:."}  # signs that an anchor leaves out
OTHERS = ("tests/test_docs.py", "tests/gpu", "tests/pretended_cuda")


@pytest.mark.parametrize("part", PARTS)
def test_its_files_are_there(part):
    assert all((ROOT / file).exists() for file in files_of(part))
    for page, anchor in sections_of(part):
        assert anchor in sections((ROOT / page).read_text())


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("recipes/")])
def test_a_recipe_has_a_page_or_a_section_of_one(part):
    assert any(file.startswith("docs/") and file.endswith(".md") for file in files_of(part)) or sections_of(part)


def test_no_section_of_a_page_that_recipes_share_stays_behind():
    shared = {page for part in PARTS for page, _ in sections_of(part)}
    owned = [place for part in PARTS for place in sections_of(part)]
    left = [(page, anchor) for page in shared for anchor in sections((ROOT / page).read_text())]
    assert sorted(set(left) - set(owned)) == [("docs/fine-tuning.md", "adapters-lora")]  # of core
    assert len(owned) == len(set(owned))


@pytest.mark.parametrize("part", PARTS)
def test_nothing_else_names_its_records(part):
    """A part of the package registers sources, objectives, families or searches. Outside its wing, no string begins with
    one of their names, and no `key=` names one, except in layout.py, which has the name of every file.
    """
    wing, _, name = part.partition("/")
    records = [
        record
        for registry in REGISTRIES.values()
        for record, entry in registry.items()
        if f"titan_hydra.{wing}.{name}." in str(entry)
    ]
    assert records or wing == "instruments"
    named = re.compile(rf"""["'=`]({"|".join(records)})\b""")
    for file in (ROOT / "titan_hydra").rglob("*.py") if records else ():
        if not file.is_relative_to(ROOT / "titan_hydra" / wing) and file.name != "layout.py":
            assert not named.search(file.read_text()), file


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_without_one_of_them_the_quick_tests_pass(tmp_path, part):
    copy_without(tmp_path, with_those_that_import(part))
    assert_quick_tests_pass(tmp_path, *(f"--ignore={file}" for file in OTHERS))


@pytest.mark.slow
def test_without_all_of_them_core_and_experiments_pass_and_train_as_before(tmp_path):
    copy_without(tmp_path, PARTS)
    for wing in WINGS:
        shutil.rmtree(tmp_path / "titan_hydra" / wing)
    assert losses_of(tmp_path, tmp_path / "runs") == losses_of(ROOT, tmp_path / "whole")
    assert_quick_tests_pass(tmp_path, "tests/test_walls.py", "tests/core", "tests/experiments")


def copy_without(target: Path, parts: list[str]) -> None:
    """Copy what git knows of the checkout, without these parts and the files that they own."""
    gone = [ROOT / file for part in parts for file in (f"titan_hydra/{part}", *files_of(part))]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in listed.splitlines():
        if not any((ROOT / file).is_relative_to(place) for place in gone):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target / file, follow_symlinks=False)
    for page, anchor in (place for part in parts for place in sections_of(part)):
        text = (target / page).read_text()
        (target / page).write_text(text.replace(sections(text)[anchor], ""))
    tests = [file for part in parts for file in files_of(part) if file.startswith("tests/")]
    delete_tests_that_import([file.removesuffix(".py").replace("/", ".") for file in tests], target)
    delete_tests_that_import([f"titan_hydra.{part.replace('/', '.')}" for part in parts], target)
    describe = [sys.executable, "-m", "titan_hydra.experiments.compose.describe", "docs/configuration.md"]
    subprocess.run(describe, cwd=target, check=True)


def delete_tests_that_import(modules: list[str], target: Path) -> None:
    """Delete the tests that import one of the modules, then those that import a deleted test: recipes prove their layouts
    with cases of instruments/verify, and share jobs.
    """
    while modules:
        named = re.compile(rf"^(from|import) ({'|'.join(map(re.escape, modules))})\b", re.M)
        gone = [file for file in (target / "tests").rglob("*.py") if named.search(file.read_text())]
        modules = [".".join(file.relative_to(target).with_suffix("").parts) for file in gone]
        for file in gone:
            file.unlink()


def assert_quick_tests_pass(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "quick", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def losses_of(folder: Path, runs: Path) -> list[tuple[float, float]]:
    """Run the README's default for two steps, and return the loss and the norm of each step."""
    words = ["debug=tiny", "steps=2", "cluster=inline", "metrics.log_every=1", f"paths.runs={runs}"]
    subprocess.run([sys.executable, "launch.py", *words], cwd=folder, check=True, capture_output=True)
    (file,) = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def with_those_that_import(part: str) -> list[str]:
    importing = f"titan_hydra.{part.replace('/', '.')}"
    files = {other: (ROOT / "titan_hydra" / other).rglob("*.py") for other in PARTS}
    # cases and float64 references of recipes import verify, which alone imports them
    proofs = ("cases.py", "exact.py")
    return [
        other
        for other in PARTS
        if other == part or any(importing in file.read_text() for file in files[other] if file.name not in proofs)
    ]


def files_of(part: str) -> list[str]:
    return [file for file in _owned(part) if "#" not in file]


def sections_of(part: str) -> list[tuple[str, str]]:
    """Return the sections of pages that a part owns, each as page and anchor."""
    return [(page, anchor) for page, _, anchor in (file.partition("#") for file in _owned(part)) if anchor]


def sections(page: str) -> dict[str, str]:
    """Return the sections of a page's second level, each by its anchor."""
    parts = re.split(r"^(?=## )", page, flags=re.M)[1:]
    return {
        part.splitlines()[0].removeprefix("## ").lower().replace(" ", "-").translate(DROPPED): part for part in parts
    }


def _owned(part: str) -> list[str]:
    return (ROOT / "titan_hydra" / part / "files.txt").read_text().split()
