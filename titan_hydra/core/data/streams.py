"""Endless streams of packed documents: one for every slot of the global batch, each with its own position in the text.

A source is cut into numbered units (a file, a shard, every n-th row of a shard). Slot k of G takes the units at
positions k, k + G, k + 2G, ... of the endless sequence of epochs, each of which has its own order. With a shuffle
buffer, documents are taken in blocks. The random order of a block follows from the position at which the block begins,
so the state of the buffer is that position and an index in the block. Nothing depends on ranks: a slot reads the same
documents on any rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import numpy as np

from titan_hydra.core.base.errors import ConfigError

from .long_text import LongText
from .permutation import permute
from .shards import BadRow, BadShard, BadShards
from .tokenizer import Tokenizer

Row = str | LongText | BadRow


class Documents(Protocol):
    """Texts in numbered units, such as files. Each slot reads its own units, in its own order."""

    units: int

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, Row]]:
        """Yield row number and text of a unit's rows from `start` on, ascending; a BadRow for a row that cannot be used.
        Each call yields the same rows.
        """


START = {"turn": 0, "row": 0, "place": 0, "piece": 0, "token": 0}


@dataclass
class Document:
    # the document's block begins in the unit of this turn: the stream has read this number of units before it
    turn: int
    row: int  # row of that unit at which the block begins
    place: int  # index of the document in the shuffled block
    piece: int  # the piece of a long text; 0 for a whole document
    tokens: np.ndarray
    text: LongText | None = None  # the long text that the piece is of


class Streams:
    """The streams of some slots. The state of a slot is the position of its next sample: the turn, row and place of a
    document, and a token in it.
    """

    def __init__(
        self,
        source: Documents,
        tokenizer: Tokenizer,
        slots: range,
        global_batch: int,
        seq_len: int,
        seed: int | None,
        buffer: int,
        bad: BadShards,
    ):
        """Create the streams. Without a `seed`, units are read in their order."""
        of_source = getattr(source, "signature", {})
        self.signature = {"units": source.units, "tokenizer": tokenizer.sha256} | of_source
        self.separators, self.tokenizer = (tokenizer.bos_id, tokenizer.eos_id), tokenizer.sha256
        self.streams = {
            slot: Stream(source, tokenizer, slot, global_batch, seq_len, seed, buffer, bad) for slot in slots
        }

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray]:
        return {"tokens": self.streams[slot].sample()}

    def state(self, slot: int) -> dict[str, int]:
        return dict(self.streams[slot].state)

    def load(self, slot: int, state: dict[str, int]) -> None:
        self.streams[slot].load(state)


class Stream:
    """Consecutive documents cut into samples of seq_len + 1 tokens. The last token of a sample is the first of the next,
    so that every token is predicted exactly once. The state holds no tokens; they are encoded again.
    """

    def __init__(
        self,
        source: Documents,
        tokenizer: Tokenizer,
        slot: int,
        slots: int,
        seq_len: int,
        seed: int | None,
        buffer: int = 0,
        bad: BadShards | None = None,
    ):
        """Begin at the first document of `slot`, one of `slots` that share the source. Documents are shuffled in blocks
        of `buffer`; with seed None, they keep their order.
        """
        self.source, self.tokenizer, self.slot, self.slots, self.seq_len, self.seed = (
            source,
            tokenizer,
            slot,
            slots,
            seq_len,
            seed,
        )
        self.block, self.bad = max(buffer, 1), bad or BadShards()
        self.load(START)

    def load(self, state: dict[str, int]) -> None:
        self.state = START | state
        self.begun: list[Document] = []  # documents that were taken and whose tokens are not used up
        self.coming = self._documents(**{key: value for key, value in self.state.items() if key != "token"})

    def sample(self) -> np.ndarray:
        """Return the next seq_len + 1 tokens. Raises ConfigError if the source has no text at all."""
        if not self.begun:
            self._begin()
        parts, missing, start = [], self.seq_len + 1, self.state["token"]
        for index in count():
            if index == len(self.begun):
                self.begun.append(next(self.coming))
            parts.append(self.begun[index].tokens[start : start + missing])
            missing, start = missing - len(parts[-1]), 0
            if not missing:
                break
        self._advance()
        return np.concatenate(parts)

    def _begin(self) -> None:
        """Take the first document. If there are fewer units than slots, the slots that share a unit begin at different
        positions in it.
        """
        self.begun.append(next(self.coming))
        if self.state == START and self.source.units < self.slots:
            sharers, number = -(-self.slots // self.source.units), self.slot // self.source.units
            if text := self.begun[0].text:
                first = self.begun[0]
                position = {"turn": first.turn, "row": first.row, "place": first.place}
                self.load(position | {"piece": text.at(number, sharers)})
                self.begun.append(next(self.coming))
            else:
                self.state["token"] = len(self.begun[0].tokens) * number // sharers

    def _advance(self) -> None:
        token = self.state["token"] + self.seq_len
        while token >= len(self.begun[0].tokens):
            token -= len(self.begun.pop(0).tokens)
        document = self.begun[0]
        self.state = {key: getattr(document, key) for key in ("turn", "row", "place", "piece")} | {"token": token}

    def _documents(self, turn: int, row: int, place: int, piece: int = 0) -> Iterator[Document]:
        """Yield the documents of all blocks from a position on, without end; a long text piece by piece."""
        texts = self._texts(turn, row)
        while True:
            block = list(islice(texts, self.block))
            turn, row, _ = block[0]
            for number in range(place, len(block)):
                text = block[permute(number, len(block), self.seed, self.slot, turn, row)][2]
                if isinstance(text, str):
                    tokens = np.array(self.tokenizer.document(text), dtype=np.int32)
                    yield Document(turn, row, number, 0, tokens)
                else:
                    for begin, ids in self._pieces(text, piece):
                        yield Document(turn=turn, row=row, place=number, piece=begin, tokens=ids, text=text)
                piece = 0
            place = 0

    def _pieces(self, text: LongText, begin: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield offset and tokens of the pieces of a long text."""
        try:
            for offset, piece in text.pieces(begin):
                yield offset, np.array(piece.encode(self.tokenizer), dtype=np.int32)
        except BadShard as error:
            self.bad.add(error)

    def _texts(self, first: int, row: int) -> Iterator[tuple[int, int, str | LongText]]:
        """Yield turn, row and text of the documents from a position on, without end."""
        empty = 0  # number of units in a row that have no text
        for turn in count(first):
            try:
                for number, text in self.source.rows(self._unit(turn), row):
                    if isinstance(text, BadRow):
                        self.bad.add(text)
                    elif text:
                        empty = -1
                        yield turn, number, text
            except BadShard as error:
                self.bad.add(error)
            empty, row = empty + 1, 0
            if empty == self.source.units and not self._any_text():
                raise ConfigError("data.path: no document with text in it")

    def _unit(self, turn: int) -> int:
        """Return the unit that this slot reads after `turn` other units. Even without a seed, epochs begin at different
        units; otherwise a slot might read the same few units in each epoch.
        """
        epoch, position = divmod(self.slot + turn * self.slots, self.source.units)
        if self.seed is None:
            start = permute(0, self.source.units, epoch) if epoch else 0
            return (start + position) % self.source.units
        return permute(position, self.source.units, self.seed, epoch)

    def _any_text(self) -> bool:
        return any(self._has_text(unit) for unit in range(self.source.units))

    def _has_text(self, unit: int) -> bool:
        try:
            return any(text and not isinstance(text, BadRow) for _, text in self.source.rows(unit))
        except BadShard:
            return False
