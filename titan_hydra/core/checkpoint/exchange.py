"""Replace a folder of weights by a new one. A reader sees either the old folder or the new one, never a mixture."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run.base import complete_at, is_hf

HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and put it in the place of `target` if the block ends without an error. Raises
    ConfigError if `target` holds something else than exported or imported weights.
    """
    target = target.absolute()
    there = target.is_dir() and any(target.iterdir())
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--replace: {target} is no folder")
    if there and not (is_hf(target) or complete_at(target) == target):
        raise ConfigError(f"--replace: {target} holds no weights of titan checkpoint, so it is not replaced")
    new = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        yield new
        if there:
            _exchange(new, target)
        else:
            new.rename(target)  # an empty folder is replaced too
    finally:
        shutil.rmtree(new, ignore_errors=True)  # after the exchange, this is the old folder


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders, at once where the file system can do that."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(HERE, os.fsencode(new), HERE, os.fsencode(old), EXCHANGE) == 0:
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(old))
    aside = old.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
