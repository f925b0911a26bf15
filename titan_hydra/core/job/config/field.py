"""How a configuration key is defined: a dataclass field with a description, a range, and other properties that the
checks and the help use. And how a value gets the type of its key: Hydra composes plain values, and nothing else types
them.
"""

import contextlib
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import Field, field, is_dataclass
from typing import Any, Literal

from .fault import Fault, suggest
from .ranges import Interval, Range, Text, range_of
from .registry import Names

Changes = Literal["learning", "work", "learning and work", "held-out loss", "technique"]
READS = ("data", "validation", "tasks", "tokenizer", "weights", "schedule")  # what files can be
Reads = Literal["data", "validation", "tasks", "tokenizer", "weights", "schedule"]

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list, as [a,b]",
    dict: "a table, as {NAME: VALUE}",
}
BOOLEANS = dict.fromkeys(("yes", "y", "on", "true", "1"), True) | dict.fromkeys(("no", "n", "off", "false", "0"), False)


def key(
    default: Any,
    help: str,
    range: Range | None = None,
    only: Sequence[str] = (),
    identity: bool | Literal["if set"] = True,
    choices: Sequence[str] = (),
    changes: Changes | None = None,
    entry: type | None = None,
    reads: Reads | None = None,
) -> Any:
    """Define a described configuration field. A callable default is a factory; `...` means that conf/ must give the
    value.

    `identity` is whether the key is part of the hash that names a run. With "if set", the key is part of the hash only
    if its value is not the default. So a key that a later version adds does not change the hashes of earlier runs.

    If the key is a list or a table, range and choices apply to each element; `entry` is the dataclass of a table's
    values. `changes` states what changes with the value of the key: what is learned, the work of a step (what it
    computes, or how long it takes), both, the samples of the held-out loss, or only the technique. `changes_of`
    (load.py) defines what None means. `reads` is for a key that names files: what these files are. Their contents are
    then part of what a run is (core/job/inputs.py).
    """
    metadata = {
        "help": help,
        "range": range,
        "only": only,
        "identity": identity,
        "choices": choices,
        "changes": changes,
        "entry": entry,
        "reads": reads,
    }
    if default is ...:
        return field(default="???", metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def converted(kind: Any, value: Any) -> Any:
    """Return a plain value with the type of its key: a number may be a text that has the form of it, and a float may be a
    whole number. Raises ValueError if the value does not fit.
    """
    of, inner = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in inner:
        return None if value is None else converted(next(part for part in inner if part is not type(None)), value)
    if kind is Any:
        return value
    if of is list and isinstance(value, list):
        return [converted(inner[0], element) for element in value]
    if of is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: converted(inner[1], entry) for name, entry in value.items()}
    if kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if kind is str and isinstance(value, str | int | float):
        return str(value)
    number = isinstance(value, int | str) or (kind is float and isinstance(value, float))
    if kind in (int, float) and number and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number that is larger than any float
            return kind(value)
    raise ValueError(value)


def type_fault(key: str, kind: Any, value: Any, spec: Field[Any] | None) -> Fault:
    """Return the fault of a value that `converted` refuses. `spec` is the field of the key, if the schema has one."""
    help = f" ({spec.metadata['help']})" if spec else ""
    whole = isinstance(value, float) and math.isfinite(value) and abs(value) < 2**53  # others have no neighbour
    return Fault(key, value, f"must be {wanted(kind, spec)}{help}", (round(value),) if whole else ())


def wanted(kind: Any, spec: Field[Any] | None) -> str:
    """Describe the values of a key in words: type, choices, range."""
    parts = typing.get_args(kind)
    optional = type(None) in parts
    plain = next(part for part in parts if part is not type(None)) if optional else typing.get_origin(kind) or kind
    choices = spec.metadata["choices"] if spec else ()
    of = str(range_of(spec) or "") if spec and plain is not dict else ""
    of = f"one of {', '.join(choices)}" if choices else of
    if plain is str and of:
        return of + " or null" * optional
    return KINDS.get(plain, "text") + (f", {'each ' * (plain is list)}{of}" if of else "") + " or null" * optional


def value_faults(key: str, spec: Field[Any], value: Any) -> Iterator[Fault]:
    """Yield a fault for each value outside the range or the choices of its key; a list or a table has several values."""
    choices, range = spec.metadata["choices"], range_of(spec)
    free = "Any" in str(spec.type) and spec.metadata["range"] is None  # a table whose values may be nested
    for element in () if free else elements(value):
        if isinstance(element, list | dict):
            yield Fault(key, value, "must be a list of words, not of lists or tables")
        elif choices and element not in choices:
            yield not_a_choice(key, value, element, choices)
        elif range and isinstance(element, str) is isinstance(range, Text) and (reason := range.objection(element)):
            yield Fault(key, element, reason, range.nearest(element) if isinstance(range, Interval) else ())


def not_a_choice(key: str, value: Any, element: Any, choices: Sequence[str]) -> Fault:
    """Return the fault of a value that is, or that holds, a name that is not one of the choices."""
    reason = "not one of the choices" if element is value else f"{element} is not one of the choices"
    if isinstance(choices, Names) and not suggest(str(element), choices):
        reason += "; one of your own needs train.imports=[ITS_MODULE]"
    return Fault(key, value, reason, tuple(choices))


def elements(value: Any) -> Iterator[Any]:
    """Yield the values to which ranges and choices apply: a value, a list's elements, or a table's names and values."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from elements(entry)
    elif isinstance(value, list):
        yield from value
    elif value is not None and not is_dataclass(value):
        yield value
