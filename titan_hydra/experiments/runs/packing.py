"""Copies and archives of runs. Both are compared with the original, byte by byte, before anything is deleted.

An archive is a tar file. Its members have the names that they have in a folder of runs (`<run>/config.json`,
`_sweeps/<sweep>/manifest.json`, `_code/<hash>/...`); the last one, archive.json, has the checksum of every other.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.opening import opened
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.checkpoints import sync_folder

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
CHUNK = 1 << 20
BROKEN = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error)  # what reading a damaged archive raises


class Member(NamedTuple):
    """A run, or a file or folder that goes with runs: where it is, and its name in a folder of runs."""

    source: Path
    name: str


class Hashed:
    """A file that is read once, and whose checksum is known then."""

    def __init__(self, file: Any):
        self.file, self.sum = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        content: bytes = self.file.read(size)
        self.sum.update(content)
        return content


def contents(piece: Member, left_out: Collection[Path] = ()) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Yield (name, path, lstat) of a piece and all that is in it, folders before what they hold, except the folders
    `left_out`. Raises ConfigError for what is neither a file nor a folder nor a link.
    """
    pending = [(piece.name, piece.source)]
    while pending:
        name, path = pending.pop()
        about = path.lstat()
        if not any(test(about.st_mode) for test in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
            raise ConfigError(f"{path}: is neither a file nor a folder nor a link; delete it first")
        yield name, path, about
        if stat.S_ISDIR(about.st_mode):
            inside = sorted(os.listdir(path), reverse=True)
            pending += [(f"{name}/{entry}", path / entry) for entry in inside if path / entry not in left_out]


def sums_of(piece: Member, left_out: Collection[Path] = ()) -> dict[str, str]:
    """Return the checksum of each file of a piece, by name; for a link, of its target; for a folder, of nothing."""
    return {name: _sum(path, about) for name, path, about in contents(piece, left_out)}


def _sum(path: Path, about: os.stat_result) -> str:
    if stat.S_ISREG(about.st_mode):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return _sum_of_name(os.readlink(path) if stat.S_ISLNK(about.st_mode) else "")


def _sum_of_name(target: str) -> str:
    return hashlib.sha256(os.fsencode(target)).hexdigest()


def copy_piece(piece: Member, scratch: Path) -> Path:
    """Copy a piece into the folder `scratch`, compare the copy with it, and return the copy."""
    target = scratch / piece.name
    target.parent.mkdir(parents=True, exist_ok=True)
    before = sums_of(piece)  # refuses what cannot be copied
    if piece.source.is_dir():
        shutil.copytree(piece.source, target, symlinks=True)
    else:
        shutil.copy2(piece.source, target)
    if sums_of(Member(target, piece.name)) != before:
        raise ConfigError(f"{piece.source}: its copy in {target} has other bytes; nothing was deleted")
    for folder, _, names in os.walk(target):
        for name in names:
            _sync(Path(folder, name))
        sync_folder(Path(folder))
    return target


def _sync(file: Path) -> None:
    """Make a copied file durable."""
    if not file.is_symlink():
        sync_folder(file)


def check_suffix(file: Path) -> None:
    """Raise ConfigError unless the name of an archive tells how it is compressed."""
    if not file.name.endswith(SUFFIXES):
        raise bad_value("--to", str(file), "is no name of an archive", *(f"{file.name}{suffix}" for suffix in SUFFIXES))


@contextlib.contextmanager
def _written(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing, compressed as its name says, and make it durable at the end."""
    with file.open("wb") as plain:
        if file.name.endswith((".gz", ".tgz")):
            with gzip.GzipFile("", "wb", 6, plain) as packed:
                yield cast(IO[bytes], packed)
        elif file.name.endswith(".zst"):
            import pyarrow

            with pyarrow.CompressedOutputStream(plain, "zstd") as packed:
                yield packed
        else:
            yield plain
    sync_folder(file)


def write_archive(file: Path, pieces: list[Member], left_out: Collection[Path], about: dict[str, Any]) -> None:
    """Write an archive of pieces without the folders `left_out`, read it again, and compare. Until then, it has another
    name. Raises ConfigError if another process writes it, or if what was read is not what was written.
    """
    scratch = file.with_name(f".writing-{file.name}")
    with open(scratch, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{file}: another process writes it") from None
        except OSError:  # a file system without locks
            pass
        try:
            sums: dict[str, str] = {}
            with _written(scratch) as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for piece in pieces:
                    for name, path, stated in contents(piece, left_out):
                        sums[name] = _add(tar, name, path, stated)
                content = {**about, "files": {name: {"sha256": digest} for name, digest in sums.items()}}
                text = json.dumps(content, indent=1).encode()
                info = tarfile.TarInfo(layout.ARCHIVED.name)
                info.size, info.mode = len(text), 0o644
                tar.addfile(info, io.BytesIO(text))
            if read_archive(scratch) != content:
                raise ConfigError(f"{file}: what was read is not what was written; nothing was deleted")
            if os.path.lexists(file):
                raise ConfigError(f"{file}: exists already; nothing was deleted")
            scratch.rename(file)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
    sync_folder(file.parent)


def _opened(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".tgz" else opened(file)


def _add(tar: tarfile.TarFile, name: str, path: Path, about: os.stat_result) -> str:
    """Add a member, and return its checksum."""
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(about.st_mode), cast(int, about.st_mtime_ns / 1e9)
    if stat.S_ISREG(about.st_mode):
        info.size = about.st_size
        with path.open("rb") as file:
            summed = Hashed(file)
            tar.addfile(info, cast(IO[bytes], summed))
        return summed.sum.hexdigest()
    link = os.readlink(path) if stat.S_ISLNK(about.st_mode) else ""
    info.type, info.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.DIRTYPE, "")
    tar.addfile(info)
    return _sum_of_name(link)


def read_archive(file: Path, into: Path | None = None) -> dict[str, Any]:
    """Read an archive to its end, compare every member with its checksum, and return archive.json. With `into`, write
    the members into this folder. Raises ConfigError if a byte is wrong, or if a member has the name of a file elsewhere.
    """
    sums, late, about = {}, list[tarfile.TarInfo](), dict[str, Any]()
    try:
        with _opened(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for info in tar:
                if about:
                    raise tarfile.TarError("it goes on after its end")
                if info.name == layout.ARCHIVED.name:
                    about = json.loads(cast(IO[bytes], tar.extractfile(info)).read())
                    continue
                if not _inside(info, {member.name for member in late if member.issym()}):
                    raise ConfigError(
                        f"{file}: {info.name!r} would lie outside of the folder of runs; nothing was written"
                    )
                sums[info.name] = {"sha256": _take_out(tar, info, into)}
                late += [] if info.isreg() else [info]
    except (*BROKEN, ValueError, UnicodeError) as error:
        raise ConfigError(f"{file}: is damaged, or no archive of runs: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConfigError(f"{file}: is damaged: {error}") from error
    if not about:
        raise ConfigError(
            f"{file}: is cut off, or no archive of `titan runs archive`: {layout.ARCHIVED.name} is missing"
        )
    if not layout.ARCHIVED.intact(about):
        raise ConfigError(f"{file}: its {layout.ARCHIVED.name} has another form")
    if wrong := sorted(
        name for name in sums.keys() | about["files"].keys() if sums.get(name) != about["files"].get(name)
    ):
        raise ConfigError(f"{file}: is damaged: {wrong[0]} is not what was archived ({len(wrong)} such)")
    for info in reversed(late if into else []):  # what is in a folder changes its time, and a link may point anywhere
        target = cast(Path, into) / info.name
        if info.issym():
            target.symlink_to(info.linkname)
        else:
            target.chmod(info.mode & 0o777)
            os.utime(target, (info.mtime, info.mtime))
    return about


def _inside(info: tarfile.TarInfo, links: set[str]) -> bool:
    """Whether a member is a file, folder or link whose place is inside the folder into which it is written."""
    target = PurePosixPath(info.name)
    above = {str(parent) for parent in target.parents}
    plain = info.isreg() or info.isdir() or info.issym()
    return plain and not target.is_absolute() and ".." not in target.parts and not above & links


def _take_out(tar: tarfile.TarFile, info: tarfile.TarInfo, into: Path | None) -> str:
    """Read a member of an archive to its end, and return its checksum. If `into` is a folder, also write the member there,
    unless it is a link: links are made when all files are there.
    """
    target = into / info.name if into else None
    if not info.isreg():
        if target and info.isdir():
            target.mkdir(parents=True, exist_ok=True)
        return _sum_of_name(info.linkname if info.issym() else "")
    content = Hashed(tar.extractfile(info))
    if target is None:
        while content.read(CHUNK):
            pass
        return content.sum.hexdigest()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        shutil.copyfileobj(content, file, CHUNK)
        file.flush()
        os.fsync(file.fileno())
    target.chmod(info.mode & 0o777)
    os.utime(target, (info.mtime, info.mtime))
    return content.sum.hexdigest()
