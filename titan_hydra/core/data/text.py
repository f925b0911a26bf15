"""Sources of documents: text files, and datasets of the Hugging Face hub or of a local folder, which are streamed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.parts import HubSource

from . import files
from .long_text import PIECE, LongText, is_long
from .parquet import PageReaders
from .shards import BadRow, BadShard
from .streams import Row

C4 = {"path": "allenai/c4", "subset": "en"}


class TextFiles:
    """Text files as units. If there are fewer files than slots, every n-th row of a file is a unit, so that each slot
    has different rows.
    """

    def __init__(self, key: str, path: str | None, text_key: str, slots: int):
        """Open the files of a path. `units` is the number of parts that slots can read by themselves: files, or every
        `every`-th row of one.
        """
        self.files = files.require(key, path, files.TEXT_SUFFIXES)
        self.text_key = text_key
        self.long = {file for file in self.files if is_long(file)}
        self.open_long = functools.lru_cache(64)(LongText)
        self.signature = {"long_texts": PIECE} if self.long else {}
        self.readers = PageReaders()
        # A .txt file is a single row, so each slot that shares the file reads all of it.
        whole = all(files.kind(file) in (".txt", ".md") for file in self.files)
        self.every = 1 if whole else -(-slots // len(self.files))
        self.units = len(self.files) * self.every

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, Row]]:
        """Yield number and text of the rows of a unit, from the row `start` on; a long text is one row, which is read
        in pieces.
        """
        number, first = divmod(unit, self.every)
        file = self.files[number]
        if file in self.long:
            return iter([] if max(start, first) else [(0, self.open_long(file))])
        if files.kind(file) == ".parquet":
            return files.of_parquet(file, self.text_key, max(start, first), self.every, self.readers)
        return files.rows(file, self.text_key, max(start, first), self.every)


class Hub:
    """The documents of a streamed dataset; units are shards, or every n-th row of a shard if slots outnumber shards."""

    def __init__(self, key: str, data: HubSource, split: str, slots: int):
        """Open the dataset. Raises ConfigError, with the library's message, if dataset, subset or split are not
        available.
        """
        import datasets

        path = data.path or (C4["path"] if data.name == "c4" else None)
        if not path:
            raise ConfigError(f"{key}.path=null: data=hf needs the name of a dataset, or a folder")
        subset = data.subset or (C4["subset"] if data.name == "c4" else None)
        try:
            self.dataset = datasets.load_dataset(path, subset, split=split, streaming=True)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # OSError: offline, or not found
            raise ConfigError(
                f"{key}.path={path} subset={subset} split={split}: {str(error).splitlines()[0]}"
            ) from error
        names = self.dataset.column_names
        if names and data.text_key not in names:
            raise bad_value(f"{key}.text_key", data.text_key, f"{path} has no column of this name", *tuple(names))
        self.text_key, self.where = data.text_key, f"{key}.path={path}"
        self.every = -(-slots // self.dataset.num_shards)
        self.units = self.dataset.num_shards * self.every

    def rows(self, unit: int, start: int = 0) -> files.Rows:
        """Yield number and text, or BadRow, of the rows of a unit, from the row `start` on."""
        shard, first = divmod(unit, self.every)
        where = f"{self.where}: shard {shard}"
        for number, row in self._read(where, shard, max(start, first)):
            try:
                yield number, files.text_in(row, self.text_key)
            except ValueError as error:
                yield number, BadRow(f"{where}, row {number + 1}", error)

    def _read(self, where: str, shard: int, start: int) -> Iterator[tuple[int, dict]]:
        """Yield the number and the content of every n-th row of a shard. Raises BadShard for any error of the library."""
        try:
            rows = iter(self.dataset.shard(self.dataset.num_shards, shard).skip(start))
            yield from zip(range(start, 1 << 62, self.every), islice(rows, 0, None, self.every), strict=False)
        except Exception as error:  # each format and file system raises its own errors
            raise BadShard(
                where, f"{where}: cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
