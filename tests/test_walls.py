"""The walls of the house: which package may import which, and where torch may not be imported at all."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "titan_hydra"
ALLOWED = {
    "config": {"config"},
    "launch": {"launch", "config", "train"},  # train only inside the worker's rank function: see NO_TORCH
    "report": {"report", "launch", "config"},  # launch only for the state of a run
    "models": {"models", "config"},
    "parallel": {"parallel", "config"},
    "train": {"train", "parallel", "models", "config"},
}
NO_TORCH = ["titan_hydra.config", "titan_hydra.config.checks", "titan_hydra.launch.dispatch", "titan_hydra.launch.worker",
            "titan_hydra.launch.checkpoints", "titan_hydra.launch.flight_cli", "titan_hydra.launch.extend_cli",
            "titan_hydra.launch.track_cli", "titan_hydra.cli", "titan_hydra.train.acceptance",
            "titan_hydra.train.verify_cli", "titan_hydra.report.cli", "titan_hydra.report.part"]


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
        assert imported_rooms(file) <= ALLOWED[room], file


def test_nothing_but_the_command_line_and_the_report_imports_launch():
    for file in PACKAGE.rglob("*.py"):
        if not {"launch", "report", "cli.py"} & set(file.relative_to(PACKAGE).parts):
            assert "launch" not in imported_rooms(file), file


@pytest.mark.parametrize("module", NO_TORCH)
def test_login_node_modules_import_no_torch(module):
    heavy = ("torch", "datasets", "wandb", "tiktoken", "matplotlib")
    code = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_files_stay_short():
    for file in [*PACKAGE.rglob("*.py"), PACKAGE.parent / "launch.py"]:
        assert len(file.read_text().splitlines()) <= 400, file
