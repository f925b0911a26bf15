"""Conversations are data as the others of tests/train/data."""

from tests.train.data.conftest import job

__all__ = ["job"]
