"""The code of a run: the files of the package and of the user's modules, their digest, the commit and the uncommitted
changes; the copy that is taken when the first cell of a command line starts, so that later edits do not change the
cells that wait; the import of a run's modules by a command that only reads it; the versions of the
packages on which it depends.
"""

import contextlib
import errno
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import titan_hydra
from titan_hydra import __version__
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.user_code import digest, digest_of_code, require_user_modules, sources

from . import layout

ROOT = Path(titan_hydra.__file__).parents[1]
PACKAGE = "titan_hydra"
USER = "_imports"  # name of the folder for the user's modules in a copy of the code
MOST_DIFF = 1 << 20  # bytes of uncommitted changes that are kept; of longer changes, the digest and the files' names
MOST_UNTRACKED = 1000  # number of untracked files that are named
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Options that give `git diff` the same form whatever the user has set in git's configuration.
PLAIN = (
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--submodule=short",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def code_here(user: dict[str, Path]) -> dict[str, Path]:
    """Return the files that a rank imports, by their names in a copy of the code: the package, and the user's modules
    (`user_code.sources`).
    """
    code = {f"{PACKAGE}/{name}": file for name, file in code_in(ROOT / PACKAGE).items()}
    return code | {f"{USER}/{name}": file.resolve() for name, file in user.items()}


def code_in(folder: Path) -> dict[str, Path]:
    """Return the regular files and the links in a folder, by name. Hidden files and compiled Python files are left out."""
    names_found = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        links = [name for name in folders if (Path(path) / name).is_symlink()]
        names_found += [
            os.path.relpath(os.path.join(path, name), folder) for name in [*names, *links] if name[0] != "."
        ]
    files = {name: folder / name for name in names_found}
    return {name: file for name, file in files.items() if _kept(file)}


def _kept(file: Path) -> bool:
    mode = file.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def fingerprints(code: dict[str, Path]) -> dict[str, str]:
    """Return a digest of each file; for a link, of its target."""
    return {
        name: hashlib.sha256(os.readlink(file).encode() if file.is_symlink() else file.read_bytes()).hexdigest()
        for name, file in code.items()
    }


def edited(before: dict[str, str], now: dict[str, str]) -> str:
    """Return a phrase that names the files whose fingerprints differ; "" if none does."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def describe_code() -> dict[str, Any]:
    """Return the commit, the uncommitted changes and the untracked files of this checkout; None for what git does not
    tell. Everything in the changes that looks like a secret is replaced.
    """
    diff, untracked = _git("diff", *PLAIN, "HEAD"), _git("ls-files", "-z", "--others", "--exclude-standard")
    names = [os.fsdecode(name) for name in (untracked or b"").split(b"\0") if name]
    more = [f"and {len(names) - MOST_UNTRACKED} more"] if len(names) > MOST_UNTRACKED else []
    sha = _git("rev-parse", "HEAD")
    return {
        "git_sha": sha and sha.decode().strip(),
        "git_diff": None if diff is None else _shortened(diff),
        "git_untracked": [name.encode(errors="replace").decode() for name in names[:MOST_UNTRACKED]] + more,
    }


def _shortened(diff: bytes) -> str:
    """Return a diff as text without secrets. Of a diff over MOST_DIFF, only its beginning, its digest and the names of its
    files are kept.
    """
    beginning = diff if len(diff) <= MOST_DIFF else diff[: diff.rfind(b"\n", 0, MOST_DIFF)]
    text = redact(ESCAPES.sub("", beginning.decode(errors="replace")).strip(), code=True)
    if beginning is diff:
        return text
    files = re.findall(rb"^diff --git a/(.+) b/", diff[len(beginning) :], re.M)
    names = "\n".join(f"diff --git a/{name.decode(errors='replace')}" for name in files[:MOST_UNTRACKED])
    return (
        f"{text}\n[{len(diff):,} bytes, sha256 {hashlib.sha256(diff).hexdigest()}; what follows is left out]\n{names}"
    )


def _git(*arguments: str) -> bytes | None:
    """Return the output of git in the checkout of this code; None if there is no checkout, or if git fails.

    Variables such as GIT_DIR, which hooks and `rebase --exec` set, would make git describe another repository.
    """
    if not (ROOT / ".git").exists():
        return None
    settings = ("color.ui=false", "core.quotePath=true")
    command = ["git", "-C", str(ROOT), *(word for setting in settings for word in ("-c", setting)), *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=30, env=variables).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def import_modules(directory: Path) -> None:
    """Import a run's modules if this user started the run and their sources are those of its start; so a command that
    reads runs executes nothing else. Raises ConfigError otherwise, or if a module cannot be imported.
    """
    train = layout.CONFIG.read(directory).get("train", {})
    modules = train.get("imports", [])
    if not modules:
        return
    named = (
        f"{directory.name}: its modules ({', '.join(map(str, modules))}) are not imported by a command that only reads"
    )
    if layout.CONFIG.of(directory).stat().st_uid != os.getuid():
        raise ConfigError(f"{named}: another user started the run")
    if not sources(modules):
        require_user_modules(modules)  # says which module is not here; there is nothing that it could run
    if train.get("sources") is None or digest(modules) != train["sources"]:
        raise ConfigError(f"{named}: they are other ones than when the run was started")
    require_user_modules(modules)


def take_snapshot(runs: Path, user: dict[str, Path]) -> Path:
    """Copy the code of this package and of the user (`user_code.sources`) to the folder `<runs>/_code/<hash>`, unless
    the copy exists, and describe it in `<hash>.json` beside it. Return the folder.

    A copy that was changed, or that lost files in a purge of old files, is replaced. Raises ConfigError if there is no copy
    and none can be written; OSError on a full disk.
    """
    code, state = code_here(user), describe_code()
    final = layout.CODE.of(runs) / digest_of_code(code)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if layout.CODE_STATE.read(final.parent, final.name) != state:  # another commit may have the same package
            layout.CODE_STATE.write(final.parent, state, final.name)
        if not intact(final):
            return _copy_code(code, final)
        with contextlib.suppress(PermissionError):  # it is another user's
            os.utime(final)  # it is in use: `titan runs remove --unused` leaves it for a day
        return final
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{final.parent}, which holds the code that runs import, cannot be written ({error.strerror})"
        raise bad_value("paths.runs", str(runs), reason) from error


def _copy_code(code: dict[str, Path], final: Path) -> Path:
    """Copy files to a folder that is complete or absent."""
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
    return copy.is_dir() and digest_of_code(code_in(copy)) == copy.name


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect results or speed. Do not change the result, as it is
    cached.
    """
    by_package = {"python": platform.python_version(), "titan_hydra": __version__}
    for package in ("torch", "torchao", "triton", "numpy", "tiktoken", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package
