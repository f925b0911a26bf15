"""Count the text in a source's first documents that a tokenizer encodes as unknown tokens. Imports no torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.files import ROWS as ROWS_OF_TEXT
from titan_hydra.core.job.config.files import data_files, expand, home
from titan_hydra.core.job.config.parts import HubSource, TextSource
from titan_hydra.core.job.config.source import FileSource

from . import files
from .embedded import Embedded
from .tokenizer import Tokenizer, load

# maximum number of files that are read, of rows in each file, and of characters in each row
FILES, ROWS, LENGTH = 8, 32, 10_000
Read = TypeVar("Read")
SHARE = 0.01  # share of unknown tokens, or characters, above which there is a warning


@dataclass(frozen=True)
class Count:
    """The numbers of tokens in some texts."""

    tokens: int
    characters: int
    unknown: int  # number of unknown tokens
    texts: Counter[str]  # how often each unknown text occurs

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of tokens and of characters that are unknown, as one unknown token may be many characters."""
        lost = sum(len(text) * times for text, times in self.texts.items())
        return self.unknown / max(1, self.tokens), lost / max(1, self.characters)


@functools.lru_cache(8)  # cached, because the cells of a sweep have the same data
def count(path: str, texts: tuple[str, ...]) -> Count:
    """Count the tokens of texts, by the tokenizer.json at `path`. Raises ConfigError if this file cannot be read."""
    known = tokenizer_at(path)
    tokens = unknown = 0
    lost = Counter[str]()
    for text in texts if known.unknown is not None else ():
        located = known.locate(text)
        unknown_indices = [index for index, token in enumerate(located.ids) if token == known.unknown]
        tokens, unknown = tokens + len(located.ids), unknown + len(unknown_indices)
        lost.update(text[located.begins[index] : located.ends[index]] for index in unknown_indices)
    return Count(tokens, sum(map(len, texts)), unknown, lost)


@functools.lru_cache(2)
def tokenizer_at(path: str) -> Tokenizer:
    return load(schema.Tokenizer(name="hf", path=path))


def warning(
    key: str, value: str | None, tokenizer: schema.Tokenizer, read: Callable[[], Iterable[Any]]
) -> Iterator[Fault]:
    """Yield a warning if more than SHARE of the texts that `read` returns is unknown to a tokenizer. Texts that cannot
    be read give no warning, as another rule reports them.
    """
    if tokenizer.name != "hf" or not tokenizer.path:
        return  # the tokenizer works on bytes, so it can encode every text
    try:
        counted = count(
            tokenizer.path,
            tuple(
                text[:LENGTH].encode(errors="ignore").decode()
                for text in islice(read(), FILES * ROWS)
                if isinstance(text, str)
            ),
        )
    except Exception:  # files can be damaged in any way
        return
    if max(counted.shares) > SHARE:
        tokens, characters = counted.shares
        most = ", ".join(repr(text[:20]) for text, _ in counted.texts.most_common(8))
        yield Fault(
            key,
            value,
            f"{tokens:.1%} of the tokens and {characters:.1%} of the characters of its first documents are unknown to "
            f"the tokenizer {tokenizer.path}, most often {most}",
        )


def of_some(path: str | None, suffixes: tuple[str, ...], texts: Callable[[Path], Iterable[Read]]) -> Iterable[Read]:
    """Return what `texts(file)` reads from at most FILES files of a source, evenly spaced."""
    return chain.from_iterable(map(texts, some_files(path, suffixes)))


def some_files(path: str | None, suffixes: tuple[str, ...], number: int = FILES) -> list[Path]:
    """Return at most `number` files of a source that are not empty, evenly spaced."""
    files_with_content = [file for file in data_files(path or "", expand(path or ""), suffixes) if file.stat().st_size]
    return files_with_content[:: -(-len(files_with_content) // number) or 1]


def in_files(key: str, source: TextSource, job: schema.Job) -> Iterator[Fault]:
    yield from in_rows(key, source, job.tokenizer, files.TEXT_SUFFIXES, source.text_key)


def in_folder(key: str, source: HubSource, job: schema.Job) -> Iterator[Fault]:
    """Yield a warning about a data set in a local folder. No data set of the hub is read here."""
    if source.path and home(source.path).is_dir():
        yield from in_rows(key, source, job.tokenizer, ROWS_OF_TEXT, source.text_key)


def in_rows(
    key: str, source: FileSource | HubSource, tokenizer: schema.Tokenizer, suffixes: tuple[str, ...], column: str
) -> Iterator[Fault]:
    """Yield a warning about the text in a column of a source's files."""
    return warning(
        f"{key}.path",
        source.path,
        tokenizer,
        lambda: of_some(source.path, suffixes, lambda file: files.beginnings(file, column, ROWS, LENGTH)),
    )


def in_embedded(key: str, source: schema.Source, job: schema.Job) -> Iterator[Fault]:
    yield from warning(f"{key}.name", source.name, job.tokenizer, lambda: Embedded().pieces)


def share_of_unknown(unknown: int, tokens: int) -> str:
    """Return `, N % unknown to the tokenizer` for a message; "" if every token is known."""
    return f", {unknown / tokens:.1%} unknown to the tokenizer" if unknown else ""
