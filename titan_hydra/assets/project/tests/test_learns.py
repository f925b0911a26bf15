"""The model of this project trains with this project's launch.py."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_model_learns(tmp_path):
    line = [
        sys.executable,
        str(ROOT / "launch.py"),
        "debug=tiny",
        "model=parallel_llama",
        "steps=20",
        f"paths.runs={tmp_path}",
    ]
    subprocess.run(line, cwd=ROOT, check=True)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    losses = [row["loss"] for row in map(json.loads, metrics.read_text().splitlines())]
    assert len(losses) == 20 and losses[-1] < losses[0]
