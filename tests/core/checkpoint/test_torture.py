"""Run cases of torture.py: one of each kind by default, all of them with -m slow. torture.py runs as a separate
program, as its ranks are forked from it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FEW = ("19", "53")  # killed before the rename; a flipped bit in a shard


@pytest.mark.parametrize("cases", [FEW, pytest.param((), marks=pytest.mark.slow)], ids=["a few", "all"])
def test_killed_runs_go_on_as_if_nothing_had_been(cases):
    program = Path(__file__).with_name("torture.py")
    done = subprocess.run([sys.executable, str(program), *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
