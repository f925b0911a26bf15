"""Sources of documents that are not embedded: text files, and datasets of the Hugging Face hub (or a local folder) as they stream."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from titan_hydra.config import schema
from titan_hydra.config.status import ConfigError
from titan_hydra.train.data import files

C4 = {"path": "allenai/c4", "subset": "en"}


class TextFiles:
    """Files as units; with fewer files than slots, every n-th row of a file is a unit, so that each slot has its own rows."""

    def __init__(self, key: str, path: str | None, text_key: str, slots: int):
        self.files = files.require(key, path, files.TEXT_SUFFIXES)
        self.text_key = text_key
        whole = all(files.kind(file) in (".txt", ".md") for file in self.files)  # a file of one row is not dealt by rows
        self.every = 1 if whole else -(-slots // len(self.files))
        self.units = len(self.files) * self.every

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, str]]:
        file, first = divmod(unit, self.every)
        return files.rows(self.files[file], self.text_key, max(start, first), self.every)


class Hub:
    """Shards of a streaming dataset as units; with fewer shards than slots, every n-th row of a shard."""

    def __init__(self, data: schema.Data, split: str, slots: int):
        """Raises ConfigError with the library's own words where the dataset, its subset or split cannot be had."""
        import datasets

        self.path = data.path or (C4["path"] if data.name == "c4" else None)
        if not self.path:
            raise ConfigError("data.path=null: data=hf needs the name of a dataset, or a folder")
        subset = data.subset or (C4["subset"] if data.name == "c4" else None)
        try:
            self.dataset = datasets.load_dataset(self.path, subset, split=split, streaming=True)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # OSError: offline, not found
            raise ConfigError(f"data.path={self.path} subset={subset} split={split}: {str(error).splitlines()[0]}") from error
        self.text_key = data.text_key
        self.every = -(-slots // self.dataset.num_shards)
        self.units = self.dataset.num_shards * self.every

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, str]]:
        shard, first = divmod(unit, self.every)
        start = max(start, first)
        rows = iter(self.dataset.shard(self.dataset.num_shards, shard).skip(start))
        for number, row in zip(range(start, 1 << 62, self.every), islice(rows, 0, None, self.every), strict=False):
            yield number, files.column(row, self.text_key, f"data.path={self.path}: shard {shard}, row {number}")
