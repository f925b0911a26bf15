"""What is observed are small jobs, as those of tests/train, and launch.py as tests/launch starts it."""

from tests.launch.conftest import launcher
from tests.train.conftest import run_job, tiny

__all__ = ["launcher", "run_job", "tiny"]
