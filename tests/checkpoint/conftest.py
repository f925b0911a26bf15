"""Checkpoints are written by small jobs, as those of tests/train."""

from tests.train.conftest import run_job, tiny

__all__ = ["run_job", "tiny"]
