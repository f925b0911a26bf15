"""A fault of a configuration: one line that names the key, the value, the reason and the nearest legal choice."""
from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Fault:
    """`key=value: reason`, and what would be legal: numbers (the nearest are shown) or words (all are)."""

    key: str
    value: Any
    reason: str
    legal: tuple = ()

    def __str__(self) -> str:
        line = f"{self.key}={as_typed(self.value)}: {self.reason}"
        choices = nearest(self.value, self.legal)
        return f"{line}; nearest legal: {' or '.join(map(as_typed, choices))}" if choices else line


def as_typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))  # one line, whatever it holds


def quoted(words: Iterable[str]) -> str:
    """Words as they are typed into a shell."""
    def one(word: str) -> str:
        return f'"{word}"' if "'" in word and not re.search(r'[$`"\\!]', word) else shlex.quote(word)

    return " ".join(map(one, words))


def below_one(job: Any, *keys: str) -> Iterator[Fault]:
    """The faults of keys that count something and are less than 1."""
    for key in keys:
        if (value := attrgetter(key)(job)) < 1:
            yield Fault(key, value, "must be at least 1", legal=(1,))


def nearest(value: Any, legal: Iterable) -> list:
    """The legal numbers next below and above `value`; words as they are."""
    legal = list(legal)
    if not legal or not all(isinstance(choice, int) for choice in legal) or not isinstance(value, int):
        return legal
    below = [choice for choice in legal if choice <= value]
    above = [choice for choice in legal if choice > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def suggest(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known words that `word` may have been meant to be, best first; a dotted key is matched by its last part too."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.72)
    last = word.rsplit(".", 1)[-1]
    close += [key for key in known if key.rsplit(".", 1)[-1] == last and key not in close]
    return tuple(close[:3])


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending."""
    return tuple(candidate for candidate in range(1, number + 1) if number % candidate == 0)
