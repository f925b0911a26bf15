"""What a newcomer must walk through: the functions that a command enters, and the files that they stand in.

A number may fall. It rises only in a commit that changes nothing else and gives the reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {"train": (727, 132), "dry": (275, 64), "report": (192, 34)}
COUNTER = """
import atexit, json, runpy, sys, threading
package, out, program, *sys.argv[1:] = sys.argv[1:]
seen = set()
def enter(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
        seen.add((code.co_filename, code.co_firstlineno))
def write():
    sys.setprofile(None)
    with open(out, "w") as file:
        json.dump([len(seen), len({name for name, _ in seen})], file)
atexit.register(write)
threading.setprofile(enter)
sys.setprofile(enter)
sys.argv[0] = program
(runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
"""


def entered(folder: Path, *line: str) -> tuple[int, int]:
    """Run a command line in a new process, and return how many functions of the package it entered, in how many files."""
    out = folder / "entered.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    subprocess.run(
        [sys.executable, "-c", COUNTER, f"{ROOT}/titan_hydra/", out, *line],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    return tuple(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Return the counts of each journey: a run of two steps, a dry run, and the report of the run."""
    folder = tmp_path_factory.mktemp("journeys")
    line = ("launch.py", "debug=tiny", f"paths.runs={folder}/runs")
    return {
        "train": entered(folder, *line, "cluster=inline", "steps=2"),
        "dry": entered(folder, *line, "launch.mode=dry"),
        "report": entered(folder, "titan_hydra.cli", "report", "--runs", f"{folder}/runs"),
    }


@pytest.mark.parametrize("journey", MOST)
def test_a_journey_is_no_longer_than_it_was(walked, journey):
    functions, files = walked[journey]
    assert functions <= MOST[journey][0] and files <= MOST[journey][1], (functions, files)
