"""Run all cases of gpu_cases.py in one run of run.py; skip them if there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from gpu_cases import CASES

HERE = Path(__file__).parent
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def rows(card, tmp_path_factory):
    """Return the row of every case, by its name and number of ranks."""
    out = tmp_path_factory.mktemp("gpu")
    subprocess.run([sys.executable, str(HERE / "run.py"), "--seconds", "1200", "--out", str(out)], env=card)
    _, *lines = (out / "tests.jsonl").read_text().splitlines()
    return {(row["name"], row["ranks"]): row for row in map(json.loads, lines)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.ranks} ranks")
def test_on_one_gpu(case, rows):
    row = rows[case.name, case.ranks]
    assert row["status"] == "passed", f"{row['status']}: {row['error']}"
