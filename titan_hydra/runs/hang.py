"""Determine from all ranks' flight recorders which rank is late, in which collective of which mesh dimension, at which
step.

A rank waits for another if it has begun an operation of a group that the other has not begun. Following these waits
leads to a rank that waits for no other. If they form a circle, one of its ranks omitted an operation that it had
executed in the step before. (Completion is ignored: torch's recorder also marks failed operations as complete.)
"""

import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import layout

# torch's name for a group of no mesh: the checkpoints', which a thread of their own uses at any time
OTHER = "undefined"
Operation = dict[str, Any]  # group, seq, op, size, done, time, stack; for a message between two ranks also peer


@dataclass(frozen=True)
class Wait:
    """`rank` has begun an operation that `other` has not begun."""

    rank: int
    other: int
    operation: Operation
    mesh: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        peers = names(set(self.members)) if len(self.members) < 9 else f"{len(self.members)} ranks"
        return f"{what(self.operation)} of {self.mesh} ({peers})"


@dataclass
class Dump:
    """The contents of one rank's recorder."""

    content: dict[str, Any]
    until: float = math.inf  # when the first rank timed out; operations begun later do not count

    @property
    def rank(self) -> int:
        return self.content["rank"]

    @property
    def operations(self) -> list[Operation]:
        """The operations that this rank had begun when the first rank timed out, oldest first."""
        return [one for one in self.recorded if one["time"] <= self.until]

    @cached_property
    def recorded(self) -> list[Operation]:
        """Collectives and messages, oldest first; each with the mesh dimension and ranks of its group."""
        both = [*self.content["collectives"], *({**message, "sizes": [message["size"]]} for message in self.content["messages"])]
        groups = self.content["groups"]
        return sorted(({**one, **groups[one["group"]]} for one in both if one["group"] in groups), key=lambda one: one["time"])

    def last(self, key: tuple[Any, ...]) -> int:
        """Return the number of the last operation of a series that this rank has begun; 0 if none."""
        return max((one["seq"] for one in self.operations if series(self.rank, one) == key), default=0)

    @property
    def blocked(self) -> bool:
        """Whether the main thread is inside a collective. A rank may have begun collectives that it does not wait for
        yet.
        """
        return any("/torch/distributed/" in frame or "wait_tensor" in frame for frame in self.content["stacks"].get("MainThread", []))

    def in_step(self, step: int) -> list[Operation]:
        """Return the operations of a step; [] if its beginning is no longer recorded."""
        began = dict(map(tuple[Any, ...], self.content["steps"]))
        if step not in began or not self.operations or self.operations[0]["time"] > began[step]:
            return []
        return [one for one in self.operations if began[step] <= one["time"] < began.get(step + 1, float("inf"))]

    def left_out(self) -> Operation | None:
        """Return the first operation of the previous step that this step replaced by a different one; None if there is
        none.
        """
        step = self.content["step"]
        before, now = ([one for one in self.in_step(number) if one["mesh"] != OTHER] for number in (step - 1, step))
        for usual, done in zip(before, now, strict=False):
            if signature(usual) != signature(done):
                return usual
        return None


def series(rank: int, one: Operation) -> tuple[Any, ...]:
    """Return what an operation is numbered within: its group and back end (a group on GPUs has NCCL and gloo), or
    sender and receiver.
    """
    if "peer" in one:
        return ("message", rank, one["peer"]) if one["op"] == "send" else ("message", one["peer"], rank)
    return (one["mesh"], tuple(one["ranks"]), one.get("backend"))


def signature(one: Operation) -> tuple[Any, ...]:
    """Return what identifies the same operation in two steps."""
    return (one["mesh"], one["op"], str(one["sizes"]), one.get("peer"))


@dataclass(frozen=True)
class Verdict:
    """The late rank (None if it cannot be determined), its host, one line for lists, and a paragraph."""

    rank: int | None
    host: str | None
    line: str
    text: str


def verdict(attempt: Path) -> Verdict | None:
    """Determine which rank blocked the others in an attempt. None without any rank's dump."""
    found = list(filter(None, layout.FLIGHT.read_all(attempt).values()))
    if not found:
        return None
    newest = max(found, key=lambda content: content["time"])
    # An older dump describes another moment: it was requested then, or its replica group was restarted since.
    since = newest["time"] - 2 * newest["timeout"]
    dumps = {content["rank"]: Dump(content, given_up(attempt)) for content in found if content["time"] > since}
    waits = waits_of(dumps)
    others = {wait.other for wait in waits}
    skipped = {rank: usual for rank, dump in dumps.items() if (usual := dump.left_out())}
    if len(skipped) == 1 and waits:
        ((rank, usual),) = skipped.items()
        return told(attempt, dumps, waits, Wait(rank, rank, usual, usual["mesh"], tuple(usual["ranks"])), "left out")
    late = others - {wait.rank for wait in waits} or {rank for rank in others if rank in dumps and not dumps[rank].blocked}
    if late:
        mine = [wait for wait in waits if wait.other in late]
        first = min(mine, key=lambda wait: wait.operation["time"] if wait.other in dumps else -wait.operation["time"])
        return told(attempt, dumps, waits, first, "has not begun")
    return undecided(dumps, waits)


def given_up(attempt: Path) -> float:
    """Return the time of an attempt's first time-out or lost connection, or infinity. A frozen rank may go on after
    it.
    """
    errors = (rank.get("error") or {} for rank in layout.RANK.read_all(attempt).values())
    return min((error["time"] for error in errors if error.get("secondary")), default=math.inf)


def waits_of(dumps: dict[int, Dump]) -> list[Wait]:
    """Return every wait of a rank for another: the first operation that the other has not begun or, if the other left
    no dump, the last.
    """
    found = []
    for dump in dumps.values():
        # a send can end before it is received
        for one in (one for one in dump.operations if one["op"] != "send" or not one["done"]):
            key = series(dump.rank, one)
            for other in [one["peer"]] if "peer" in one else one["ranks"]:
                if other != dump.rank and (other not in dumps or reached(dumps[other], key, one) < one["seq"]):
                    found.append(Wait(dump.rank, other, one, one["mesh"], tuple(one["ranks"])))
    first: dict[tuple[Any, ...], Wait] = {}
    for wait in sorted(found, key=lambda wait: wait.operation["seq"] if wait.other in dumps else -wait.operation["seq"]):
        first.setdefault((wait.rank, wait.other, series(wait.rank, wait.operation)), wait)
    return list(first.values())


def reached(dump: Dump, key: tuple[Any, ...], one: Operation) -> int:
    """Return how far a rank has got in the series of another rank's operation. The two sides of a message are numbered
    separately.
    """
    if "peer" not in one:
        return dump.last(key)
    mirror = "recv" if one["op"] == "send" else "send"
    mine = [other["seq"] for other in dump.operations if other.get("op") == mirror and series(dump.rank, other) == key]
    return max(mine, default=0)


def told(attempt: Path, dumps: dict[int, Dump], waits: list[Wait], wait: Wait, verb: str) -> Verdict:
    """Describe the rank that the others wait for."""
    rank = wait.other
    gone = rank not in dumps
    content = max((dump.content for dump in dumps.values()), key=lambda content: content["step"]) if gone else dumps[rank].content
    host = layout.RANK.read(attempt, rank).get("host") if gone else content["host"]
    name, step, phase = f"Rank {rank}" + (f" on {host}" if host else ""), content["step"], content["phase"]
    line = f"rank {rank} was late at step {step}, {phase}: it {verb} {wait}"
    if came := None if gone else next((one for one in dumps[rank].recorded if one["time"] > dumps[rank].until), None):
        after = f"{came['time'] - wait.operation['time']:.0f} s after rank {wait.rank}"
        line = f"rank {rank} was late at step {step}, {phase}: it went on {after}, which waited in {wait}"
        text = [
            f"{name} came late: at step {step}, {phase}, it went on at {clock(came['time'])}, {after}, which waited in {wait} and had "
            "given up. The rank, or its host, was paused until then."
        ]
    elif verb == "left out":
        text = [f"{name} left out {wait} in step {step}, and went on; the number is that of the step before."]
    elif not gone:
        text = [f"{name} is late: at step {step}, {phase}, since {clock(content['since'])}, it has not begun {wait}."]
    else:
        text = [f"{name} is gone: it left no dump. At step {step}, {phase}, the others wait for it in {wait}."]
    text += [f"It is called in {site(wait.operation)}."]
    held = {other.rank for other in waits if other.other == rank}
    rest = set(dumps) - held - {rank}
    text += [f"It holds up {names(held)}" + (f", and these {names(rest)}." if rest else ".")] if held else []
    stack = [] if gone else content["stacks"].get("MainThread", [])
    if stack:
        text += ["\nIts main thread, the innermost call last:", *(f"\n  {frame}" for frame in stack[-14:])]
    return Verdict(rank, host, line, " ".join(text).replace(" \n", "\n"))


def names(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def undecided(dumps: dict[int, Dump], waits: list[Wait]) -> Verdict:
    """Describe the state of every rank: none is behind, or the waits form a circle and the step before is not
    recorded.
    """
    places = [
        f"\n  rank {rank}: step {dump.content['step']}, {dump.content['phase']}, since {clock(dump.content['since'])}"
        + "".join(f"; waits for rank {wait.other} in {wait}" for wait in waits if wait.rank == rank)
        for rank, dump in sorted(dumps.items())
    ]
    words = "the ranks wait for one another: one has left out an operation, or they do different things" if waits else "no rank is behind"
    return Verdict(None, None, words, words[0].upper() + words[1:] + "." + "".join(places))


def what(one: Operation) -> str:
    """Format an operation's name, number and sizes."""
    way = {"send": " to", "recv": " from"}.get(one["op"], "")
    peer = f"{way} rank {one['peer']}" if "peer" in one else ""
    return f"{one['op']}{peer} number {one['seq']} {' '.join(map(str, one['sizes']))}"


def site(one: Operation) -> str:
    """Return the innermost line outside torch that called an operation, else its outermost line."""
    frames = one.get("stack") or ["a line that is not recorded"]
    return next((frame for frame in frames if "/torch/" not in frame), frames[-1])


def clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
