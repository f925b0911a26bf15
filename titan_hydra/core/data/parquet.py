"""Read Parquet files some rows at a time, so that a large row group is never in memory as a whole. Imports no torch.

A reader holds a page of its file, which may have megabytes. So a rank keeps only some readers, and the rows that they
have read last; slots that read every n-th row of one file are mostly served by one reader.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError

from .shards import BadShard

BATCH = 1 << 17  # bytes that are read at a time
KEPT = 256  # number of batches that are kept for other slots
READERS = 16  # number of readers that a rank keeps


@dataclass
class PageReader:
    """A position in a row group: the batch that comes next."""

    file: Path
    group: int
    batches: Iterator[Any]
    next: int = 0


class PageReaders:
    """The readers of a rank's slots, those that were used last at the end."""

    def __init__(self, number: int = READERS, kept: int = KEPT):
        self.number, self.most_kept = number, kept
        self.readers: list[PageReader] = []
        self.kept: OrderedDict[tuple[Path, int, int], Any] = OrderedDict()

    def column(self, file: Path, name: str, start: int, every: int) -> Iterator[tuple[int, Any]]:
        """Yield number and value, as pyarrow has it, of the rows start, start + every, ... of a column. Raises BadShard
        if the file cannot be read, and ConfigError if it has no such column.
        """
        with _refusing(file):
            metadata = opened_parquet(file, name).metadata
            number, first = start, 0  # the next row, and the first row of the group
            for group_index in range(metadata.num_row_groups):
                group = metadata.row_group(group_index)
                size = batch_size(group, name)
                while number < first + group.num_rows:
                    index = (number - first) // size
                    values, begin = self._batch(file, name, group_index, index, size), first + index * size
                    for row in range(number, begin + len(values), every):
                        yield row, values[row - begin]
                        number = row + every
                first += group.num_rows

    def _batch(self, file: Path, name: str, group: int, index: int, size: int) -> Any:
        """Return the batch `index` of a row group."""
        if (batch := self.kept.get((file, group, index))) is not None:
            return batch
        reader = self._reader(file, name, group, index, size)
        while reader.next <= index:
            values = next(reader.batches).column(0)
            self.kept[file, group, reader.next] = values
            reader.next += 1
            if len(self.kept) > self.most_kept:
                self.kept.popitem(last=False)
        return values

    def _reader(self, file: Path, name: str, group: int, index: int, size: int) -> PageReader:
        """Return a reader that is a little before a batch, or else a new one."""
        near = [
            reader
            for reader in self.readers
            if (reader.file, reader.group) == (file, group) and index - KEPT // 4 <= reader.next <= index
        ]
        if near:
            reader = max(near, key=lambda reader: reader.next)
            self.readers.remove(reader)
        else:
            table = opened_parquet(file, name)
            batches = table.iter_batches(size, row_groups=[group], columns=[name], use_threads=False)
            reader = PageReader(file, group, batches)
            del self.readers[: len(self.readers) + 1 - self.number]
        self.readers.append(reader)
        return reader


def batches_of_rows(file: Path, size: int | None = None) -> Iterator[Any]:
    """Yield the record batches of all columns. Raises BadShard if the file cannot be read."""
    with _refusing(file):
        table = opened_parquet(file)
        for name in table.schema_arrow.names:
            require_column(file, table.schema_arrow.names, name)
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            yield from table.iter_batches(size or batch_size(group), row_groups=[number], use_threads=False)


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Raise BadShard for an error of pyarrow's."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        raise BadShard(file, f"{file}: not a Parquet file: {error}") from error


def opened_parquet(file: Path, name: str | None = None) -> Any:
    """Open a file that has the column `name`. Pages are read one after another, and not a whole row group at once."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 16)
    if name:
        require_column(file, table.schema_arrow.names, name)
    return table


def batch_size(group: Any, name: str | None = None) -> int:
    """Return how many rows of a row group have about BATCH bytes."""
    chunks = (group.column(column_index) for column_index in range(group.num_columns))
    size = sum(
        chunk.total_uncompressed_size for chunk in chunks if name in (None, chunk.path_in_schema.partition(".")[0])
    )
    return max(1, min(10_000, BATCH * group.num_rows // max(size, 1)))


def require_column(file: Path, names: Sequence[str], name: str) -> None:
    """Raise ConfigError if the columns of a file do not include exactly one of this name."""
    if name not in names:
        raise ConfigError(f"{file}: {no_column(name, names)}")
    if names.count(name) > 1:
        raise ConfigError(f"{file}: {names.count(name)} columns have the name {name!r}")


def no_column(name: str, names: Iterable[str]) -> str:
    """Return the reason for which a column is refused."""
    return f"no column {name!r}, but {', '.join(map(repr, names))}: set data.text_key (--text-key)"
