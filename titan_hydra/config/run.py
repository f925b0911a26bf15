"""Where one rank of a run stands: what the worker hands to the trainer beside the job."""
import contextlib
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from titan_hydra import __version__


@dataclass(frozen=True)
class Run:
    """One rank of one attempt. `directory` is the run's, `attempt` the folder attempts/<n> in it, both absolute.

    A replica group (`fault_tolerance`) is a world of its own: ranks are counted within it, and its files lie in `folders_of` it.
    """

    directory: Path
    attempt: Path
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: object | None = None  # torch.distributed.Store that all ranks of the world share; for init_process_group
    replica: int = 0

    @property
    def home(self) -> Path:
        """The directory of the run itself, whichever group this is."""
        return self.directory.parents[1] if self.replica else self.directory

    @property
    def meetings(self) -> Path:
        """Where replica groups find each other in this attempt."""
        return self._attempt / "meetings"

    def record_of(self, rank: int) -> Path:
        """What the worker says of a rank of this world, for the launcher, which counts all ranks of the run."""
        return self._attempt / f"rank_{self.replica * self.world_size + rank}.json"

    @property
    def newer_attempt(self) -> int | None:
        """Number of an attempt that was claimed after this one: the run is that one's now. None as long as this is the newest."""
        mine, newest = self._attempt.name, max(attempts_of(self.home), default=0)
        return newest if mine.isdecimal() and newest > int(mine) else None

    @property
    def _attempt(self) -> Path:
        return self.attempt.parents[1] if self.replica else self.attempt


def attempts_of(directory: Path) -> list[int]:
    """Numbers of a run's attempts, ascending. What somebody has put beside them, as a copy named 1.bak, is none."""
    return sorted(int(path.name) for path in directory.glob("attempts/*") if re.fullmatch("[1-9][0-9]*", path.name))


def rank_files(attempt: Path, kind: str, suffix: str = ".json") -> dict[int, Path]:
    """The files `<kind>_<rank><suffix>` of an attempt, by rank."""
    found = ((re.fullmatch(rf"{kind}_([0-9]+)", path.name.removesuffix(suffix)), path) for path in attempt.glob(f"{kind}_*{suffix}"))
    return {int(match[1]): path for match, path in sorted(found, key=lambda pair: pair[1]) if match}


def folders_of(replica: int, directory: Path, attempt: Path) -> tuple[Path, Path]:
    """The directory and the attempt's folder of a replica group: the run's own for the first, folders in them for the others."""
    return tuple(folder / "replicas" / str(replica) if replica else folder for folder in (directory, attempt))


def versions() -> dict[str, str]:
    """Versions of what decides about results and speed; a package that is not there is left out."""
    found = {"python": platform.python_version(), "titan_hydra": __version__}
    for package in ("torch", "torchao", "triton", "numpy", "tiktoken", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
