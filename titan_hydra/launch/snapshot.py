"""Copy the code of a job when the job is submitted, so that edits do not change the job while it waits in the queue."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import titan_hydra
from titan_hydra.base.errors import ConfigError
from titan_hydra.config.user_code import digest_of_code
from titan_hydra.runs import layout

USER = "_imports"  # name of the folder for the user's modules in a copy of the code
ROOT = Path(titan_hydra.__file__).parents[1]


def take(runs: Path, user: dict[str, Path]) -> Path:
    """Copy the code of this package and of the user (`user_code.sources`) to the folder `<runs>/_code/<hash>`, unless
    the copy exists. Return this folder.

    A copy that was changed, or that lost files in a purge of old files, is replaced.
    """
    code = {name: ROOT / name for name in files(ROOT) if not (ROOT / name).is_relative_to(runs)}
    code |= {f"{USER}/{name}": file.resolve() for name, file in user.items()}
    final = layout.CODE.of(runs) / digest_of_code(code)
    if intact(final):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=final.parent, ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / "code"
        for name, file in code.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy / name, follow_symlinks=False)
        if not intact(final):  # checked a second time, as another process may have replaced the copy meanwhile
            with contextlib.suppress(FileNotFoundError):
                final.rename(Path(scratch) / "damaged")
        try:
            copy.rename(final)
        except OSError:  # another process has just taken the same snapshot
            if not final.is_dir():
                raise
    return final


def intact(copy: Path) -> bool:
    """Whether a copy of the code exists, and the hash of its files is still equal to its name."""
    return copy.is_dir() and digest_of_code(copied(copy)) == copy.name


def files(root: Path) -> list[str]:
    """List the files of the code: in a checkout all tracked files and the untracked Python files, else the files of the
    package.

    Raises ConfigError if git does not list the files, as in a checkout that belongs to another user.
    """
    if (root / ".git").exists():
        tracked = _git(root, "ls-files", "-z")
        new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py")
        return sorted(name for name in {*tracked, *new} if os.path.lexists(root / name))
    package = root / "titan_hydra"
    return sorted(
        str(file.relative_to(root)) for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )


def copied(folder: Path) -> dict[str, Path]:
    """Return the paths of a snapshot's files, by name. Compiled Python files are left out."""
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if (Path(path) / name).is_symlink()]
        found += [os.path.relpath(os.path.join(path, name), folder) for name in [*names, *links]]
    return {name: folder / name for name in found}


def _git(root: Path, *arguments: str) -> list[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{root}: git: {error}") from error
    if done.returncode:
        raise ConfigError(f"{root}: git: {' '.join(done.stderr.split())}")
    return [name for name in done.stdout.split("\0") if name]
