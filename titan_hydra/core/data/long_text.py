"""A .txt file that is too long to be encoded at once: it is cut into pieces where no token crosses the cut.

A piece is encoded together with the character before it and the characters behind it, whose tokens are then left out. So
the tokens of all pieces are those of the whole text, unless a tokenizer has tokens that cross the end of a line, or a
text has neither lines nor words. Imports no torch.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.core.job.config.files import PACKED, kind

from .opening import BOM, unpacked, unreadable
from .shards import BadShard
from .tokenizer import Tokenizer

LONG = 1 << 20  # bytes of a file above which it is cut; of a compressed file, a quarter of this
PIECE = 1 << 14  # bytes of a piece; it ends at the first cut behind this
# a cut is before a letter that begins a line, else before a blank between two words
LINE, WORD = re.compile(r"\n(?=[^\W_])"), re.compile(r"[^\W_](?= [^\W_])")


@dataclass(frozen=True)
class Piece:
    """A part of a document, and the characters around it."""

    text: str
    before: str = ""
    behind: str = ""
    first: bool = True
    last: bool = True

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of this part, with begin-of-text if it is the first part, end-of-text if it is the last. The
        part is encoded with the characters around it, as these decide how its ends are cut into tokens; their own tokens
        are then left out.
        """
        ids = tokenizer.encode(self.before + self.text + self.behind)
        edge = self.text[-1:]
        begin = len(tokenizer.encode(self.before)) if self.before else 0
        end = len(tokenizer.encode(edge + self.behind)) - len(tokenizer.encode(edge)) if self.behind else 0
        bos = [tokenizer.bos_id] if self.first and tokenizer.bos_id is not None else []
        return [*bos, *ids[begin : len(ids) - end], *([tokenizer.eos_id] if self.last else [])]


def is_long(file: Path) -> bool:
    """Whether a file is one long text, which is cut."""
    try:
        return kind(file) in (".txt", ".md") and file.stat().st_size > LONG // (4 if file.suffix in PACKED else 1)
    except OSError:  # reading it fails
        return False


class LongText:
    """A long text in a file. A piece is named by the offset of its first byte."""

    def __init__(self, file: Path):
        """Open the file. Raises BadShard if it cannot be read to its end, or its first piece is not UTF-8."""
        self.file = file
        try:
            self.stream, error = unpacked(file)
        except OSError as found:
            error = found
        if error:
            raise BadShard(file, unreadable(file, error)) from error
        weakref.finalize(self, self.stream.close)
        self.size = self.stream.seek(0, os.SEEK_END)
        self.start = len(BOM) if os.pread(self.stream.fileno(), len(BOM), 0) == BOM else 0
        next(self.pieces())

    def pieces(self, begin: int = 0) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces from one on, each with its offset. Raises BadShard if the text is not UTF-8."""
        begin = max(begin, self.start)
        before = self._before(begin)
        while True:
            end, behind = self._cut((begin // PIECE + 1) * PIECE)
            text = self._read(begin, end - begin)
            yield begin, Piece(text, before, behind, begin == self.start, end >= self.size)
            if end >= self.size:
                return
            begin, before = end, self._before(end)

    def at(self, place: int, of: int) -> int:
        """Return the piece at which the part number `place` of `of` equal parts begins."""
        begin = self._cut(self.size * place // of // PIECE * PIECE)[0] if place else self.start
        return begin if begin < self.size else self.start

    def _cut(self, offset: int) -> tuple[int, str]:
        """Return the first place from `offset` on at which the text is cut, and the characters behind it; these are ""
        if a token may cross the cut.
        """
        if offset >= self.size:
            return self.size, ""
        content = os.pread(self.stream.fileno(), PIECE, offset)
        first = next((byte for byte in range(min(4, len(content))) if content[byte] & 0xC0 != 0x80), 0)
        text = content[first:].decode(errors="ignore")
        if blank := LINE.search(text) or WORD.search(text):
            end = blank.end()
            behind = text[end : end + (1 if text[end - 1] == "\n" else 2)]
            return offset + first + len(text[:end].encode()), behind
        return min(offset + first + len(text.encode()), self.size), ""

    def _before(self, begin: int) -> str:
        """Return the character before a cut; "" if a token may cross the cut."""
        if begin == self.start:
            return ""
        around = os.pread(self.stream.fileno(), 16, max(0, begin - 8))
        text, behind = around[: min(8, begin)].decode(errors="ignore"), around[min(8, begin) :].decode(errors="ignore")
        text = text.lstrip("\ufffd")
        safe = re.match(r"[^\W_]", behind) if text[-1:] == "\n" else re.search(WORD, text[-1:] + behind[:2])
        return text[-1:] if safe else ""

    def _read(self, begin: int, size: int) -> str:
        try:
            return os.pread(self.stream.fileno(), size, begin).decode()
        except UnicodeDecodeError as error:
            wrong_byte = begin + error.start
            raise BadShard(self.file, f"{self.file}: cannot be read: byte {wrong_byte:,} is not UTF-8") from error
