"""Commands read runs that launch.py leaves, started as in tests/launch."""

from tests.launch.conftest import launcher, launcher_of_module

__all__ = ["launcher", "launcher_of_module"]
