"""Read text files: the rows of .txt, .jsonl, .json, .csv and .parquet files, which may be compressed (.gz, .zst). Imports
no torch, so that commands can use it on a login node.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import did_you_mean
from titan_hydra.core.job.config.files import data_files, expand, kind, missing, similar, unread
from titan_hydra.core.job.config.registry import DATA_SOURCES

from .opening import UNREADABLE, broken_off, elements_of_array, is_array, mapped, numbered_lines, opened, unreadable
from .parquet import PageReaders, no_column, require_column
from .shards import BadRow, BadShard

Rows = Iterator[tuple[int, str | BadRow]]


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
    usable = data_files(path, files, suffixes)
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
    """Yield number and text of the rows start, start + every, ... A row is a whole .txt file, a record of JSON (on a line
    or in an array), or a record of a .csv or .parquet. A row that cannot be used is yielded as a BadRow. Raises BadShard
    if all rows behind one are lost, and ConfigError if the file has no column `text_key`.
    """
    try:
        yield from READERS[kind(file)](file, text_key, start, every)
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise BadShard(file, unreadable(file, error)) from error


def good(file_rows: Rows) -> Iterator[tuple[int, str]]:
    """Yield number and text of each row. Raises the first BadRow."""
    for number, text in file_rows:
        if isinstance(text, BadRow):
            raise text
        yield number, text


def texts(file: Path, text_key: str) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each row of a file. Here a row of a .txt file is a line that is not empty; lines
    end at \\n, as for editors. Raises ConfigError if there is no such file, or if a row cannot be used.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file{did_you_mean(similar(str(file)))}")
    if kind(file) not in TEXT_SUFFIXES:
        raise ConfigError(f"{file}: {unread(file, TEXT_SUFFIXES)}")
    if kind(file) in WHOLE:
        for _, text in good(rows(file)):
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield number, line.removesuffix("\r")
    else:
        yield from ((number + 1, text) for number, text in good(rows(file, text_key)))


def _text(file: Path, text_key: str, start: int, every: int) -> Rows:
    if start == 0:
        with opened(file) as stream:
            yield 0, stream.read().decode("utf-8-sig")


def _json(file: Path, text_key: str, start: int, every: int) -> Rows:
    """Yield the texts of JSON records, one a line or in an array."""
    for number, line, content in _array(file, start, every) if is_array(file) else _lines(file, start, every):
        if isinstance(content, BadRow):
            yield number, content
        elif not content.isspace():
            try:
                yield number, text_in(record_of(content, text_key), text_key)
            except ValueError as error:
                yield number, BadRow(f"{file}:{line}", error)


def _lines(file: Path, start: int, every: int) -> Iterator[tuple[int, int, bytes | BadRow]]:
    return ((number, number + 1, line) for number, line in numbered_lines(file, start, every))


def _array(file: Path, start: int, every: int) -> Iterator[tuple[int, int, bytes | BadRow]]:
    content, bad = mapped(file)
    for number, (line, begin, end) in islice(enumerate(elements_of_array(content)), start, None, every):
        yield number, line, content[begin:end]
    if bad:
        raise bad


def _csv(file: Path, text_key: str, start: int, every: int) -> Rows:
    """Yield number and text, or BadRow, of the rows start, start + every, ... of a CSV file with a header line."""
    csv.field_size_limit(2**31 - 1)  # maximum bytes of a text; the default is 128 KiB
    with opened(file) as stream:
        # a byte that is not UTF-8 becomes half of a surrogate pair, and so its row cannot be used
        reader = csv.DictReader(
            io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=""), strict=True
        )
        require_column(file, reader.fieldnames or (text_key,), text_key)
        for number in count():
            row: str | BadRow
            try:
                record = next(reader, None)
                if record is None:
                    return
                if number < start or (number - start) % every:
                    continue
                row = text_in(record, text_key)
            except csv.Error as error:
                row = BadRow(f"{file}:{reader.reader.line_num}", f"not CSV: {error}")
            except ValueError as error:
                row = BadRow(f"{file}:{reader.line_num}", error)
            except UNREADABLE as error:
                bad = broken_off(file, reader.reader.line_num, error)
                if not isinstance(bad, BadRow):
                    raise bad from error
                yield number, bad
                return
            yield number, row


def _parquet(file: Path, text_key: str, start: int, every: int) -> Rows:
    return of_parquet(file, text_key, start, every, PageReaders(1, kept=1))


def of_parquet(file: Path, text_key: str, start: int, every: int, readers: PageReaders) -> Rows:
    """Yield the texts of every n-th row of a Parquet file."""
    for number, value in readers.column(file, text_key, start, every):
        try:
            yield number, text_in({text_key: value.as_py()}, text_key)
        except (ValueError, OverflowError) as error:  # bytes that are not UTF-8, or a date beyond Python's
            yield number, BadRow(f"{file}: row {number + 1}", error)


def beginnings(file: Path, text_key: str, number: int, length: int) -> Iterator[str | BadRow]:
    """Yield the first `number` texts of a file, or the first `length` bytes of a .txt. A large file is not read as a
    whole.
    """
    if kind(file) in WHOLE:
        with opened(file) as stream:
            try:
                # the last character may be cut
                yield codecs.getincrementaldecoder("utf-8")().decode(stream.read(length))
            except UnicodeDecodeError as error:
                raise BadShard(file, unreadable(file, error)) from error
    else:
        yield from (text for _, text in islice(rows(file, text_key), number))


WHOLE = (".txt", ".md")  # suffixes of files that are one row
READERS: dict[str, Callable[[Path, str, int, int], Rows]] = {
    **dict.fromkeys(WHOLE, _text),
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
TEXT_SUFFIXES = DATA_SOURCES["text_files"].suffixes


def record_of(content: bytes | dict[str, Any], only: str | None = None) -> dict[str, Any]:
    """Return a row as a dict. Raises ValueError if the row is not a JSON object. `only`: see `json_of`."""
    if isinstance(content, dict):
        return content
    try:
        row = json_of(content, only)
    except RecursionError as error:
        raise ValueError("not a JSON line: nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a JSON line: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"not a record but {type(row).__name__}")
    return row


def json_of(content: str | bytes, only: str | None = None) -> Any:
    """Return what a JSON text holds. Raises ValueError if it is no JSON, or if an object in it has a key twice with
    different values, of which Python's json would keep the last. With `only`, no other key is compared.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            for key, value in pairs:
                if only in (None, key) and value != record[key]:
                    raise ValueError(f"it has {key!r} twice, with different values")
        return record

    return json.loads(content, object_pairs_hook=once)


def text_in(record: dict[str, Any], text_key: str) -> str:
    """Return the text of a record. Raises ValueError, with the columns that the record has, if it has no text, or one
    that UTF-8 cannot encode.
    """
    if text_key not in record:
        raise ValueError(no_column(text_key, record))
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"column {text_key!r} holds {type(text).__name__}, not text")
    check_unicode(text)
    return text


def check_unicode(text: str) -> None:
    """Raise ValueError if a text holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} is half of a surrogate pair, or a byte that is not UTF-8"
        ) from error
