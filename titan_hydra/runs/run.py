"""The place of one rank in a run: what the worker passes to the trainer beside the job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import layout


@dataclass(frozen=True)
class Run:
    """One rank of one attempt. `directory` is the run's, `attempt` the folder attempts/<n> in it, both absolute.

    A replica group (`fault_tolerance`) is a world of its own: its ranks are counted within it, and its files are in its
    own folders (`folders_of`).
    """

    directory: Path
    attempt: Path
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: Any = None  # torch.distributed.Store that all ranks of the world share; for init_process_group
    replica: int = 0
    # token of the submission: then each replica group is a job, whose attempts are in its own folder
    submission: str = ""

    @property
    def home(self) -> Path:
        """The directory of the whole run, the same for every replica group."""
        return self.directory.parents[1] if self.replica else self.directory

    @property
    def meetings(self) -> Path:
        """The folder that the replica groups of this attempt, or of this submission, use for rendezvous."""
        return layout.MEETINGS.of(self.home) / self.submission if self.submission else layout.MEETINGS.of(self._attempt)

    def record_of(self, rank: int) -> Path:
        """Return the path of a rank's record. The file name counts ranks as the launcher does: over all groups that it
        has started.
        """
        return layout.RANK.of(self._attempt, rank + (0 if self.submission else self.replica * self.world_size))

    @property
    def newer_attempt(self) -> int | None:
        """The number of a later attempt at this run; None if this attempt is the newest.

        A later attempt owns the run: this one must no longer write to it.
        """
        mine, newest = self._attempt.name, newest_attempt(self.directory if self.submission else self.home)
        return newest if mine.isdecimal() and newest > int(mine) else None

    @property
    def _attempt(self) -> Path:
        return self.attempt.parents[1] if self.replica and not self.submission else self.attempt


def newest_attempt(directory: Path) -> int:
    """Return the number of the newest attempt; 0 if there is none."""
    return max(layout.ATTEMPT.all(directory), default=0)


def homes_of(directory: Path, replicas: int) -> list[Path]:
    """Return the run folders of the replica groups: the run's own for the first, folders below it for the others."""
    return [folders_of(replica, directory, directory)[0] for replica in range(replicas)]


def group_at(home: Path) -> tuple[Path, int]:
    """Return the directory of the whole run, and the replica group whose run folder this is."""
    replicas = layout.REPLICA.of(home.parents[1], int(home.name)) if home.name.isdecimal() else None
    return (home.parents[1], int(home.name)) if home == replicas else (home, 0)


def folders_of(replica: int, directory: Path, attempt: Path) -> tuple[Path, Path]:
    """Return the run folder and attempt folder of a replica group: the run's own for group 0, folders below them for
    the others.
    """
    return (layout.REPLICA.of(directory, replica), layout.REPLICA.of(attempt, replica)) if replica else (directory, attempt)
