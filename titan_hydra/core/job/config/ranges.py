"""The values of its type that a key accepts: intervals of numbers, and kinds of text. The schema gives each key such a
range.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1  # upper limit of counts without a natural limit: the largest int of C
# characters that end lines, move cursors, or have no form in UTF-8
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# the name of a variable at the start of a part of a path, as it is and without signs
VARIABLE = re.compile(r"(?:^|/)(\$\{?([A-Za-z_]\w*)\}?)")


@dataclass(frozen=True)
class Interval:
    """Finite numbers from `low` to `high`; an open end is excluded. `also` lists further values with a special
    meaning.
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: tuple[float, ...] = ()

    def __contains__(self, value: Any) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        return value in self.also or (_finite(value) and above and below)

    def __str__(self) -> str:
        """Return the interval as messages name it: `at least 1`, `from 0 to 1`, `more than 0 and less than 1, or -1`."""
        low, high = _shown(self.low), _shown(self.high)
        text = f"{'more than' if self.open_low else 'at least'} {low}"
        if self.open_low is self.open_high is False and self.high not in (math.inf, LARGEST):
            text = f"from {low} to {high}"
        elif self.high not in (math.inf, LARGEST):
            text += f" and {'less than' if self.open_high else 'at most'} {high}"
        return text + "".join(f", or {_shown(value)}" for value in self.also)

    def objection(self, value: Any) -> str | None:
        """Return why a number is outside the interval; None if it is inside."""
        if value in self:
            return None
        if not _finite(value):
            return "must be a finite number"
        return f"must be at most {self.high:,}" if value > self.high == LARGEST else f"must be {self}"

    def nearest(self, value: Any) -> tuple[float, ...]:
        """Return the end of the interval that is nearest to a number outside, if this end is included."""
        end = self.low if value < self.low else self.high
        return (end,) if _finite(value) and end in self else ()


@dataclass(frozen=True)
class Text:
    """Text of one line without control characters that `pattern` matches as a whole; `longest` is in bytes, as file
    systems count.
    """

    words: str
    pattern: str = ""
    longest: int = 10_000
    longest_part: int = 10_000  # maximum number of bytes between two slashes
    path: bool = False  # whether it is a path, in which the name of a variable was meant to be its value

    def __str__(self) -> str:
        return self.words

    def objection(self, value: str) -> str | None:
        """Return why a text is not accepted; None if it is."""
        if CONTROL.search(value):
            return "must not hold control characters"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"must be {self.words}"
        if self.path and (variable := VARIABLE.search(value)):
            return (
                f"holds the name {variable[1]}, which only a shell replaces, outside of single quotes; "
                f"${{oc.env:{variable[2]}}} is replaced here"
            )
        if len(value.encode()) > self.longest:
            return f"is {len(value.encode()):,} bytes long, and {self.longest:,} are the most"
        if any(len(part.encode()) > self.longest_part for part in value.split("/")):
            return f"has a part of more than {self.longest_part} bytes, the most that a file name may have"
        return None


Range = Interval | Text


def range_of(spec: Any) -> Range | None:
    """Return the range of a key, given its field; None if its type or its choices already define its values."""
    kind = str(spec.type)  # `type` is a text if the class's module uses `from __future__ import annotations`
    return spec.metadata["range"] or (
        LINE if "str" in kind and not spec.metadata["choices"] and "Part" not in kind else None
    )


COUNT = Interval(1, LARGEST)
NATURAL = Interval(0, LARGEST)
DEGREE = Interval(1, 1_000_000)
WIDTH = Interval(1, 2**20)  # width of a model in any of its dimensions
POSITIVE = Interval(0, open_low=True)
NOT_NEGATIVE = Interval(0)
SHARE = Interval(0, 1)
BELOW_ONE = Interval(0, 1, open_high=True)

LINE = Text("text on one line, not empty", ".+")
NOTE = Text("text on one line")
WORD = Text("a word without blanks", r"\S+", longest=1000)
# names that can be the name of a folder
NAME = Text(
    "a name of letters, digits and . _ + = , - that begins with a letter or digit", r"[^\W_][\w.+=,-]*", longest=200
)
PATH = Text("a path", ".+", longest=4095, longest_part=255, path=True)
ADDRESS = Text("an address HOST:PORT", r"[\w.-]+:[1-9]\d{0,4}", longest=300)
ANY = Text("")  # any text without control characters


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)  # an int may be larger than any float
