"""The versions of the packages on which a run depends."""

import contextlib
import functools
import platform
from importlib import metadata

from titan_hydra import __version__


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect results or speed. Do not change the result, as it is
    cached.
    """
    found = {"python": platform.python_version(), "titan_hydra": __version__}
    for package in ("torch", "torchao", "triton", "numpy", "tiktoken", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
