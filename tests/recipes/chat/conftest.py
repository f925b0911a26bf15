"""Import the fixtures of data (tests/data), as conversations are data."""

from tests.data.conftest import job

__all__ = ["job"]
