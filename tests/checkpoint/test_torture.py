"""Run cases of torture.py: by default one of each kind, with -m slow all of them. torture.py runs as a program, as its ranks
are forked from it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FEW = ("19", "53")  # killed before the rename; a bit of a shard flipped


@pytest.mark.parametrize("cases", [FEW, pytest.param((), marks=pytest.mark.slow)], ids=["a few", "all"])
def test_killed_runs_go_on_as_if_nothing_had_been(cases):
    program = Path(__file__).with_name("torture.py")
    done = subprocess.run([sys.executable, str(program), *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
