"""The walls of the house: which package may import which, and where torch may not be imported at all."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "titan_hydra"
GROUND = {"base", "config"}
ALLOWED = {  # the rooms, and what each may import beside itself, wherever in a file
    "base": set(),
    "config": {"base"},
    "models": GROUND,
    "runs": GROUND,
    "parallel": GROUND,
    "data": GROUND,
    "observe": GROUND | {"parallel"},
    "checkpoint": GROUND | {"models", "runs", "parallel", "data"},
    "train": GROUND | {"models", "parallel", "data", "observe", "checkpoint"},
    "fault_tolerance": GROUND | {"parallel", "data", "observe", "checkpoint", "train"},
    "verify": GROUND | {"models", "parallel", "data", "train"},
    "launch": GROUND | {"runs", "train", "fault_tolerance", "verify"},  # but runs inside the worker's rank function alone: NO_TORCH
    "report": GROUND | {"runs"},
    "commands": GROUND | {"runs", "launch", "report", "data", "observe", "checkpoint", "train", "verify"},
}
NO_TORCH = ("base", "config", "runs", "launch", "report", "commands", "verify/matrix.py", "cli.py")


def imported_rooms(file: Path) -> set[str]:
    """The titan_hydra subpackages that a file imports, wherever in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("titan_hydra.")}
    return {room for room in rooms if (PACKAGE / room).is_dir()}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room):
    for file in (PACKAGE / room).rglob("*.py"):
        assert imported_rooms(file) <= ALLOWED[room] | {room}, file


def test_the_package_consists_of_these_rooms():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ALLOWED)


def test_login_node_modules_import_no_torch():
    files = [file for place in NO_TORCH for file in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"))]
    modules = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    heavy = ("torch", "datasets", "wandb", "tiktoken", "matplotlib")
    code = f"""import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert not (found := [name for name in {heavy} if name in sys.modules]), (module, found)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_short():
    for file in [*PACKAGE.rglob("*.py"), PACKAGE.parent / "launch.py"]:
        assert len(file.read_text().splitlines()) <= 400, file
