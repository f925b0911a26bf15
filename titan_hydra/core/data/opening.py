"""Open files that may be compressed, and find the lines and the records of JSON in them. What stands before a damage is
read. Imports no torch.
"""

from __future__ import annotations

import gzip
import io
import mmap
import re
import tempfile
import zlib
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, cast

from titan_hydra.core.job.config.files import PACKED, kind

from .shards import BadRow, BadShard

UNREADABLE = (OSError, EOFError, zlib.error)  # errors that reading a file can raise; EOFError: a truncated file
BOM = b"\xef\xbb\xbf"
# strings, brackets and line ends of JSON
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]|\n', re.DOTALL)
Content = bytes | mmap.mmap


class Zstd(io.RawIOBase):
    """The unpacked content of a .zst file. pyarrow drops what it has unpacked when it meets a damage, so the part with
    the damage is read again byte by byte.
    """

    def __init__(self, file: Path):
        self.file, self.place, self.most = file, 0, 0
        self.stream = self._open()

    def readable(self) -> bool:
        """Return true, as every class of io does that can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as possible. Raises EOFError if the file ends within a frame, OSError if it is
        damaged.
        """
        try:
            content = self.stream.read(self.most or len(buffer))
        except OSError as error:
            if self.most:
                raise EOFError(str(error)) if "Truncated" in str(error) else error from error
            self.stream, self.most = self._open(), 1
            return self.readinto(buffer)
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)

    def _open(self) -> Any:
        import pyarrow

        stream, left = pyarrow.CompressedInputStream(pyarrow.OSFile(str(self.file)), "zstd"), self.place
        while left:
            left -= len(stream.read(min(left, 1 << 16)))
        return stream


def opened(file: Path) -> IO[bytes]:
    """Open a file for reading; .gz and .zst are unpacked."""
    if file.suffix == ".zst":
        return io.BufferedReader(Zstd(file))
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else open(file, "rb")


OPEN_FILES = 64


class OpenFiles:
    """The files that were read last, opened for `os.pread`: at most `most`, as a process has a limited number of
    descriptors.
    """

    def __init__(self, most: int = OPEN_FILES):
        self.most, self.streams = most, dict[Path, IO[bytes]]()

    def descriptor(self, file: Path) -> int:
        """Return the descriptor of a file, which is opened unless it is open."""
        self.streams[file] = self.streams.pop(file, None) or file.open("rb", buffering=0)  # the last used stands last
        if len(self.streams) > self.most:
            self.streams.pop(next(iter(self.streams))).close()
        return self.streams[file].fileno()

    def __del__(self) -> None:
        for stream in self.streams.values():
            stream.close()


def broken_off(file: Path, line: int, error: Exception) -> BadShard:
    """Return the bad row or shard for an error that stands behind `line` lines: a truncated file lacks one row, and all
    behind a damage is lost.
    """
    if line and isinstance(error, EOFError):
        return BadRow(f"{file}:{line + 1}", f"the file is cut off here: {error}")
    return BadShard(
        file, f"{file}:{line + 1}: cannot be read from here on: {error}" if line else unreadable(file, error)
    )


def unreadable(file: Path, error: Exception) -> str:
    """Return the message for a file of which nothing can be read."""
    return f"{file}: cannot be read: {error}"


def numbered_lines(file: Path, start: int = 0, every: int = 1) -> Iterator[tuple[int, bytes | BadRow]]:
    """Yield number and content of the lines start, start + every, ... Raises BadShard if all behind a line is lost."""
    numbers = count()
    try:
        with opened(file) as stream:
            for line, number in islice(zip(stream, numbers, strict=False), start, None, every):
                yield number, line
    except UNREADABLE as error:
        number = next(numbers)
        bad = broken_off(file, number, error)
        if not isinstance(bad, BadRow):
            raise bad from error
        yield number, bad


def unpacked(file: Path) -> tuple[IO[bytes], Exception | None]:
    """Open a file for reading at any place, and return the error that ends it too early, if there is one. A compressed
    file is unpacked into a temporary file.
    """
    if file.suffix not in PACKED:
        return open(file, "rb"), None
    content: Any = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    error = None
    try:
        with opened(file) as stream:
            # unlike `read`, `read1` returns what there is before an error
            content.writelines(iter(lambda: cast(Any, stream).read1(1 << 16), b""))
    except UNREADABLE as found:
        error = found
    content.flush()
    return content, error


def mapped(file: Path) -> tuple[Content, BadShard | None]:
    """Return the content of a file, in mapped memory, and the error that ends it too early, if there is one."""
    content, error = unpacked(file)
    with content:
        size = content.seek(0, io.SEEK_END)
        memory: Content = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if not error:
        return memory, None
    bad = broken_off(file, memory[:].count(b"\n"), error)
    return memory[: memory.rfind(b"\n") + 1], bad


def is_array(file: Path) -> bool:
    """Whether a .json file is an array of records, and not one record a line."""
    if kind(file) != ".json":
        return False
    try:
        with opened(file) as stream:
            return stream.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except UNREADABLE:
        return False


def elements_of_array(content: Content) -> Iterator[tuple[int, int, int]]:
    """Yield line (from 1), begin and end of each element of a JSON array. What is no record of its own, such as a number
    between records or a record without end, is yielded too.
    """
    depth, line, begin, at, end = 0, 1, 0, 1, 0
    for token in TOKEN.finditer(content):
        sign = token[0]
        if sign == b"\n":
            line += 1
        elif sign[0] in b"[{":
            if depth == 1:
                if content[end : token.start()].strip(b" \t\r\n,"):
                    yield at, end, token.start()
                begin, at = token.start(), line
            depth += 1
            end = token.end() if depth == 1 else end
        elif sign[0] in b"]}":
            depth -= 1
            if depth == 1:
                end = token.end()
                yield at, begin, end
            elif not depth:
                if content[end : token.start()].strip(b" \t\r\n,"):
                    yield line, end, token.start()
                end = token.end()
                break
    if depth or content[end:].strip():
        yield line, begin if depth > 1 else end, len(content)
