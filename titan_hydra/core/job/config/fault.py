"""A fault of a configuration: one line that names the key, the value, the reason and the nearest legal choice."""

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any

from titan_hydra.core.base.errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """A rejected value. It is printed as `key=value: reason`, with the nearest legal numbers or all legal choices.
    `code` is the name of the rule that found it (`check` sets it), for programs and tests: the wording of a message may
    change, its code does not.
    """

    key: str
    value: Any
    reason: str
    legal: tuple[Any, ...] = ()
    code: str = ""

    def __str__(self) -> str:
        """Format `key=value: reason`, and what would be legal."""
        line = f"{shown(self.key)}={shown(as_typed(self.value))}: {shown(self.reason, 1000)}"
        legal = self.choices
        if legal == ["[]"]:
            return f"{line}; leave it out"
        if len(legal) > 1 and not any(isinstance(choice, int | float) for choice in self.legal):
            return f"{line}; one of {', '.join(legal)}"
        return f"{line}; nearest legal: {' or '.join(legal)}" if legal else line

    @property
    def choices(self) -> list[str]:
        """The nearest legal numbers or all legal choices, as they are typed on a command line."""
        return [as_typed(choice) for choice in nearest(self.value, self.legal)]

    @property
    def error(self) -> ConfigError:
        """The error that ends a command because of this value."""
        return ConfigError(str(self))


def fault_at(job: Any, key: str, reason: str, *legal: Any) -> Fault:
    """Return the fault of the value that a job (or another tree of sections) has at a dotted key."""
    return Fault(key, reduce(getattr, key.split("."), job), reason, legal)


def required(job: Any, *rows: tuple[str, Any, str]) -> Iterator[Fault]:
    """Yield a fault for each row of a key, the value that it must have, and the reason, if the key has another value."""
    for key, value, reason in rows:
        if (fault := fault_at(job, key, reason, value)).value != value:
            yield fault


def bad_value(key: str, value: Any, reason: str, *legal: Any) -> ConfigError:
    """Return the error that ends a command because of one value."""
    return Fault(key, value, reason, legal).error


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the right form: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def as_typed(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {as_typed(entry)}' for name, entry in value.items())}}}"
    if is_dataclass(value):
        return "{...}"
    return f"[{','.join(map(as_typed, value))}]" if isinstance(value, list | tuple) else str(value)


def as_value(text: str) -> str:
    """Return a text as the value of an override, in quotes if Hydra's grammar would not read it as this text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        if OverridesParser.create().parse_override(f"key={text}").value() == text:
            return text
    except HydraException:
        pass
    # Inside quotes a backslash is an ordinary character, except directly before a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def quoted(words: Iterable[str]) -> str:
    """Quote words for a shell and join them."""

    def one(word: str) -> str:
        return f'"{word}"' if "'" in word and not re.search(r'[$`"\\!]', word) else shlex.quote(word)

    return " ".join(map(one, words))


def shown(text: str, longest: int = 200) -> str:
    """Return a text that fits one printed line: cut after `longest` characters, and with control characters escaped."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"


def nearest(value: Any, legal: Iterable[Any]) -> list[Any]:
    """Return the legal numbers next below and above `value`. Legal values that are not whole numbers are returned
    unchanged.
    """
    legal = list(legal)
    if not legal or not all(isinstance(choice, int) for choice in legal) or not isinstance(value, int):
        return legal
    below = [choice for choice in legal if choice <= value]
    above = [choice for choice in legal if choice > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def suggest(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to three known words that `word` was probably meant to be, best first. A dotted key matches by its last
    part too.
    """
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.72)
    last = word.rsplit(".", 1)[-1]
    close += [key for key in known if key.rsplit(".", 1)[-1] == last and key not in close]
    return tuple(close[:3])


def did_you_mean(close: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message that asks whether one of these words was meant; `otherwise` if the list is empty."""
    suggestion = " or ".join(close)
    return f"; did you mean {suggestion}?" if suggestion else otherwise


def multiples_around(number: int, step: int) -> tuple[int, ...]:
    """Return the multiples of `step` next below (or equal to) and above a number, without 0."""
    below = number // step * step
    return tuple(multiple for multiple in (below, below + step) if multiple)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return tuple(sorted({*small, *(number // candidate for candidate in small)}))
