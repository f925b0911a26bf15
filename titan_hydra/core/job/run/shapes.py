"""The shapes of JSON values, and a test of whether a value has a given shape. layout.py names the shape of each file."""

import dataclasses
import re
import typing
from collections.abc import Callable
from typing import Any, NewType

Moment = NewType("Moment", float)  # seconds since 1970
Place = NewType("Place", str)  # a path that a file system accepts
Test = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Fields:
    """The shape of a JSON object: the shapes of its required and its optional fields. Other fields may hold anything."""

    needed: dict[str, Any]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Each:
    """The shape of a list whose elements all have the shape `shape`; with `named`, that of an object whose values do."""

    shape: Any
    named: bool = False


def test_of(kind: Any) -> Test:
    """Return the test for a shape: a plain type, a tuple or union of shapes, list[...], dict[str, ...], `Fields`, `Each`,
    or a dataclass. All fields of a dataclass are optional, as a file of another version may lack some.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kind = Fields({}, typing.get_type_hints(kind))
    if isinstance(kind, Fields):
        needed, tests = (
            kind.needed.keys(),
            {name: test_of(inner) for name, inner in (kind.needed | kind.others).items()},
        )
        return lambda value: (
            isinstance(value, dict)
            and needed <= value.keys()
            and all(tests[name](inner) for name, inner in value.items() if name in tests)
        )
    outer: Any
    if isinstance(kind, Each):
        outer, inner = (dict if kind.named else list), (kind.shape,)
    else:
        outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer in (list, dict):
        test = test_of(inner[-1])
        return lambda value: isinstance(value, outer) and all(map(test, value.values() if outer is dict else value))
    if isinstance(kind, tuple) or inner:
        first, *others = (test_of(one) for one in (kind if isinstance(kind, tuple) else inner))
        return lambda value: first(value) or any(test(value) for test in others)
    return PLAIN.get(kind) or (lambda value: isinstance(value, kind))


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be printed and be part of a path. JSON can also encode strings for which
    this fails: those with a zero byte or with half of a surrogate pair.
    """
    return isinstance(value, str) and (value.isprintable() or not re.search("[\0\ud800-\udfff]", value))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number below 2**63, so that it can be multiplied by a float."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_number(value: Any) -> bool:
    return isinstance(value, float) or is_whole(value)


PLAIN: dict[Any, Test] = {
    str: is_text,
    int: is_whole,
    float: is_number,
    None: lambda value: value is None,
    type(None): lambda value: value is None,
    Any: lambda value: True,
    Moment: lambda value: is_number(value) and 0 <= value < 2**36,
    Place: lambda value: (
        is_text(value) and len(value) < 4096 and all(len(part.encode()) < 256 for part in value.split("/"))
    ),
}
