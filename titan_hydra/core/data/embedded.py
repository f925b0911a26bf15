"""The embedded corpus: pages and source files of this project, as they were when assets/corpus.txt.gz was made. It is
the same for every version of Python.

The file is a list of texts between form feeds, each under its name, and compressed, so that a search in the source
code does not find everything twice. Editing it changes the losses of all runs with data=embedded.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator

from titan_hydra.core.job.config.files import ASSETS

# Texts are cut at the first blank line after this many characters; else a slot might read one text for a whole run.
PIECE = 4096
HELD_OUT = 20  # about one of this number of texts is kept for validation


class Embedded:
    """The corpus as a source of documents; each unit is a piece of a text."""

    def __init__(self, split: str = "train") -> None:
        texts = text_of_corpus().split("\f")
        self.pieces = [piece for text in texts if held_out(text) == (split == "validation") for piece in _cut(text)]
        self.units = len(self.pieces)

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the unit's single row: 0, and its text."""
        if start == 0:
            yield 0, self.pieces[unit]


def text_of_corpus() -> str:
    """Return the whole corpus."""
    return gzip.decompress((ASSETS / "corpus.txt.gz").read_bytes()).decode()


def held_out(text: str) -> bool:
    """Whether a text is for validation, decided by its name."""
    return hashlib.sha256(text.partition("\n")[0].encode()).digest()[0] % HELD_OUT == 0


def _cut(text: str) -> Iterator[str]:
    """Cut a text at the first blank line after each PIECE characters."""
    start = 0
    while start < len(text):
        blank = text.find("\n\n", start + PIECE)
        end = len(text) if blank < 0 else blank + 2
        yield text[start:end]
        start = end
