"""Import the fixture of small jobs from tests/train, whose threads are tested here."""

from tests.train.conftest import tiny

__all__ = ["tiny"]
