"""The place of one rank in a run: what the worker passes to the trainer beside the job."""
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One rank of one attempt. `directory` is the run's, `attempt` the folder attempts/<n> in it, both absolute.

    A replica group (`fault_tolerance`) is a world of its own: its ranks are counted within it, and its files are in its own folders
    (`folders_of`).
    """

    directory: Path
    attempt: Path
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: object | None = None  # torch.distributed.Store that all ranks of the world share; for init_process_group
    replica: int = 0
    submission: str = ""  # token of the SLURM submission: then each replica group is a job, whose attempts are in its own folder

    @property
    def home(self) -> Path:
        """The directory of the whole run, the same for every replica group."""
        return self.directory.parents[1] if self.replica else self.directory

    @property
    def meetings(self) -> Path:
        """The folder that the replica groups of this attempt, or of this submission, use for rendezvous."""
        return self.home / "meetings" / self.submission if self.submission else self._attempt / "meetings"

    def record_of(self, rank: int) -> Path:
        """Return the path of a rank's record. The file name counts ranks as the launcher does: over all groups that it has started."""
        return self._attempt / f"rank_{rank + (0 if self.submission else self.replica * self.world_size)}.json"

    @property
    def newer_attempt(self) -> int | None:
        """The number of a later attempt at this run; None if this attempt is the newest.

        A later attempt owns the run: this one must no longer write to it.
        """
        mine, newest = self._attempt.name, max(attempts_of(self.directory if self.submission else self.home), default=0)
        return newest if mine.isdecimal() and newest > int(mine) else None

    @property
    def _attempt(self) -> Path:
        return self.attempt.parents[1] if self.replica and not self.submission else self.attempt


def attempts_of(directory: Path) -> list[int]:
    """Return the numbers of a run's attempts, ascending. Other entries of the folder, such as a copy named 1.bak, are ignored."""
    return sorted(int(path.name) for path in directory.glob("attempts/*") if re.fullmatch("[1-9][0-9]*", path.name))


def rank_files(attempt: Path, kind: str, suffix: str = ".json") -> dict[int, Path]:
    """Return the files `<kind>_<rank><suffix>` of an attempt, by rank."""
    found = ((re.fullmatch(rf"{kind}_([0-9]+)", path.name.removesuffix(suffix)), path) for path in attempt.glob(f"{kind}_*{suffix}"))
    return {int(match[1]): path for match, path in sorted(found, key=lambda pair: pair[1]) if match}


def homes_of(directory: Path, replicas: int) -> list[Path]:
    """Return the run folders of the replica groups: the run's own for the first, folders below it for the others."""
    return [folders_of(replica, directory, directory)[0] for replica in range(replicas)]


def group_at(home: Path) -> tuple[Path, int]:
    """Return the directory of the whole run, and the replica group whose run folder this is."""
    return (home.parents[1], int(home.name)) if home.parent.name == "replicas" and home.name.isdecimal() else (home, 0)


def folders_of(replica: int, directory: Path, attempt: Path) -> tuple[Path, Path]:
    """Return the run folder and attempt folder of a replica group: the run's own for group 0, folders below them for the others."""
    return tuple(folder / "replicas" / str(replica) if replica else folder for folder in (directory, attempt))
