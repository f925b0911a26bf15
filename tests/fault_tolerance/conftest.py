"""Replica groups are small jobs, as those of tests/train, and start from launch.py, as in tests/launch."""

from tests.launch.conftest import launcher
from tests.train.conftest import run_job, tiny

__all__ = ["launcher", "run_job", "tiny"]
