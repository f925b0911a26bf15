"""Samples by number, each computed or read where it lies: files of tokens, and synthetic tokens."""
from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from titan_hydra.config.status import ConfigError
from titan_hydra.train.data import files
from titan_hydra.train.data.permutation import permute


class TokenFiles:
    """Files written by `titan tokenizer encode`, mapped into memory; sample i of a file is its tokens [i * S, i * S + S].

    Step t's slot k takes item t * global_batch + k of the endless sequence of epochs, so the step is all the state there is.
    """

    def __init__(self, key: str, path: str | None, vocab_size: int, global_batch: int, seq_len: int, seed: int | None):
        """Raises ConfigError where a file is not what its header says, or holds ids that the model has no row for."""
        self.key, self.global_batch, self.seq_len, self.seed = key, global_batch, seq_len, seed
        found = files.require(key, path, (".bin",))
        headers = [self._header(file, vocab_size) for file in found]
        if len({(header["tokenizer_sha256"], header["bos_id"], header["eos_id"]) for header in headers}) > 1:
            raise ConfigError(f"{key}={path}: the files were encoded with different tokenizers")
        self.bos_id, self.eos_id = headers[0]["bos_id"], headers[0]["eos_id"]
        self.tokens = [np.memmap(file, dtype=header["dtype"], mode="r") for file, header in zip(found, headers, strict=True)]
        self.ends = list(accumulate((len(tokens) - 1) // seq_len for tokens in self.tokens))  # samples up to and with each file
        if not self.ends[-1]:
            raise ConfigError(f"{key}={path}: {sum(map(len, self.tokens))} tokens, fewer than one sample of data.seq_len={seq_len} + 1")
        self.signature = {"samples": self.ends[-1]}

    def sample(self, step: int, slot: int) -> np.ndarray:
        epoch, index = divmod(step * self.global_batch + slot, self.ends[-1])
        if self.seed is not None:
            index = permute(index, self.ends[-1], self.seed, epoch)
        file = bisect_right(self.ends, index)
        start = (index - (self.ends[file - 1] if file else 0)) * self.seq_len
        return self.tokens[file][start:start + self.seq_len + 1]

    def state(self, slot: int) -> dict[str, int]:
        return {}

    def load(self, slot: int, state: dict[str, int]) -> None:
        """Nothing: the step says it all."""

    def _header(self, file: Path, vocab_size: int) -> dict:
        path = Path(f"{file}.json")
        try:
            header = json.loads(path.read_text())
            dtype, tokens = np.dtype(header["dtype"]), header["tokens"]
            header["bos_id"], header["eos_id"], header["tokenizer_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.key}={file}: its header {path.name} is missing or damaged ({error}); "
                              "write both with `titan tokenizer encode`") from error
        if tokens * dtype.itemsize != file.stat().st_size:
            raise ConfigError(f"{self.key}={file}: {file.stat().st_size} bytes, but {path.name} tells of {tokens} tokens in {dtype}")
        if header["vocab_size"] > vocab_size:
            raise ConfigError(f"{self.key}={file}: encoded with {header['vocab_size']} ids, more than model.vocab_size={vocab_size}")
        return header


class Synthetic:
    """Random tokens, uniform over the vocabulary, a function of seed and sample number: for measuring speed, nothing to learn."""

    bos_id = eos_id = None

    def __init__(self, vocab_size: int, global_batch: int, seq_len: int, seed: int):
        self.vocab_size, self.global_batch, self.seq_len, self.seed = vocab_size, global_batch, seq_len, seed
        self.signature = {"vocab_size": vocab_size}

    def sample(self, step: int, slot: int) -> np.ndarray:
        key = np.array([self.seed % (1 << 64), step * self.global_batch + slot], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).integers(self.vocab_size, size=self.seq_len + 1)

    def state(self, slot: int) -> dict[str, int]:
        return {}

    def load(self, slot: int, state: dict[str, int]) -> None:
        """Nothing: the step says it all."""
