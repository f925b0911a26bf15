"""Put conf/, which stands at the top of the repository with its sweeps/, into the package of a wheel. All else is in
pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithOptions(build_py):
    """Copies conf/ beside the modules; titan_hydra.core.job.config.files.CONF is there in an installed package. A checkout uses
    its own.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("conf", str(Path(self.build_lib, "titan_hydra", "conf")))


setup(cmdclass={"build_py": BuildWithOptions})
