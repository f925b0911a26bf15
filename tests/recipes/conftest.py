"""Import the fixtures of jobs from tests/train, and those of reports, which know the recipes' keys."""

from tests.report.conftest import config
from tests.report.test_changes import flat
from tests.train.conftest import run_job, tiny

__all__ = ["config", "flat", "run_job", "tiny"]
