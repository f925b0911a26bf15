"""How a run ends: the exit statuses, the classes of failure, and the errors that carry them."""
from enum import IntEnum, StrEnum

LAST_WORDS = "--- this rank ends with exit status"  # a rank's line before it says why; from there on, its log is not echoed


class Exit(IntEnum):
    """What a rank's exit status says; launch, SLURM scripts and `titan status` all read it."""

    DONE = 0
    BUG = 1
    CONFIG = 2
    REQUEUED = 75
    OUT_OF_MEMORY = 76
    HANG = 77
    NOT_FINITE = 78
    UNHEALTHY = 79


class Kind(StrEnum):
    """The classes of failure that `titan status` and reports speak of."""

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


KIND_OF = {  # an exit status that a rank gave itself; any other is a bug
    Exit.CONFIG: Kind.CONFIG,
    Exit.OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Exit.HANG: Kind.HANG,
    Exit.NOT_FINITE: Kind.NOT_FINITE,
    Exit.UNHEALTHY: Kind.NODE,
}


class RunError(Exception):
    """Ends a run for a known reason: one line for the user, no traceback. Subclasses say with which status."""

    status = Exit.BUG


class ConfigError(RunError):
    """The job asks for something that cannot be: bad value, missing file."""

    status = Exit.CONFIG


class Stopped(RunError):
    """Asked to stop (Ctrl-C, preemption); the state is saved and the run can go on later."""

    status = Exit.REQUEUED


class NotFinite(RunError):
    """Loss or gradient norm is NaN or infinite; raised on every rank, before the optimizer step."""

    status = Exit.NOT_FINITE


class CheckpointError(RunError):
    """A checkpoint could not be written or read; earlier complete ones are intact."""


class Unhealthy(RunError):
    """A node is not fit to train on: a device is taken, counts wrongly, or does not answer. The message names the host."""

    status = Exit.UNHEALTHY
