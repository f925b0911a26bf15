"""Import the fixtures of jobs from tests/core/train, and those of reports, which know the recipes' keys."""

from tests.core.train.conftest import run_job, tiny
from tests.experiments.report.conftest import config
from tests.experiments.report.test_changes import flat

__all__ = ["config", "flat", "run_job", "tiny"]
