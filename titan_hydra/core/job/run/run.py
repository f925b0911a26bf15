"""What the worker passes to the trainer in addition to the job: the rank, and the rank's folders in the run directory."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import layout


@dataclass(frozen=True)
class Run:
    """One rank of one attempt. A replica group (fault_tolerance) is a world of its own: its ranks are counted from 0, and
    its files lie in its own folders (`folders_of`).
    """

    directory: Path  # run folder of the rank's replica group, absolute
    attempt: Path  # the folder attempts/<n> in `directory`, absolute
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: Any = None  # torch.distributed.Store of all ranks of the world
    replica: int = 0  # index of the replica group
    submission: str = ""  # token of the submission, if each replica group is a job with its own attempts; else ""

    @property
    def home(self) -> Path:
        """The directory of the run, the same for every replica group."""
        return self.directory.parents[1] if self.replica else self.directory

    @property
    def meetings(self) -> Path:
        """The folder in which the replica groups find each other: that of this submission if it has a token, else that
        of this attempt.
        """
        return layout.MEETINGS.of(self.home) / self.submission if self.submission else layout.MEETINGS.of(self._attempt)

    def record_of(self, rank: int) -> Path:
        """Return the file rank_<r>.json of a rank. The launcher counts r across all replica groups that it has started."""
        return layout.RANK.of(self._attempt, rank + (0 if self.submission else self.replica * self.world_size))

    @property
    def newer_attempt(self) -> int | None:
        """The number of the newest attempt, if that is later than this attempt; else None. A later attempt owns the
        run, so this attempt must no longer write to it.
        """
        mine, newest = self._attempt.name, newest_attempt(self.directory if self.submission else self.home)
        return newest if mine.isdecimal() and newest > int(mine) else None

    @property
    def _attempt(self) -> Path:
        return self.attempt.parents[1] if self.replica and not self.submission else self.attempt


def hash_of(directory: Path) -> str:
    """Return the hash of a run, which is part of its directory's name. The hash is computed from the configuration of
    the first attempt, even if the layout has changed since.
    """
    return directory.name.rpartition("-")[2]


def tracked_id(directory: Path) -> str:
    """Return the id of a run for trackers, which no other run directory has, not even one with the same hash: a run that
    was started anew, or another person's. A directory from before there was such an id has its hash.
    """
    return layout.RUN_ID.read(directory).get("id") or hash_of(directory)


def draw_tracked_id(directory: Path, name: str) -> None:
    """Give a run directory, whose final name is `name`, a new id for trackers."""
    layout.RUN_ID.write(directory, {"id": hash_of(Path(name)) + secrets.token_hex(2)})


def newest_attempt(directory: Path) -> int:
    """Return the number of a run's newest attempt; 0 if there is none."""
    return max(layout.ATTEMPT.all(directory), default=0)


def homes_of(directory: Path, replicas: int) -> list[Path]:
    """Return the run folder of each replica group."""
    return [folders_of(replica, directory, directory)[0] for replica in range(replicas)]


def group_at(home: Path) -> tuple[Path, int]:
    """Return the directory of the run and the index of the replica group to which a run folder belongs."""
    replicas = layout.REPLICA.of(home.parents[1], int(home.name)) if home.name.isdecimal() else None
    return (home.parents[1], int(home.name)) if home == replicas else (home, 0)


def folders_of(replica: int, directory: Path, attempt: Path) -> tuple[Path, Path]:
    """Return the run folder and the attempt folder of a replica group. Group 0 has the run's own folders; every other
    group g has the folders replicas/<g> inside these.
    """
    return (
        (layout.REPLICA.of(directory, replica), layout.REPLICA.of(attempt, replica))
        if replica
        else (directory, attempt)
    )
