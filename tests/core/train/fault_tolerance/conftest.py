"""Import the fixtures of small jobs (tests/core/train) and of launch.py (tests/experiments/launch), which start the replica groups."""

from tests.core.train.conftest import run_job, tiny
from tests.experiments.launch.conftest import launcher

__all__ = ["launcher", "run_job", "tiny"]
