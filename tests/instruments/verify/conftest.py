"""Import the fixtures of launch.py (tests/experiments/launch), which start the runs that the commands read."""

from tests.experiments.launch.conftest import launcher, launcher_of_module

__all__ = ["launcher", "launcher_of_module"]
