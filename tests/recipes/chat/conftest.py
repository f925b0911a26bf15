"""Conversations are data as the others of tests/data."""

from tests.data.conftest import job

__all__ = ["job"]
