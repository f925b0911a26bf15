"""The types of keys: convert a value to the type of its key, or say in words which values the key takes. Nothing else
types a configuration; Hydra composes plain values.
"""

import contextlib
import typing
from dataclasses import Field
from typing import Any

from .fault import Fault
from .ranges import range_of

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list, as [a,b]",
    dict: "a table, as {NAME: VALUE}",
}
BOOLEANS = dict.fromkeys(("yes", "y", "on", "true", "1"), True) | dict.fromkeys(("no", "n", "off", "false", "0"), False)


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
    return Fault(key, value, f"must be {wanted(kind, spec)}{help}")


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
