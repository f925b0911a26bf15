"""Where one rank of a run stands: what the worker hands to the trainer beside the job."""
import contextlib
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from titan_hydra import __version__


@dataclass(frozen=True)
class Run:
    """One rank of one attempt. `directory` is the run's, `attempt` the folder attempts/<n> in it, both absolute."""

    directory: Path
    attempt: Path
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: object | None = None  # torch.distributed.Store that all ranks of the attempt share; for init_process_group


def versions() -> dict[str, str]:
    """Versions of what decides about results and speed; a package that is not there is left out."""
    found = {"python": platform.python_version(), "titan_hydra": __version__}
    for package in ("torch", "torchao", "triton", "numpy", "tiktoken", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
