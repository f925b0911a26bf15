"""Read text files: the rows of .txt, .jsonl, .csv and .parquet files, which may be compressed (.gz, .zst). Imports no
torch, so that commands can use it on a login node.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.fault import did_you_mean
from titan_hydra.config.files import expand, kind, missing, similar, unread
from titan_hydra.config.registry import DATA_SOURCES

from .shards import BadShard

Rows = Iterator[tuple[int, str]]


def require(key: str, path: str | None, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Return the files of `path` with one of the suffixes, or all files if no suffix is given. Files that are missing
    in a numbered set are included, so that reading them fails. Raises ConfigError, with similar names, if there are no
    files, or all are empty.
    """
    if not path:
        raise ConfigError(f"{key}=null: set it to a file, a folder or a glob")
    files = expand(path)
    if not files:
        raise ConfigError(f"{key}={path}: no such file" + did_you_mean(similar(path)))
    usable = [file for file in files if not suffixes or kind(file) in suffixes]
    if not usable:
        raise ConfigError(f"{key}={path}: {unread(files[0], suffixes)}")
    if not any(file.stat().st_size for file in usable):
        raise ConfigError(f"{key}={path}: {'the file is' if len(usable) == 1 else 'all files are'} empty")
    return sorted(usable + [file for file in missing(path, files) if not suffixes or kind(file) in suffixes])


def path_of(key: str, source: Any, split: str) -> tuple[str, str | None]:
    """Return the key that names the files of a split, and its value."""
    return (f"{key}.path", source.path) if split == "train" else (f"{key}.validation_path", source.validation_path)


def place_in(ends: list[int], number: int) -> tuple[int, int]:
    """Return the index of the file that holds a row (or sample), and the row's number in it. `ends` has the number of
    rows up to the end of each file.
    """
    file = bisect_right(ends, number)
    return file, number - (ends[file - 1] if file else 0)


def rows(file: Path, text_key: str = "text", start: int = 0, every: int = 1) -> Rows:
    """Yield number and text of the rows start, start + every, ... A row is a whole .txt file, a line of a .jsonl, or a
    record of a .csv or .parquet. Raises BadShard, with file and line, if a row cannot be read, and ConfigError if a row
    has no column `text_key`.
    """
    try:
        yield from READERS[kind(file)](file, text_key, start, every)
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise BadShard(file, f"{file}: cannot be read: {error}") from error


def texts(file: Path, text_key: str) -> Rows:
    """Yield number (from 1) and text of each row of a file. Here a row of a .txt file is a line that is not empty. Raises
    ConfigError if there is no such file, or it cannot be read to the end.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file{did_you_mean(similar(str(file)))}")
    if kind(file) not in TEXT_SUFFIXES:
        raise ConfigError(f"{file}: {unread(file, TEXT_SUFFIXES)}")
    if kind(file) == ".txt":
        for _, text in rows(file):
            yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    else:
        yield from ((number + 1, text) for number, text in rows(file, text_key))


def _text(file: Path, text_key: str, start: int, every: int) -> Rows:
    if start == 0:
        with opened(file) as stream:
            yield 0, stream.read().decode()


def _lines(file: Path, text_key: str, start: int, every: int) -> Rows:
    with opened(file) as stream:
        for number, line in islice(enumerate(stream), start, None, every):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # the line is not JSON, or not UTF-8
                raise BadShard(file, f"{file}:{number + 1}: not a JSON line: {error}") from error
            yield number, column(record, text_key, f"{file}:{number + 1}")


def _csv(file: Path, text_key: str, start: int, every: int) -> Rows:
    csv.field_size_limit(2**31 - 1)  # maximum bytes of a text; the default is 128 KiB
    with opened(file) as stream:
        reader = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
        try:
            for number, record in islice(enumerate(reader), start, None, every):
                yield number, column(record, text_key, f"{file}:{reader.line_num}")
        except csv.Error as error:
            raise BadShard(file, f"{file}:{reader.reader.line_num}: not CSV: {error}") from error


def _parquet(file: Path, text_key: str, start: int, every: int) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if text_key not in table.schema_arrow.names:
            column(dict.fromkeys(table.schema_arrow.names), text_key, str(file))
        first = 0  # index of the first row in this row group
        for group in range(table.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            wanted = range(start + -(-max(first - start, 0) // every) * every, first + size, every)
            if wanted:
                values = table.read_row_group(group, columns=[text_key])[text_key]
                for number in wanted:
                    yield number, column({text_key: values[number - first].as_py()}, text_key, f"{file}: row {number}")
            first += size
    except pyarrow.ArrowException as error:
        raise BadShard(file, f"{file}: not a Parquet file: {error}") from error


def beginnings(file: Path, text_key: str, number: int, length: int) -> Iterator[str]:
    """Yield the first `number` texts of a file, or the first `length` bytes of a .txt. A large file is not read as a
    whole.
    """
    if kind(file) in (".txt", ".md"):
        with opened(file) as stream:
            yield stream.read(length).decode(errors="ignore")
    elif kind(file) == ".parquet":
        import pyarrow.parquet

        # By default pyarrow would read a whole row group.
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 16)
        for batch in islice(table.iter_batches(number, columns=[text_key]), 1):
            yield from batch[text_key].to_pylist()
    else:
        yield from (text for _, text in islice(rows(file, text_key), number))


READERS: dict[str, Callable[[Path, str, int, int], Rows]] = {
    ".txt": _text,
    ".md": _text,
    ".jsonl": _lines,
    ".json": _lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
TEXT_SUFFIXES = DATA_SOURCES["text_files"].suffixes


UNREADABLE = (OSError, EOFError, zlib.error)  # errors that reading a file can raise; EOFError: a truncated .gz


def opened(file: Path) -> IO[bytes]:
    """Open a file for reading; .gz and .zst are unpacked."""
    if file.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd"))
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else open(file, "rb")


def column(record: object, text_key: str, where: str) -> str:
    """Return the text of a record. Raises ConfigError, with the columns that the record has, if it has no text."""
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: not a record but {type(record).__name__}")
    if text_key not in record:
        raise ConfigError(
            f"{where}: no column {text_key!r}, but {', '.join(map(repr, record))}: set data.text_key (--text-key)"
        )
    if not isinstance(record[text_key], str):
        raise ConfigError(f"{where}: column {text_key!r} holds {type(record[text_key]).__name__}, not text")
    return record[text_key]
