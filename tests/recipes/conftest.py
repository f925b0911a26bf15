"""Recipes train as all jobs of tests/train do."""

from tests.train.conftest import run_job, tiny

__all__ = ["run_job", "tiny"]
