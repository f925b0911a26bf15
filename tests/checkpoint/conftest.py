"""Import from tests/train the fixtures of the small jobs that write the checkpoints."""

from tests.train.conftest import run_job, tiny

__all__ = ["run_job", "tiny"]
