"""Import the fixtures of small jobs (tests/train) and of launch.py (tests/launch), which these tests observe."""

from tests.launch.conftest import launcher
from tests.train.conftest import run_job, tiny

__all__ = ["launcher", "run_job", "tiny"]
