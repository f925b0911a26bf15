"""Test that a program can begin with any module of core/job or any recipe or instrument. The job's configuration
imports recipes and instruments, and these import core/job.
"""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "titan_hydra"
# each module is imported first in a process that has imported nothing of the package
FIRST = """
import importlib, os, sys
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def test_a_program_can_begin_with_any_module():
    paths = [path for room in ("core/job", "recipes", "instruments") for path in sorted((PACKAGE / room).iterdir())]
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in paths
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    ]
    ran = subprocess.run([sys.executable, "-c", FIRST, *names], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert len(names) > 15 and (ran.returncode, ran.stdout) == (0, ""), ran.stderr
