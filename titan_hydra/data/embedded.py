"""The embedded corpus: Python's own manual and standard library, real text on every machine without a download.

Prose comes from the language manual (`pydoc_data.topics`) and from the docstrings and comments in the library's sources. The corpus is that
of the running Python, so two Python versions differ slightly: compare losses within one version.
"""
from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.base.errors import ConfigError

# What every installation has. Left out: test suites, tkinter, idlelib and the like, which distributions ship apart, and
# encodings, which is tables.
PACKAGES = (".", "asyncio", "collections", "concurrent/futures", "ctypes", "email", "html", "http", "importlib", "json", "logging",
            "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml/dom", "xml/etree", "xml/sax",
            "xmlrpc", "zoneinfo")
TABLES = {"html/entities.py", "locale.py"}
PIECE = 8192  # bytes: longer texts are cut, so that a slot of a batch does not read one file for a whole run
HELD_OUT = 20  # one text in so many is kept for validation


@dataclass(frozen=True)
class Piece:
    """Piece number `index` of a text; path is None for a topic of the manual."""

    name: str
    path: Path | None
    index: int

    def read(self) -> str:
        data = self.path.read_bytes() if self.path else topics()[self.name].encode()
        return data[_boundary(data, self.index):_boundary(data, self.index + 1)].decode(errors="replace")


class Embedded:
    """The corpus as a source of documents: one unit is one piece."""

    def __init__(self, split: str = "train") -> None:
        """List the pieces; files are read when they are needed. Raises ConfigError if this Python has no sources."""
        self.pieces = [Piece(name, path, index) for name, path, size in texts() if held_out(name) == (split == "validation")
                       for index in range(-(-size // PIECE))]
        if not self.pieces:
            raise ConfigError("data=embedded: this Python ships neither its manual nor its library's sources; use data=text_files")

    @property
    def units(self) -> int:
        return len(self.pieces)

    def rows(self, unit: int, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the one text of a unit, numbered 0."""
        if start == 0:
            yield 0, self.pieces[unit].read()


def texts() -> Iterator[tuple[str, Path | None, int]]:
    """Yield name, file and size of every text, in an order that depends only on the names."""
    for name in sorted(topics()):
        yield name, None, len(topics()[name].encode())
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((library / package).glob("*.py")):
            name = path.relative_to(library).as_posix()
            if name not in TABLES and not name.startswith("_sysconfigdata"):
                yield name, path, path.stat().st_size


def topics() -> dict[str, str]:
    """Return the language manual by topic; empty if a distribution omits it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return topics


def held_out(name: str) -> bool:
    """Whether a text is for validation, decided by its name, so that adding texts moves no other."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def _boundary(data: bytes, index: int) -> int:
    """Return the offset of piece `index`: after the first blank line at or behind index * PIECE."""
    if index == 0:
        return 0
    found = data.find(b"\n\n", index * PIECE)
    return len(data) if found < 0 else found + 2
