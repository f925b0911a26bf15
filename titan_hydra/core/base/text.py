"""Tables for the terminal, and JSON for scripts. (rich is not used: it needs half a second for 500 rows, which is more
than it takes to read the runs.)
"""

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .amounts import UNKNOWN

COLOURS = {"red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36", "dim": "2", "bold": "1"}
LOG_COLOURS = {  # of the parts of a rank's log
    r"^\d\d:\d\d:\d\d(?=  )": "dim",
    r"(?<=  )(?:validation )?loss \S+": "cyan",
    r"(?<=  )checkpoint saved": "green",
    r"(?i)^warning:.*": "yellow",
}
GAP = "  "  # the text between two columns
NARROWEST = 12  # minimum number of characters to which a column is truncated
BROKEN = 16  # minimum number of characters of a column whose texts are broken into lines
HASH = re.compile("-[0-9a-f]{8}$")  # the end of a run's name
NAMES = 24  # characters that the truncated columns have together before a column is left out


# a whole escape sequence: one that sets a colour or moves the cursor, or one that sets the terminal's title
ESCAPE = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"


def ready_to_print() -> None:
    """Let this program print whatever its streams can encode, and nothing where a stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it stays open as long as the program)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def all_printed(status: int) -> int:
    """Return an exit status, or 1 if what was printed cannot be written, as on a full disk."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        return not_printed(error)
    return status


def not_printed(error: OSError) -> int:
    """Print that standard output cannot be written, and return the exit status. Nothing more is written there."""
    print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python would try again at its end)
    return 1


def unprintable(error: OSError) -> bool:
    """Whether an error seems to come from printing onto a full disk: it names no file."""
    return error.errno == errno.ENOSPC and error.filename is None


def printable(text: str) -> str:
    """Drop escape sequences, control characters except tabs and line ends, and characters that reverse or break a line:
    a sequence could clear the reader's screen, and a reversed line shows another text.
    """
    return re.sub(rf"{ESCAPE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", "", text)


def all_printable(value: Any) -> Any:
    """Return a value of JSON in which every text is printable, names included."""
    if isinstance(value, dict):
        return {printable(name): all_printable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [all_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def coloured() -> bool:
    """Whether the output is a terminal that shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def with_colours(log: str) -> str:
    """Return lines of a rank's log with colours, if the terminal shows them: the time of day, losses, what was saved, and
    warnings.
    """
    if not coloured():
        return log
    for pattern, colour in LOG_COLOURS.items():
        log = re.sub(pattern, f"\x1b[{COLOURS[colour]}m\\g<0>\x1b[0m", log, flags=re.M)
    return log


def to_json(value: Any) -> str:
    """Return the document that a command prints with --json: keys in their order, null for a number that is not finite,
    which JSON lacks.
    """
    return json.dumps(finite_or_null(value), indent=2, allow_nan=False)


def finite_or_null(value: Any) -> Any:
    """Return a value of JSON in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def notes_on_stderr(json: bool) -> Iterator[None]:
    """With --json, print everything except the JSON document to the standard error."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def screen_width() -> int | None:
    """Return the number of columns of the terminal; None for a file or a pipe, which gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


R = TypeVar("R")  # what a table has a row for


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table: its title, its name in JSON and CSV, its value in a row, and how the value is shown, by a
    format or by a function of the row. A `word` is aligned left.
    """

    title: str
    name: str
    value: Callable[[R], Any]
    form: str | Callable[[R], str | None] = ""
    word: bool = False

    def text(self, row: R) -> str | None:
        """Return what is shown of a row; None if its value is not known."""
        if callable(self.form):
            return self.form(row)
        value = self.value(row)
        return None if value is None else format(value, self.form)


def table_of(
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    gives: Sequence[str] = (),
    colours: Sequence[dict[str, str]] = (),
    leaves: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table, as `table` makes them, with a dash for what is not known."""
    texts = [[UNKNOWN if (text := column.text(row)) is None else text for column in columns] for row in rows]
    right = [column.title for column in columns if not column.word]
    return table([column.title for column in columns], texts, right, gives, colours, leaves)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str] = (),
    gives: Sequence[str] = (),
    colours: Sequence[dict[str, str]] = (),
    leaves: Sequence[str] = (),
) -> list[str]:
    """Return a line for the titles and one for each row. The columns in `right` are aligned right. On a terminal the
    columns in `gives` are truncated, in this order, until the lines fit, and if that is not enough those in `leaves` are
    left out; the hash at the end of a run's name stays. Lines that are still too long are broken inside their texts, and
    last between columns, behind the first one again. `colours` has the colours of some columns for each row.
    """
    texts = [[*titles], *([str(cell) for cell in row] for row in rows)]
    screen = screen_width()
    for title in leaves if screen else ():
        if _least(texts, gives) > screen:
            index = texts[0].index(title)
            texts = [[*line[:index], *line[index + 1 :]] for line in texts]
    titles = texts[0]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    if screen:
        words = [title for title in titles if title not in {*right, *gives}]
        widths = _on_screen(widths, [titles.index(title) for title in gives if title in titles], titles, words, screen)
    cells = [
        [_lines(text, width, title in gives) for title, text, width in zip(titles, line, widths, strict=True)]
        for line in texts
    ]
    tones = [dict.fromkeys(titles, "dim"), *(colours or [{}] * (len(texts) - 1))] if coloured() else [{}] * len(texts)
    lines = []
    for block in _blocks(widths, screen):
        lines += [""] if lines else []
        for line, tone in zip(cells, tones, strict=True):
            lines += _printed([(titles[i], line[i], widths[i]) for i in block], right, tone)
    return lines


def _on_screen(
    widths: list[int], gives: list[int], titles: Sequence[str], words: Collection[str], screen: int
) -> list[int]:
    """Return the widths of columns on a screen: as they are; or with less for `gives`, or for `words` too, if the lines
    fit then; or else those with which each column fits beside the first one.
    """
    _narrow(widths, gives, NARROWEST, screen)
    broken = list(widths)
    others = [index for index, title in enumerate(titles) if title in words]
    _narrow(broken, sorted(others, key=lambda index: -widths[index]), BROKEN, screen)
    for candidate in (widths, broken):
        if sum(candidate) + len(GAP) * (len(candidate) - 1) <= screen:
            return candidate
    first = min(widths[0], screen // 2)
    return [first, *(min(width, screen - first - len(GAP)) for width in widths[1:])]


def _printed(columns: list[tuple[str, list[str], int]], right: Collection[str], tone: dict[str, str]) -> list[str]:
    """Return a row of (title, lines of the cell, width) as lines; `tone` has the colours by title."""
    lines = []
    for height in range(max(len(cell) for _, cell, _ in columns)):
        parts = []
        for title, cell, width in columns:
            text = cell[height] if height < len(cell) else ""
            text = text.rjust(width) if title in right else text.ljust(width)
            parts.append(f"\x1b[{COLOURS[tone[title]]}m{text}\x1b[0m" if title in tone else text)
        lines.append(GAP.join(parts).rstrip())
    return lines


def _narrow(widths: list[int], columns: Sequence[int], least: int, screen: int) -> None:
    """Take from the widths of these columns, in this order, what the lines have too much."""
    for index in columns:
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - screen
        widths[index] -= max(min(excess, widths[index] - least), 0)


def _lines(text: str, width: int, cut: bool) -> list[str]:
    """Return a text as lines of at most `width` characters; one line, if it is cut or the name of a run."""
    if len(text) <= width:
        return [text]
    return [_cut(text, width)] if cut or HASH.search(text) else textwrap.wrap(text, width) or [""]


def _blocks(widths: list[int], screen: int | None) -> list[list[int]]:
    """Return the columns of a table in groups that fit the screen; each group begins with the first column."""
    blocks, taken = [[0]], widths[0]
    for index, width in enumerate(widths[1:], 1):
        taken += len(GAP) + width
        if screen and taken > screen and len(blocks[-1]) > 1:
            blocks.append([0])
            taken = widths[0] + len(GAP) + width
        blocks[-1].append(index)
    return blocks


def _least(texts: list[list[str]], gives: Sequence[str]) -> int:
    """Return the number of characters of a table's lines if the columns in `gives` are truncated."""
    columns = list(zip(*texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = max(NARROWEST, NAMES // max(len(gives), 1))
    widths = [min(w, least) if column[0] in gives else w for w, column in zip(widths, columns, strict=True)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def short_name(run: str, width: int) -> str:
    """Return the name of a run; on a terminal it has at most `width` characters, with all of its hash."""
    return _cut(run, width) if screen_width() and len(run) > width else run


def _cut(text: str, width: int) -> str:
    """Return the first characters of a text, and all of the hash at its end, by which a run is named."""
    end = text[-9:] if HASH.search(text) else ""
    return text[: width - 1 - len(end)] + "\N{HORIZONTAL ELLIPSIS}" + end
