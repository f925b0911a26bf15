"""Ask the executors about the attempts that they have started. Each executor is asked once about all its runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.registry import EXECUTORS, executor_named
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import import_modules
from titan_hydra.core.job.run.run import newest_attempt

LOCAL = "local"
Owner = dict[str, Any]  # an attempt's attempt.json


@dataclass(frozen=True)
class QueuedJob:
    """A job in its executor's queue. `state` and `reason` (why the job waits) are as the queue names them; `start` is
    the time (ISO 8601) at which the job started, or is expected to start.
    """

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the job may still write into the folder of a run that is done."""
        return False

    @property
    def why(self) -> str:
        """Why the job waits; "" if the queue gives no reason."""
        return self.reason if self.reason != "None" else ""


@dataclass
class Queue:
    """An executor's jobs at one moment. `answers` is False if the executor did not answer; then nothing is known about
    any job, and `why` is the error, if there is one. For an executor without a queue, `jobs` is empty.
    """

    jobs: dict[str, Any] = field(default_factory=dict)  # QueuedJobs by id
    answers: bool = True
    why: str = ""


def executor_of(directory: Path, owner: Owner) -> Any:
    """Return the executor that has started an attempt of a run, as attempt.json names it. A user's own executor is
    registered when the run's modules (train.imports) are imported. If they may not be imported here, as after an edit,
    the executor of processes of this machine follows the ranks, if they are that. Raises ConfigError if they are not, or
    if the name is unknown even after the import.
    """
    if (name := name_of(owner)) not in EXECUTORS:
        try:
            import_modules(directory)
        except ConfigError:
            if not owner.get("here"):
                raise
            name = LOCAL
    return executor_named(name)


def owner_in(directory: Path, attempt: int) -> Owner:
    """Return an attempt's attempt.json. Return {} if it is damaged, or names an executor that neither the package nor the
    run's modules (train.imports) have: then the records of its ranks show where they run.
    """
    owner = layout.CLAIM.read(layout.ATTEMPT.of(directory, attempt))
    if name_of(owner) not in EXECUTORS:
        with contextlib.suppress(ConfigError):  # they may not be imported here: `executor_of` says why
            import_modules(directory)
            return owner if name_of(owner) in EXECUTORS else {}
    return owner


def name_of(owner: Owner) -> str:
    """Return the name of an attempt's executor. If no name is recorded, the executor is `local`, as only attempts that
    were started on this machine can lack the name.
    """
    return owner.get("executor", LOCAL)


def is_here(owner: Owner) -> bool:
    """Whether the ranks of an attempt are processes of a known host. If so, their process ids show whether they still
    run.
    """
    executor = EXECUTORS.get(name_of(owner))
    return owner.get("here", True) if executor is None else executor.here


def ask(directories: list[Path]) -> dict[str, Queue]:
    """Return, by executor, what each knows about the newest attempts of these runs. Each executor is asked once."""
    asked: dict[str, tuple[Any, list[tuple[Path, Owner]]]] = {}
    for directory in directories:
        # a run that cannot be read is left out here; `rundir.inspect` reports it
        with contextlib.suppress(PermissionError, ConfigError):
            owner = owner_in(directory, newest_attempt(directory))
            if owner and layout.RESULT.read(directory).get("status") != "done":
                asked.setdefault(name_of(owner), (executor_of(directory, owner), []))[1].append((directory, owner))
    return {name: executor.ask(runs) for name, (executor, runs) in asked.items()}


def silent(queues: dict[str, Queue]) -> dict[str, str]:
    """Return the executors that did not answer: for each its name and a line with the reason."""
    return {
        name: f"{name} does not answer{f': {queue.why}' if queue.why else ''}"
        for name, queue in queues.items()
        if not queue.answers
    }
