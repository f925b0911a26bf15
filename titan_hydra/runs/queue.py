"""Ask the executors about the attempts that they have started: one question to each for all runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.registry import EXECUTORS, executor_named
from titan_hydra.config.user_code import require_user_modules

from . import layout
from .run import newest_attempt

Owner = dict[str, Any]  # an attempt's attempt.json


@dataclass(frozen=True)
class QueuedJob:
    """A job as its executor's queue lists it: its state and why it waits, in the queue's own words; `start`, in ISO
    8601, is when it started or is expected to.
    """

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""

    @property
    def why(self) -> str:
        """Why it waits; "" if the queue gives no reason."""
        return self.reason if self.reason != "None" else ""


@dataclass
class Queue:
    """An executor's jobs at one moment. `answers` is False if it could not be asked: then nothing is known about any
    job. An executor without a queue has none.
    """

    jobs: dict[str, Any] = field(default_factory=dict)  # QueuedJobs by id
    answers: bool = True


def executor_of(directory: Path, owner: Owner) -> Any:
    """Return the executor that has started an attempt of a run, by its attempt.json. One of the user's own is there
    once the run's modules are imported. Raises ConfigError if it is not.
    """
    if (name := name_of(owner)) not in EXECUTORS:
        require_user_modules(layout.CONFIG.read(directory).get("train", {}).get("imports", []))
    return executor_named(name)


def name_of(owner: Owner) -> str:
    """Return the name of an attempt's executor; without a record its ranks can only be processes of this machine."""
    return owner.get("executor", "local")


def is_here(owner: Owner) -> bool:
    """Whether the ranks of an attempt are processes, whose ids say whether they run."""
    executor = EXECUTORS.get(name_of(owner))
    return executor is None or executor.here


def ask(directories: list[Path]) -> dict[str, Queue]:
    """Return what the executors know of the newest attempts of these runs, by their names: one question to each."""
    asked: dict[str, tuple[Any, list[tuple[Path, Owner]]]] = {}
    for directory in directories:
        with contextlib.suppress(PermissionError, ConfigError):  # `inspect` reports such a run
            owner = layout.CLAIM.read(layout.ATTEMPT.of(directory, newest_attempt(directory)))
            if owner and not layout.RESULT.of(directory).exists():
                executor = executor_of(directory, owner)
                asked.setdefault(name_of(owner), (executor, []))[1].append((directory, owner))
    return {name: executor.ask(runs) for name, (executor, runs) in asked.items()}


def silent(queues: dict[str, Queue]) -> list[str]:
    """Return the names of the executors that have not answered."""
    return [name for name, queue in queues.items() if not queue.answers]
