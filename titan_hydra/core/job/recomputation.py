"""What activation checkpointing computes again in the backward, and the values that it must keep, as a recomputation
could give another value. Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from titan_hydra.core.job.config.registry import ACTIVATION_CHECKPOINTS, ActivationCheckpointKind
from titan_hydra.core.job.config.schema import Job

ATTENTION = ("aten._scaled_dot_product", "titan_hydra.attend_documents")  # how the names of attention's operators begin
EXCHANGE = "_c10d_functional.all_to_all_single"  # sends rows to experts
_kept: ContextVar[Callable[[Callable[[], Any]], Any]] = ContextVar("kept", default=lambda compute: compute())


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


def saves(job: Job, *operators: str) -> bool:
    """Whether selective activation checkpointing saves the results of operators whose names begin with one of
    `operators`. The modes' own lists (core/parallel/activation_checkpoint.py) have all operators that predictions ask for.
    """
    chosen: list[str] = getattr(job.ac, "save_ops", [])
    return not chosen or any(name.startswith(operators) for name in chosen)


def searched_modes() -> list[str]:
    """Return the names of the modes that `titan plan` tries, from the least recomputation on."""
    return [mode.name for mode in ACTIVATION_CHECKPOINTS.values() if mode.searched]


def modes_that_keep_less(name: str) -> list[str]:
    """Return the modes that keep less than the mode `name`, beginning with the mode that keeps most."""
    modes = searched_modes()
    return modes[modes.index(name) + 1 :] if name in modes else modes[-1:]


def keep(compute: Callable[..., Any], *args: Any) -> Any:
    """Return compute(*args). When activation checkpointing recomputes a forward, return the value that the forward has
    computed.
    """
    return _kept.get()(lambda: compute(*args))


def kept() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return two contexts, one for a forward and one for its recomputation. In the first, `keep` records its values; in
    the second, it returns these values in the same order.
    """
    values: list[Any] = []

    def record(compute: Callable[[], Any]) -> Any:
        values.append(compute())
        return values[-1]

    return _keeping(record), _keeping(lambda _: values.pop(0))


@contextlib.contextmanager
def _keeping(value_of: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let `keep` return value_of(compute) while the block runs, instead of compute()."""
    token = _kept.set(value_of)
    try:
        yield
    finally:
        _kept.reset(token)
