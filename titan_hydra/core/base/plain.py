"""Read files that somebody else may have made. A named pipe would block a reader, and a device has no end; so only plain
files are opened, and only a bounded part of each is read.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST = 64 << 20  # maximum size of a small file, such as a record in JSON, in bytes
MOST_ROWS = 1 << 30  # maximum size of a file of rows
MOST_ROW = 1 << 20  # maximum size of one row


class NotPlain(ValueError):
    """What a path leads to is no plain file, or it is larger than any file of its kind."""


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises NotPlain for anything else; OSError if it is missing, is a folder or may not
    be read.
    """
    try:
        kind = os.stat(path).st_mode  # before opening, as opening a device can have effects
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise NotPlain(f"{path} is not a plain file")
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG):
            raise NotPlain(f"{path}: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was exchanged meanwhile
        file.close()
        raise NotPlain(f"{path} is not a plain file")
    return file


def read_plain(path: Path, most: int = MOST) -> bytes:
    """Return the content of a plain file. Raises NotPlain for anything else, and for more than `most` bytes; OSError as
    `open_plain` does.
    """
    with open_plain(path) as file:
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise NotPlain(f"{path} is larger than {most:,} bytes")
    return content


def plain_lines(path: Path, most: int = MOST_ROWS) -> Iterator[bytes]:
    """Yield the lines of a plain file with their ends; a longer line than MOST_ROW in pieces. Raises as `read_plain`."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise NotPlain(f"{path} is larger than {most:,} bytes")
        while line := file.readline(MOST_ROW):
            yield line
