"""Records by number: those of JSON (a record a line, or an array), of Parquet, and of a dataset of the hub. Large files
are mapped into memory, compressed files and Parquet after they are unpacked into a temporary file. Imports no torch.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import home, kind

from .files import place_in
from .opening import UNREADABLE, Content, elements_of_array, is_array, mapped, numbered_lines
from .parquet import batches_of_rows
from .shards import BadRow, BadShard, BadShards

Record = bytes | dict[str, Any]  # a JSON text, or the record itself
SUFFIXES = (".jsonl", ".json", ".parquet")


class RowsOfFile(Protocol):
    """The records of one file."""

    def __len__(self) -> int: ...

    def row(self, place: int) -> tuple[str, Record]: ...


class Records:
    """The records of some files, numbered over all files; blank lines do not count. With `most`, at most that many
    records of each file are read.
    """

    def __init__(self, files: list[Path], bad: BadShards, most: int | None = None):
        """Open the files. Raises ConfigError if more of them are damaged than `bad` allows."""
        self.parts: list[RowsOfFile] = []
        for file in files:
            try:
                part: RowsOfFile = (_Table if kind(file) == ".parquet" else _Json)(file, bad, most)
            except (*UNREADABLE, BadShard) as error:
                bad.add(error if isinstance(error, BadShard) else BadShard(file, f"{file}: cannot be read: {error}"))
            else:
                self.parts.append(part)
        self.ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def row(self, number: int) -> tuple[str, Record]:
        """Return the place of a record, such as FILE:LINE, and the record. Raises BadRow if it cannot be read."""
        part, place = place_in(self.ends, number)
        return self.parts[part].row(place)


class _Json:
    """The records of a file of JSON: where each begins and ends."""

    def __init__(self, file: Path, bad: BadShards, most: int | None):
        """Index the records of a file: of all, or of the first `most`, for which only the beginning is read."""
        self.file = file
        array = is_array(file)
        if most is not None and not array:  # do not map a large file for a few lines
            full = (line for _, line in numbered_lines(file) if isinstance(line, bytes) and not line.isspace())
            self.content: Content = b"".join(islice(full, most))
            error = None
        else:
            self.content, error = mapped(file)
        if error:
            bad.add(error)
        places = islice(elements_of_array(self.content), most) if array else _lines(self.content)
        # for each record: its line, and the offsets of its begin and end
        self.places = np.fromiter(places, dtype=np.dtype((np.int64, 3)))

    def __len__(self) -> int:
        return len(self.places)

    def row(self, place: int) -> tuple[str, bytes]:
        line, begin, end = self.places[place]
        return f"{self.file}:{line}", self.content[begin:end]


def _lines(content: Content) -> Iterator[tuple[int, int, int]]:
    """Yield line (from 1), begin and end of each line that is not blank."""
    end = 0
    stream: Any = io.BytesIO(content) if isinstance(content, bytes) else content
    for number, line in enumerate(iter(stream.readline, b""), 1):
        begin, end = end, end + len(line)
        if not line.isspace():
            yield number, begin, end


class _Table:
    """The rows of a Parquet file."""

    def __init__(self, file: Path, bad: BadShards, most: int | None):
        """Copy the rows (the first `most`, if given) into an unnamed file in Arrow's format, and map it, so that they
        need no memory.
        """
        import pyarrow

        self.file = file
        batches = islice(batches_of_rows(file, most), 1) if most else batches_of_rows(file)
        with tempfile.NamedTemporaryFile(suffix=".arrow") as copy:
            if (first := next(iter(batches), None)) is None:
                self.table = pyarrow.table({})
                return
            with pyarrow.ipc.new_stream(copy.name, first.schema) as stream:
                stream.write_batch(first)
                for batch in batches:
                    stream.write_batch(batch)
            # the mapping outlives the name
            self.table = pyarrow.ipc.open_stream(pyarrow.memory_map(copy.name)).read_all()

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, place: int) -> tuple[str, dict[str, Any]]:
        where = f"{self.file}: row {place + 1}"
        try:
            (record,) = self.table.slice(place, 1).to_pylist()
        except (ValueError, OverflowError) as error:  # bytes that are not UTF-8, or a date beyond Python's
            raise BadRow(where, error) from error
        return where, without_nulls(record)


class HubRecords:
    """The rows of a split of a dataset: one of the Hugging Face hub, or a local folder in the hub's layout, or one that
    the library `datasets` has saved.
    """

    def __init__(self, key: str, path: str, subset: str | None, split: str):
        """Open the split. Raises ConfigError, with the library's message, if it is not available."""
        import datasets

        self.where = f"{path}[{split}]"
        folder = home(path)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                saved = datasets.load_from_disk(str(folder))
                self.rows = saved[split] if isinstance(saved, dict) else saved
            else:
                name = str(folder) if folder.exists() else path
                self.rows = datasets.load_dataset(name, subset, split=split)
        # the hub, each format and each file system raise their own errors
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(f"{key}={path}, split {split}: {type(error).__name__}: {first}") from error

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return the place of a row, and the row. Raises BadRow if the library cannot read it."""
        where = f"{self.where}: row {number + 1}"
        try:
            return where, without_nulls(self.rows[number])
        except (ValueError, OverflowError) as error:
            raise BadRow(where, error) from error


def without_nulls(value: Any) -> Any:
    """Return a value without the null entries of its records. In a table every record has every key of its column."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
