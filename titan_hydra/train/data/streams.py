"""Endless streams of packed documents: one for every slot of the global batch, each with its own place in the text.

A source is cut into numbered units (a file, a shard, every n-th row of a shard). Slot k of G takes the units at positions k, k + G,
k + 2G, ... of the endless sequence of epochs, each epoch in an order of its own. Nothing here knows of ranks, so who reads a slot
does not change what the slot reads.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from titan_hydra.config.status import ConfigError
from titan_hydra.train.data.permutation import permute
from titan_hydra.train.tokenizer import Tokenizer


class Source(Protocol):
    units: int

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, str]]:
        """Row numbers, rising, and texts of a unit, from row `start` on. The same every time."""


@dataclass
class Document:
    turn: int  # how many units the stream has begun before this document's
    row: int
    tokens: np.ndarray


class Streams:
    """The streams of some slots; a slot's state is where its next sample begins: turn, row, and token in the document."""

    def __init__(self, source: Source, tokenizer: Tokenizer, slots: range, global_batch: int, seq_len: int, seed: int, shuffle: bool):
        self.signature = {"units": source.units}
        self.streams = {slot: Stream(source, tokenizer, slot, global_batch, seq_len, seed if shuffle else None) for slot in slots}

    def sample(self, step: int, slot: int) -> np.ndarray:
        return self.streams[slot].sample()

    def state(self, slot: int) -> dict[str, int]:
        return dict(self.streams[slot].state)

    def load(self, slot: int, state: dict[str, int]) -> None:
        self.streams[slot].load(state)


class Stream:
    """Documents back to back, cut into samples of seq_len + 1 tokens; a sample's last token is the next one's first.

    So every token is predicted exactly once, and the state needs no leftover tokens: they are encoded again when it is loaded.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, slot: int, slots: int, seq_len: int, seed: int | None):
        self.source, self.tokenizer, self.slot, self.slots, self.seq_len, self.seed = source, tokenizer, slot, slots, seq_len, seed
        self.load({"turn": 0, "row": 0, "token": 0})

    def load(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.begun: list[Document] = []  # documents that the next sample takes from
        self.coming = self._documents(state["turn"], state["row"])

    def sample(self) -> np.ndarray:
        """The next seq_len + 1 tokens. Raises ConfigError where the source holds no text at all."""
        if not self.begun:
            self._begin()
        parts, missing, start = [], self.seq_len + 1, self.state["token"]
        for index in count():
            if index == len(self.begun):
                self.begun.append(next(self.coming))
            parts.append(self.begun[index].tokens[start:start + missing])
            missing, start = missing - len(parts[-1]), 0
            if not missing:
                break
        self._advance()
        return np.concatenate(parts)

    def _begin(self) -> None:
        """Take the first document. Where there are fewer units than slots, slots that share one begin at different places of it."""
        self.begun.append(next(self.coming))
        if self.state == {"turn": 0, "row": 0, "token": 0} and self.source.units < self.slots:
            sharers = -(-self.slots // self.source.units)
            self.state["token"] = len(self.begun[0].tokens) * (self.slot // self.source.units) // sharers

    def _advance(self) -> None:
        token = self.state["token"] + self.seq_len
        while token >= len(self.begun[0].tokens):
            token -= len(self.begun.pop(0).tokens)
        self.state = {"turn": self.begun[0].turn, "row": self.begun[0].row, "token": token}

    def _documents(self, first: int, row: int) -> Iterator[Document]:
        empty = 0  # units without text in a row
        for turn in count(first):
            for number, text in self.source.rows(self._unit(turn), row):
                if text:
                    empty = -1
                    yield Document(turn, number, np.array(self.tokenizer.document(text), dtype=np.int32))
            empty, row = empty + 1, 0
            if empty == self.source.units and not self._any_text():
                raise ConfigError("data.path: no document with text in it")

    def _unit(self, turn: int) -> int:
        """The unit of a turn. Unshuffled, epochs still begin at different units, or a slot could meet the same few in each."""
        epoch, place = divmod(self.slot + turn * self.slots, self.source.units)
        if self.seed is None:
            start = permute(0, self.source.units, epoch) if epoch else 0
            return (start + place) % self.source.units
        return permute(place, self.source.units, self.seed, epoch)

    def _any_text(self) -> bool:
        return any(text for unit in range(self.source.units) for _, text in self.source.rows(unit))
