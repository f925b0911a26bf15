"""Import from tests/core/train the fixtures of the small jobs that write the checkpoints."""

from tests.core.train.conftest import run_job, tiny

__all__ = ["run_job", "tiny"]
