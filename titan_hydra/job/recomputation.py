"""What activation checkpointing computes again in the backward."""

from titan_hydra.config.registry import ACTIVATION_CHECKPOINTS, ActivationCheckpointKind
from titan_hydra.config.schema import Job


def mode_of(job: Job) -> ActivationCheckpointKind:
    """Return the record of a job's mode of activation checkpointing."""
    return ACTIVATION_CHECKPOINTS[job.ac.name]


def recomputed_share(job: Job) -> float:
    """Return the share of the blocks that the backward recomputes as a whole. With a compiler's memory budget, return the
    share of the activation memory that is not kept.
    """
    mode = mode_of(job)
    if mode.budget:
        return 1 - mode.budget(job.ac)
    every = 0 if mode.contexts else mode.every(job.ac)
    return 1 / every if every else 0.0


def searched_modes() -> list[str]:
    """Return the names of the modes that `titan plan` tries, from the least recomputation on."""
    return [mode.name for mode in ACTIVATION_CHECKPOINTS.values() if mode.searched]


def modes_that_keep_less(name: str) -> list[str]:
    """Return the modes that keep less than the mode `name`, beginning with the mode that keeps most."""
    modes = searched_modes()
    return modes[modes.index(name) + 1 :] if name in modes else modes[-1:]
