"""Import the fixtures of data (tests/core/data), as conversations are data."""

from tests.core.data.conftest import job

__all__ = ["job"]
