"""titan_hydra.extend is the one door for a user's files: all of its names exist, the docs list them, and the docs and a
new project import nothing else of the package.
"""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from titan_hydra import extend

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_hydra"
DOORS = {"titan_hydra", "titan_hydra.extend", "titan_hydra.cli"}  # the last is `titan`, for python -m
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if "```python" in page.read_text()]
PROJECT = sorted((PACKAGE / "assets/project").rglob("*.py"))


def used(code: str) -> set[str]:
    """Return what source code imports from this package, as module:name, and what it names in strings of that form."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {f"{alias.name}:" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if re.fullmatch(r"titan_hydra(\.\w+)+(:\w+)?", node.value) else set()
    return {name for name in found if re.match(r"titan_hydra\b", name)}


def wrong(code: str) -> set[str]:
    """Return what source code uses of this package that does not come through a door, or does not exist there."""
    parts = {name: name.partition(":") for name in used(code)}
    return {
        name
        for name, (module, _, member) in parts.items()
        if module not in DOORS or (module == "titan_hydra.extend" and member and not hasattr(extend, member))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_the_docs_uses_the_door_alone(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    assert blocks and set().union(*map(wrong, blocks)) == set()


@pytest.mark.parametrize("file", PROJECT, ids=lambda file: str(file.relative_to(PACKAGE / "assets")))
def test_a_new_project_uses_the_door_alone(file):
    assert wrong(file.read_text()) == set()


@pytest.mark.parametrize(
    "code",
    [
        "from titan_hydra.core.models import key",
        "import titan_hydra.core",
        "def f():\n    from titan_hydra.extend import kee",
        "x = 'titan_hydra.core.models.llama3.sharding:plan'",
        "x = 'titan_hydra.core.train.worker'",
    ],
)
def test_what_comes_another_way_is_found(code):
    assert wrong(code) and not wrong("from titan_hydra.extend import key\nx = 'titan_hydra.extend:llama3_plan'")


def test_the_names_for_type_checkers_are_those_that_are_imported():
    block = next(node for node in ast.parse(Path(extend.__file__).read_text()).body if isinstance(node, ast.If))
    typed = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {
        entry.partition(":")[2] or entry: (f"titan_hydra.{module}", entry.partition(":")[0])
        for module, entries in extend.PLACES.items()
        for entry in entries.split()
    }
    assert typed == lazy
    assert sorted(extend.__all__) == sorted(lazy)


def test_each_name_exists_and_stands_once_on_its_page():
    for name in extend.__all__:
        assert not isinstance(getattr(extend, name), ModuleType), name  # found only if something has imported it
    section = (ROOT / "docs/extend.md").read_text().partition("## The names of titan_hydra.extend")[2]
    listed = re.findall(r"`(\w+)`", section.partition("|---|---|")[2])
    assert sorted(listed) == sorted(extend.__all__)
    with pytest.raises(AttributeError):
        _ = extend.Decodr


def test_importing_the_doors_imports_nothing_heavy():
    code = "import sys, titan_hydra.extend; print(*sorted({'torch', 'hydra', 'numpy', 'yaml'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_package_itself_does_not_use_the_door():
    for file in [*(PACKAGE / "core").rglob("*.py"), *(PACKAGE / "experiments").rglob("*.py")]:
        assert "titan_hydra.extend" not in file.read_text(), file
