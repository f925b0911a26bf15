"""Copy the code of a command line when its first cell starts, so that later edits do not change the cells that wait."""

import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.user_code import digest_of_code
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import code_here, code_in, describe_code


def take(runs: Path, user: dict[str, Path]) -> Path:
    """Copy the code of this package and of the user (`user_code.sources`) to the folder `<runs>/_code/<hash>`, unless
    the copy exists, and describe it in `<hash>.json` beside it. Return the folder.

    A copy that was changed, or that lost files in a purge of old files, is replaced. Raises ConfigError if there is no copy
    and none can be written; OSError on a full disk.
    """
    code, state = code_here(user), describe_code()
    final = layout.CODE.of(runs) / digest_of_code(code)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if layout.CODE_STATE.read(final.parent, final.name) != state:  # another commit may have the same package
            layout.CODE_STATE.write(final.parent, state, final.name)
        return final if intact(final) else _copy(code, final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{final.parent}, which holds the code that runs import, cannot be written ({error.strerror})"
        raise bad_value("paths.runs", str(runs), reason) from error


def _copy(code: dict[str, Path], final: Path) -> Path:
    """Copy files to a folder that is complete or absent."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=final.parent, ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / "code"
        for name, file in code.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy / name, follow_symlinks=False)
        if not intact(final):  # checked a second time, as another process may have replaced the copy meanwhile
            with contextlib.suppress(FileNotFoundError):
                final.rename(Path(scratch) / "damaged")
        try:
            copy.rename(final)
        except OSError:  # another process has just taken the same snapshot
            if not final.is_dir():
                raise
    return final


def intact(copy: Path) -> bool:
    """Whether a copy of the code exists, and the hash of its files is still equal to its name."""
    return copy.is_dir() and digest_of_code(code_in(copy)) == copy.name
