"""The shapes of the JSON files in a run directory and a sweep. Readers treat a file of any other shape as damaged, and so as absent."""
from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from typing import Any, NewType

from .schema import Job

Moment = NewType("Moment", float)  # seconds since 1970
Place = NewType("Place", str)  # a path that a file system can have
Test = Callable[[Any], bool]
NUMBER = float | None


@dataclasses.dataclass(frozen=True)
class Fields:
    """The shape of a JSON object: required fields, and the types of optional ones. Other fields may hold anything."""

    needed: dict[str, Any]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


PROCESS = {"pid": int, "host": str, "born": str | None}
ENDED = {"ended": Moment, "exit_status": int | None, "host": str, "killed": bool}
ERROR = Fields({"type": str, "message": str, "traceback": str, "time": Moment, "secondary": bool},
               {"host": str | None, "step": int, "peak_gib": float, "capacity_gib": float})
ATTEMPT = Fields(PROCESS | {"started": Moment}, {"ended": Moment, "executor": str, "packed": bool, "slurm_state": str | None})
SLURM = Fields(ATTEMPT.needed | {"job_id": str | None, "token": str, "user": str}, ATTEMPT.others | {"index": int})
OPERATION = {"group": str, "seq": int, "op": str, "time": float}
FILES = {  # by name
    "attempt.json": ATTEMPT, "attempt.json of SLURM": SLURM,
    "ranks.json": Fields({}, PROCESS | {"ended": Moment, "ranks": list[Fields({}, ENDED)]}),
    "rank.json": Fields({}, PROCESS | ENDED | {"started": Moment, "error": (ERROR, None), "load": Fields({}, dict.fromkeys(
        ("cores", "start", "end"), float))}),
    "beat.json": Fields({"step": int, "phase": str, "count": int, "since": Moment, "time": Moment}, {"asked": Moment}),
    "status.json": Fields({"step": int}, {"time": Moment}),
    "cancelled": Fields({}, {"by": str, "time": Moment}),
    "flight.json": Fields({
        "rank": int, "time": Moment, "timeout": float, "step": int, "phase": str, "since": Moment, "host": str,
        "stacks": dict[str, list[str]], "groups": dict[str, Fields({"mesh": str, "ranks": list[int]})],
        "collectives": list[Fields(OPERATION, {"sizes": list})],
        "messages": list[Fields(OPERATION | {"size": Any, "peer": int, "done": bool})], "steps": list[list[float]]}),
    "result.json": Fields({}, dict.fromkeys(("final_loss", "validation_loss", "tokens_per_second", "tokens_per_second_iqr", "memory_gib",
                                             "mfu", "seconds", "gpu_hours"), NUMBER) | {
        "status": str, "steps": int, "measured_steps": int | None, "world_size": int, "device": str | None, "git_sha": str | None,
        "versions": dict[str, str]}),
    "env.json": Fields({}, {"git_sha": str | None, "git_diff": str | None, "git_untracked": list[str], "versions": dict[str, str],
                            "host": str, "platform": str}),
    "manifest.json": Fields({"name": str, "command": list[str], "baseline": str | None, "cells": list[Fields(
        {"name": str, "directory": Place, "overrides": list[str]}, {"hash": str, "repeat": bool})]}, {"created": Moment}),
    "schedule.json": Fields({"ranks": list[list[Fields({"stage": int, "kind": str, "microbatch": int})]]}),
    "metrics.jsonl": Fields({"step": int, "loss": NUMBER}, dict.fromkeys((
        "loss_mean", "grad_norm", "lr", "tokens_per_second", "tflops", "mfu", "memory_gib", "memory_reserved_gib", "step_seconds",
        "data_seconds", "tokens_seen"), NUMBER)),
    "events.jsonl": Fields({"event": str, "step": int}, {"validation_loss": NUMBER, "seconds": NUMBER}),
    "activations.jsonl": Fields({"step": int, "pass": str, "what": str, "module": str, "call": int, "order": list[float], "hash": str},
                                {"norm": float | str}),
}


def intact(name: str, content: Any) -> bool:
    """Whether the content of a file of that name, or one row of it, has the expected shape. rank_3.json counts as rank.json."""
    name = re.sub(r"_\d+(?=\.jsonl?$)", "", name)
    if name == "attempt.json" and isinstance(content, dict) and content.get("executor") == "slurm":
        name = "attempt.json of SLURM"
    return test_of_file(name)(content)


@functools.cache
def test_of_file(name: str) -> Test:
    """Return the test for files of that name; for a name not listed here, any object passes."""
    if name == "config.json":
        keys = typing.get_type_hints(Job)
        return test_of(Fields({"model": keys["model"]}, keys))  # a config.json written with converted weights holds only the model
    return test_of(FILES.get(name, dict))


def test_of(kind: Any) -> Test:
    """Return a test whether a JSON value is of a type: plain, a union, list[...], dict[str, ...], `Fields`, or a dataclass."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):  # a file of another version may lack keys or have others
        kind = Fields({}, typing.get_type_hints(kind))
    if isinstance(kind, Fields):
        needed, tests = kind.needed.keys(), {name: test_of(inner) for name, inner in (kind.needed | kind.others).items()}
        return lambda value: isinstance(value, dict) and needed <= value.keys() and all(
            tests[name](inner) for name, inner in value.items() if name in tests)
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer in (list, dict):
        test = test_of(inner[-1])
        return lambda value: isinstance(value, outer) and all(map(test, value.values() if outer is dict else value))
    if isinstance(kind, tuple) or inner:
        options = [test_of(one) for one in (kind if isinstance(kind, tuple) else inner)]
        return lambda value: any(test(value) for test in options)
    return PLAIN.get(kind) or (lambda value: isinstance(value, kind))


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be printed and used as a path: JSON can encode a zero byte and half of a surrogate pair."""
    return isinstance(value, str) and (value.isprintable() or not re.search("[\0\ud800-\udfff]", value))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of at most 63 bits, small enough to be multiplied by a float."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2 ** 63


def is_number(value: Any) -> bool:
    return isinstance(value, float) or is_whole(value)


PLAIN: dict[Any, Test] = {
    str: is_text, int: is_whole, float: is_number, None: lambda value: value is None, type(None): lambda value: value is None,
    Any: lambda value: True, Moment: lambda value: is_number(value) and 0 <= value < 2 ** 36,
    Place: lambda value: is_text(value) and len(value) < 4096 and all(len(part.encode()) < 256 for part in value.split("/")),
}
