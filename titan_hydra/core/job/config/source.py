"""The keys of data: of one source, and of what a job does with its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .field import key
from .ranges import COUNT, NATURAL, PATH, Interval
from .registry import DATA_SOURCES, Names


@dataclass
class Source:
    name: str = key(..., "source of the samples", choices=Names(DATA_SOURCES))


@dataclass
class FileSource(Source):
    path: str | None = key(None, "files; a glob may be used", PATH, reads="data")
    validation_path: str | None = key(
        None, "files held out for validation", PATH, identity=False, changes="held-out loss", reads="validation"
    )


@dataclass
class DigestedSource(FileSource):
    """A source whose samples are the experiment itself: other contents of the same files are another run."""

    digest: str | None = key(None, "digest of the files in `path`; filled in by launch.py")


@dataclass
class Part(Source):
    weight: float = key(
        ...,
        "this source's share of the samples, relative to the weights of the other sources",
        Interval(0, 1_000_000, open_low=True),
    )


@dataclass
class Data(Source):
    name: str = key(..., "source of the samples", choices=Names(DATA_SOURCES, more=("mixture",)))
    seq_len: int = key(2048, "number of tokens in a sample", Interval(2, 2**31 - 1), changes="learning and work")
    local_batch: int = key(
        8,
        "samples that a data-parallel rank processes at a time; gradient accumulation makes up the rest of "
        "the global batch",
        COUNT,
        changes="technique",
    )
    global_batch: int | None = key(
        None, "samples of an optimizer step over all ranks; null: one local_batch on each data-parallel rank", COUNT
    )
    samples: int | None = key(
        None,
        "number of samples of a run that reads each of them once; filled in by launch.py for steps=epoch",
        NATURAL,
        identity="if set",
    )
    document_mask: bool = key(
        False,
        "attention stays within documents, and positions restart at the beginning of each document",
        changes="learning and work",
    )
    shuffle: bool = key(True, "visit documents or samples in an order drawn from the seed")
    prefetch: int = key(4, "number of batches that are prepared ahead", Interval(1, 10_000), identity=False)
    mixture: dict[str, Any] = key(
        dict,
        "data=mixture: the sources by name, each with a weight and its own keys: "
        "+data.mixture={web: {weight: 0.7, name: c4}, own: {weight: 0.3, name: tokens, path: own.bin}}",
        only=("mixture",),
        entry=Part,
    )
    shuffle_buffer: int = key(
        0, "number of documents of a stream that are shuffled together; 0: they keep their order in the shard", NATURAL
    )
    max_bad_shards: int = key(
        0,
        "number of files or shards that may be left out because they are missing or damaged, each with a warning",
        NATURAL,
        identity=False,
    )
    max_bad_rows: int = key(
        0,
        "number of rows that may be left out because they cannot be used, each with a warning; counted over all ranks "
        "and the whole run",
        NATURAL,
        identity=False,
    )


def data_sources(data: Data) -> dict[str, Any]:
    """Return the sources of a job by the key that holds each: the parts of a mixture, or `data` itself."""
    return (
        {f"data.mixture.{name}": data.mixture[name] for name in sorted(data.mixture)}
        if data.name == "mixture"
        else {"data": data}
    )
