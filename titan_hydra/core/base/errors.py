"""The exit statuses of a run, the classes of failure, the errors that carry them, and the message about a file that may
not be used.
"""

import grp
import os
import pwd
import stat
from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

# A rank prints this before the reason for its end. The launcher echoes a rank's log up to this line.
LAST_WORDS = "--- this rank ends with exit status"


class Exit(IntEnum):
    """The exit statuses of a rank, read by the launcher, SLURM scripts and `titan status`."""

    DONE = 0
    BUG = 1
    CONFIG = 2
    MISSED = 3  # of `titan report --gate`, never of a rank
    REQUEUED = 75
    OUT_OF_MEMORY = 76
    HANG = 77
    NOT_FINITE = 78
    UNHEALTHY = 79


class Kind(StrEnum):
    """The classes of failure that `titan status` and reports print."""

    CONFIG = "config"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    NOT_FINITE = "not finite"
    NODE = "node"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted too often"
    DISK = "disk full"
    BUG = "bug"
    KILLED = "killed"
    UNKNOWN = "unknown"


KIND_OF: dict[int, Kind] = {  # the class of each exit status that a rank chooses itself; any other status means a bug
    Exit.CONFIG: Kind.CONFIG,
    Exit.OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Exit.HANG: Kind.HANG,
    Exit.NOT_FINITE: Kind.NOT_FINITE,
    Exit.UNHEALTHY: Kind.NODE,
}


class RunError(Exception):
    """Ends a run for a known reason, printed as one line without a traceback. Subclasses set the exit status."""

    status = Exit.BUG
    facts: dict[str, Any]  # step, phase and other facts, which are added to the rank's record


class ConfigError(RunError):
    """The job cannot run as configured: bad value, missing file."""

    status = Exit.CONFIG


class Stopped(RunError):
    """The run was asked to stop (Ctrl-C, preemption). Its state is saved, and it can be resumed."""

    status = Exit.REQUEUED


class NotFinite(RunError):
    """Loss or gradient norm is NaN or infinite. Raised on every rank, before the optimizer step."""

    status = Exit.NOT_FINITE


class CheckpointError(RunError):
    """A checkpoint could not be written or read. Earlier complete checkpoints are intact."""


class Unhealthy(RunError):
    """A node is not fit for training: a device is in use, computes wrong results, or does not respond. The message
    names the host.
    """

    status = Exit.UNHEALTHY


def denied(error: PermissionError, key: str = "", folder: Path = Path()) -> str:
    """Return a message that names the file or folder that this user may not use, its owner and its mode. If the file
    lies in `folder`, the message begins with `key` and its value.
    """
    path = Path(error.filename or ".").absolute()
    where = f"{key}={folder}: " if key and path.is_relative_to(folder.absolute()) else ""
    for path_part in (path, *path.parents):
        try:
            status = path_part.stat()
        except OSError:  # this path is missing, or is below a folder that the user may not open
            continue
        owner, group = _name(pwd.getpwuid, status.st_uid), _name(grp.getgrgid, status.st_gid)
        return (
            f"{where}{path}: {error.strerror}: {path_part} belongs to {owner}:{group}, {stat.filemode(status.st_mode)}"
        )
    return f"{where}{path}: {error.strerror}"


def _name(known: Callable[[int], Any], number: int) -> str:
    try:
        return known(number)[0]
    except KeyError:
        return str(number)


def require_folder() -> None:
    """Raise ConfigError if the current folder was deleted, as relative paths would mean nothing."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted; change to one that exists") from None
