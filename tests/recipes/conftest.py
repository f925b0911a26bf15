"""Recipes train as all jobs of tests/train do, and the report knows their keys."""

from tests.report.conftest import config
from tests.report.test_changes import flat
from tests.train.conftest import run_job, tiny

__all__ = ["config", "flat", "run_job", "tiny"]
