"""Import the fixture of small jobs from tests/core/train. The tests here test the threads of these jobs."""

from tests.core.train.conftest import tiny

__all__ = ["tiny"]
