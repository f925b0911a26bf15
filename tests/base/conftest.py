"""Threads are those of the small jobs of tests/train."""

from tests.train.conftest import tiny

__all__ = ["tiny"]
