"""Tables for the terminal. (For 500 rows, rich needs half a second, longer than reading the runs takes.)"""

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence

COLOURS = {"red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36", "dim": "2", "bold": "1"}
GAP = "  "  # the text between two columns
NARROWEST = 12  # characters that a truncated column keeps


def printable(text: str) -> str:
    """Drop control characters except tabs and line ends, as an escape sequence could clear the reader's screen."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str] = (),
    gives: Sequence[str] = (),
    colours: Sequence[dict[str, str]] = (),
) -> list[str]:
    """Return a line for the titles and one for each row. The columns in `right` are aligned right. On a terminal the
    columns in `gives` are truncated, in this order, until the lines fit; `colours` has the colours of some columns for
    each row.
    """
    texts = [[*titles], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    screen = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for title in gives if screen else ():
        index = titles.index(title)
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - screen
        widths[index] -= max(min(excess, widths[index] - NARROWEST), 0)
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    lines = []
    for line, colour in zip(texts, [dict.fromkeys(titles, "dim"), *(colours or [{}] * (len(texts) - 1))], strict=True):
        parts = []
        for title, text, width in zip(titles, line, widths, strict=True):
            text = text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"
            text = text.rjust(width) if title in right else text.ljust(width)
            parts.append(text if plain or title not in colour else f"\x1b[{COLOURS[colour[title]]}m{text}\x1b[0m")
        lines.append(GAP.join(parts).rstrip())
    return lines
