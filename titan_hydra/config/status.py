"""How a run ends: the exit statuses, and the errors that carry them."""
from enum import IntEnum


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
