"""Import the fixtures of small jobs (tests/train) and of launch.py (tests/launch), which start the replica groups."""

from tests.launch.conftest import launcher
from tests.train.conftest import run_job, tiny

__all__ = ["launcher", "run_job", "tiny"]
