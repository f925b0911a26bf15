"""Read the beginnings of a source's files before anything starts, and report files and rows that cannot be used. Imports
no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.files import kind
from titan_hydra.core.job.config.parts import TextSource

from . import files
from .opening import UNREADABLE
from .shards import BadRow, BadShard, BadShards
from .unknown import FILES, LENGTH, ROWS, some_files

MANY = 1000  # maximum number of files whose first bytes are read
ZSTD, SKIPPABLE = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"  # how the frames of a .zst begin; the second after a byte


def faults_of_text(key: str, source: TextSource, job: schema.Job) -> Iterator[Fault]:
    """Yield what is wrong with the files of data=text_files, or with the first rows of some of them."""

    def read(file: Path) -> Iterable[Any]:
        return files.beginnings(file, source.text_key, ROWS, LENGTH)

    yield from faults_in_files(f"{key}.path", source.path, job, files.TEXT_SUFFIXES, read)


def faults_in_files(
    key: str, path: str | None, job: schema.Job, suffixes: tuple[str, ...], read: Callable[[Path], Iterable[Any]]
) -> Iterator[Fault]:
    """Yield a fault if more files are of another kind than their suffixes say, or more of the first rows cannot be used,
    than the job may leave out; or if none of these rows can be used. `read(file)` returns the first rows; those that
    cannot be used are BadRows.
    """
    try:
        data_files = some_files(path, suffixes, MANY) if path else []
    except (ConfigError, OSError):
        return  # another rule yields this fault
    wrong = [BadShard(file, f"{file}: {reason}") for file in data_files if (reason := other_kind(file))]
    some = data_files[:: -(-len(data_files) // FILES) or 1]
    if data_files:
        yield from _faults(
            key, path, job, wrong, [functools.partial(read, file) for file in some], len(data_files) > FILES
        )


def faults_in_rows(key: str, path: str, job: schema.Job, read: Callable[[], Iterable[Any]]) -> Iterator[Fault]:
    """Yield a fault if more of the rows that `read()` returns are BadRows than the job may leave out, or all."""
    return _faults(key, path, job, [], [read], False)


def _faults(
    key: str,
    path: str | None,
    job: schema.Job,
    wrong: list[BadShard],
    reads: list[Callable[[], Iterable[Any]]],
    more: bool,
) -> Iterator[Fault]:
    """Yield a fault if none of the first rows can be used, or more are wrong than the limits for bad shards and rows
    allow. `wrong` are files that are known to be bad, `reads` read one file each; `more` says that others were not
    read.
    """
    bad, usable = BadShards(job.data.max_bad_shards, job.data.max_bad_rows), 0
    try:
        for error in wrong:
            bad.add(error)
        for read in reads:
            try:
                for row in islice(read(), ROWS):
                    usable += not isinstance(row, BadRow)
                    if isinstance(row, BadRow):
                        bad.add(row)
            except BadShard as error:
                bad.add(error)
            except UNREADABLE as error:
                bad.add(BadShard(path, files.unreadable(Path(path or ""), error)))
        if bad.found and not usable:
            raise ConfigError(f"none of the first rows can be used: {next(iter(bad.found.values()))}")
        if not usable and not more:
            raise ConfigError("no row in it")
    except ConfigError as error:
        yield Fault(key, path, str(error))


def other_kind(file: Path) -> str | None:
    """Return why a file is not of the kind that its suffix says; None if its first bytes, and for .parquet its last,
    are of this kind.
    """
    try:
        with file.open("rb") as stream:
            first = stream.read(4)
            if kind(file) == ".parquet":
                stream.seek(-min(4, file.stat().st_size), 2)
                return None if first == stream.read(4) == b"PAR1" else "not a Parquet file, or not a whole one"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if file.suffix == ".gz" and first[:2] != b"\x1f\x8b":
        return "cannot be read: not a .gz file"
    if file.suffix == ".zst" and first != ZSTD and first[1:] != SKIPPABLE:
        return "cannot be read: not a .zst file"
    return None
