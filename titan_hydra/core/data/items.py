"""Samples by number, each computed or read on demand: files of tokens, and synthetic tokens."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import expand

from . import files
from .indexed import document_starts, index_of, indexed_header
from .opening import OpenFiles
from .permutation import permute
from .shards import BadShard, BadShards

MAPPED = 64  # maximum number of indexes whose documents stay in memory
TRIES = 1000  # maximum number of samples that are tried as a replacement for an unreadable one


@dataclass(frozen=True)
class Shard:
    file: Path
    header: dict
    usable: bool  # whether the file matches its header
    index: Path | None = None  # the index of Megatron-LM that describes the file


class Numbered:
    """Base class of sources in which a sample depends only on the seed and its number, so that a slot has no state."""

    separators: tuple[int | None, int | None] = (None, None)
    tokenizer: str | None = None  # None: the ids need not stand for text

    def state(self, slot: int) -> dict[str, int]:
        return {}

    def load(self, slot: int, state: dict[str, int]) -> None:
        """Do nothing, as there is no state."""


class TokenFiles(Numbered):
    """Files of `titan data encode` or of Megatron-LM (indexed.py); sample i of a file is its tokens
    [i * S, i * S + S], S = data.seq_len.

    The numbers of samples continue from one epoch to the next, without end. A sample in a bad file is replaced by a
    random one, so that the other samples keep their numbers; in a run that reads each sample once, by none.
    """

    def __init__(
        self,
        key: str,
        path: str | None,
        vocab_size: int,
        seq_len: int,
        seed: int | None,
        bad: BadShards | None = None,
        documents: bool = False,
        once: bool = False,
    ):
        """Read the headers. With `documents`, samples of files whose index has the documents number them. With `once`, a
        sample that cannot be read is left out. Raises ConfigError if a file does not match its header, or holds ids for
        which the model has no row.
        """
        self.key, self.vocab_size, self.seq_len, self.seed, self.bad = (
            key,
            vocab_size,
            seq_len,
            seed,
            bad or BadShards(),
        )
        self.shards = [shard for file in self._files(path) if (shard := self._shard(file))]
        headers = [shard.header for shard in self.shards]
        if len({(header["tokenizer_sha256"], header["bos_id"], header["eos_id"]) for header in headers}) > 1:
            raise ConfigError(f"{key}={path}: the files were encoded with different tokenizers")
        if not any(shard.usable for shard in self.shards):
            raise ConfigError(f"{key}={path}: no file that can be read")
        bos, eos = headers[0]["bos_id"], headers[0]["eos_id"]
        # GPT-2 has one token for both; it stands once between documents, and ends them
        self.separators, self.tokenizer = (None if bos == eos else bos, eos), headers[0]["tokenizer_sha256"]
        # Number of samples up to the end of each file.
        self.ends = list(accumulate((header["tokens"] - 1) // seq_len for header in headers))
        if not self.ends[-1]:
            tokens = sum(header["tokens"] for header in headers)
            raise ConfigError(f"{key}={path}: {tokens} tokens, fewer than one sample of data.seq_len={seq_len} + 1")
        self.signature = {"samples": self.ends[-1]}
        self.open_files = OpenFiles()
        self.documents, self.once = documents, once
        self._starts = functools.lru_cache(MAPPED)(lambda shard: document_starts(self.shards[shard].index))

    def in_epoch(self) -> int:
        return self.ends[-1]

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray] | None:
        """Return the tokens of a sample. If its file cannot be read, another sample of the same epoch takes its place; none
        does in a run that reads each sample once.
        """
        epoch, index = divmod(number, self.ends[-1])
        if self.seed is not None:
            index = permute(index, self.ends[-1], self.seed, epoch)
        for another in range(1, TRIES):
            tokens = self._read(index)
            if tokens is not None:
                return {"tokens": tokens} | self._documents(index)
            if self.once:
                return None
            index = permute(number % self.ends[-1], self.ends[-1], self.seed or 0, epoch, another)
        raise ConfigError(f"{self.key}: {TRIES} samples in a row lie in files that cannot be read")

    def _read(self, index: int) -> np.ndarray | None:
        """Return the tokens of a sample in the unshuffled order; None if they cannot be read."""
        shard, sample = files.place_in(self.ends, index)
        file, header = self.shards[shard].file, self.shards[shard].header
        if not self.shards[shard].usable:
            return None
        dtype, first = np.dtype(header["dtype"]), sample * self.seq_len
        size = (self.seq_len + 1) * dtype.itemsize
        try:
            content = os.pread(self.open_files.descriptor(file), size, first * dtype.itemsize)
            if len(content) < size:
                raise BadShard(file, f"{self.key}={file}: it has been cut off since it was opened")
            tokens = np.frombuffer(content, dtype)
            wrong = tokens.argmin() if tokens.min() < 0 else tokens.argmax()
            if not 0 <= tokens[wrong] < self.vocab_size:
                ids = header["vocab_size"] or self.vocab_size
                raise BadShard(
                    file, f"{self.key}={file}: id {tokens[wrong]} at token {first + wrong}, not one of {ids}: damaged"
                )
        except OSError as error:
            self.bad.add(BadShard(file, f"{self.key}={file}: cannot be read: {error.strerror}"))
        except BadShard as error:
            self.bad.add(error)
        else:
            return tokens
        return None

    def _documents(self, index: int) -> dict[str, np.ndarray]:
        """Return the number of the document of each token of a sample; {} if they are not asked for, or not known."""
        shard, sample = files.place_in(self.ends, index)
        if not self.documents or self.shards[shard].index is None:
            return {}
        tokens = np.arange(sample * self.seq_len, (sample + 1) * self.seq_len + 1)
        return {"documents": self._starts(shard).searchsorted(tokens, "right").astype(np.int32)}

    def _files(self, path: str | None) -> list[Path]:
        """Return the files of a path, including missing ones whose headers exist."""
        existing = files.require(self.key, path, (".bin",))
        headers = expand(path if Path(path).expanduser().is_dir() else f"{path}.json")
        named = {header.with_suffix("") for header in headers if header.name.endswith(".bin.json")}
        return sorted({*existing, *named})

    def _shard(self, file: Path) -> Shard | None:
        """Return a file with its header; None if the header cannot be read. Raises ConfigError if the model has too few
        ids, or if there are too many bad shards.
        """
        try:
            header = header_at(file)
        except BadShard as error:
            self.bad.add(BadShard(file, f"{self.key}={error}"))
            return None
        if header["vocab_size"] and header["vocab_size"] > self.vocab_size:
            raise ConfigError(
                f"{self.key}={file}: encoded with {header['vocab_size']} ids, more than model.vocab_size={self.vocab_size}"
            )
        wrong = wrong_size(file, header)
        if wrong:
            self.bad.add(BadShard(file, f"{self.key}={wrong}"))
        return Shard(file, header, not wrong, index_of(file))


def wrong_size(file: Path, header: dict[str, Any]) -> str | None:
    """Return in what a file of token ids differs from its header; None if it has the right size."""
    tokens, dtype, described = header["tokens"], np.dtype(header["dtype"]), index_of(file) or Path(f"{file}.json")
    size = file.stat().st_size if file.exists() else None
    if size == tokens * dtype.itemsize:
        return None
    actual = "no such file" if size is None else f"{size} bytes"
    return f"{file}: {actual}, but {described.name} lists {tokens} tokens in {dtype}"


def header_at(file: Path) -> dict[str, Any]:
    """Read the header of a file of token ids. Raises BadShard if it is missing or damaged, or if the ids are no integers."""
    if index := index_of(file):
        try:
            return indexed_header(index)
        except (OSError, ValueError) as error:
            raise BadShard(file, f"{file}: its index {index.name} cannot be used: {error}") from error
    path = Path(f"{file}.json")
    try:
        header = json.loads(path.read_text())
        dtype = np.dtype(header["dtype"])
        _check_header(header)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadShard(
            file,
            f"{file}: its header {path.name} is missing or damaged ({error}); "
            "write both with `titan data encode`, or as docs/data.md describes for your own token ids",
        ) from error
    if dtype.kind not in "iu":
        raise BadShard(file, f"{file}: dtype {header['dtype']} in {path.name}: token ids are integers, such as uint32")
    return header


def _check_header(header: dict[str, Any]) -> None:
    """Raise ValueError if a header has values that no file of token ids can have, KeyError if it lacks one."""
    tokens, size, digest = header["tokens"], header["vocab_size"], header["tokenizer_sha256"]
    for name, value, least in (("tokens", tokens, 0), ("vocab_size", size, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, not a whole number from {least}")
    for name in ("bos_id", "eos_id"):
        value = header[name]
        if value is not None and (type(value) is not int or not 0 <= value < size):
            raise ValueError(f"{name} is {value!r}, neither null nor an id below vocab_size={size}")
    if not isinstance(digest, str | None):
        raise ValueError(f"tokenizer_sha256 is {digest!r}, not a text")


def dice_of(seed: int, number: int) -> np.random.Generator:
    """Return the random generator of a sample, which depends only on `seed` and `number`."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), number], dtype=np.uint64)))


class Synthetic(Numbered):
    """Random tokens, uniform over the vocabulary: to measure speed, not to learn from."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int):
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed
        self.signature = {"vocab_size": vocab_size}

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray]:
        return {"tokens": dice_of(self.seed, number).integers(self.vocab_size, size=self.seq_len + 1)}
