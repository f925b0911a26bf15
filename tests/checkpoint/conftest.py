"""Import the fixtures of small jobs from tests/train, which write the checkpoints."""

from tests.train.conftest import run_job, tiny

__all__ = ["run_job", "tiny"]
