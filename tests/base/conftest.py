"""Import the fixture of small jobs from tests/train. The tests here test the threads of these jobs."""

from tests.train.conftest import tiny

__all__ = ["tiny"]
