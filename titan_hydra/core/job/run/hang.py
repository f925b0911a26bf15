"""Determine from the flight recorders of all ranks which rank is late, and in which step, mesh dimension and collective
the others wait for it.

Rank A waits for rank B if A has begun an operation of their group that B has not begun. Following these waits leads to
a rank that waits for no other rank. If the waits form a circle instead, a rank of the circle has omitted an operation
that it executed in the previous step. The recorder's mark that an operation is complete is ignored, as torch also marks
failed operations as complete.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.core.base.amounts import time_of_day

from . import layout

# torch's description of a process group outside the mesh, such as the group for checkpoints, which a thread may use at
# any time
OTHER = "undefined"
# the keys are group, mesh, ranks, seq, op, sizes, done, time and stack; a message between two ranks also has peer
Operation = dict[str, Any]
Series = tuple[Any, ...]


@dataclass(frozen=True)
class Wait:
    """`rank` has begun an operation that `other` has not begun."""

    rank: int
    other: int
    operation: Operation

    def __str__(self) -> str:
        members = self.operation["ranks"]
        peers = names(members) if len(members) < 9 else f"{len(members)} ranks"
        return f"{operation_text(self.operation)} of {self.operation['mesh']} ({peers})"


class Dump:
    """The contents of one rank's flight recorder. Operations that the rank began after the time `until`, when a rank
    first noticed a time-out, do not count.
    """

    def __init__(self, content: dict[str, Any], until: float) -> None:
        self.content, self.rank, groups = content, content["rank"], content["groups"]
        both = [*content["collectives"], *({**message, "sizes": [message["size"]]} for message in content["messages"])]
        recorded = [{**operation, **groups[operation["group"]]} for operation in both if operation["group"] in groups]
        recorded.sort(key=lambda operation: operation["time"])
        self.operations = [operation for operation in recorded if operation["time"] <= until]
        self.later = recorded[len(self.operations) :]

    def last(self, key: Series) -> int:
        """Return the number of the last operation that this rank has begun in a series; 0 if it has begun none."""
        return max(
            (operation["seq"] for operation in self.operations if series(self.rank, operation) == key), default=0
        )

    @property
    def blocked(self) -> bool:
        """Whether the main thread is inside a collective. (It may also have begun collectives for which it does not yet
        wait.)
        """
        return any(
            "/torch/distributed/" in frame or "wait_tensor" in frame
            for frame in self.content["stacks"].get("MainThread", [])
        )

    def in_step(self, step: int) -> list[Operation]:
        """Return the operations of a step; [] if the recorder no longer has the step's first operations."""
        began = dict(map(tuple[Any, ...], self.content["steps"]))
        if step not in began or not self.operations or self.operations[0]["time"] > began[step]:
            return []
        return [
            operation
            for operation in self.operations
            if began[step] <= operation["time"] < began.get(step + 1, math.inf)
        ]

    def left_out(self) -> Operation | None:
        """Compare the operations of this step with those of the previous step, in order. Return the previous step's
        operation at the first difference; None if there is no difference.
        """
        step = self.content["step"]
        before, now = (
            [operation for operation in self.in_step(number) if operation["mesh"] != OTHER]
            for number in (step - 1, step)
        )
        for usual, done in zip(before, now, strict=False):
            if signature(usual) != signature(done):
                return usual
        return None


def series(rank: int, operation: Operation) -> Series:
    """Return a key of the series of operations that share one numbering. For a collective it consists of the group and
    the back end (a group on GPUs has both NCCL and gloo), for a message of the sender and the receiver.
    """
    if "peer" in operation:
        return (
            ("message", rank, operation["peer"]) if operation["op"] == "send" else ("message", operation["peer"], rank)
        )
    return (operation["mesh"], tuple(operation["ranks"]), operation.get("backend"))


def signature(operation: Operation) -> tuple[Any, ...]:
    """Return a key that is equal if two steps execute the same operation."""
    return (operation["mesh"], operation["op"], str(operation["sizes"]), operation.get("peer"))


@dataclass(frozen=True)
class Verdict:
    """The late rank (None if it cannot be determined), its host, and a description as one line and as a paragraph."""

    rank: int | None
    host: str | None
    line: str
    text: str


def verdict(attempt: Path) -> Verdict | None:
    """Determine which rank blocked all others in an attempt. None if no rank has left a dump."""
    contents = list(filter(None, layout.FLIGHT.read_all(attempt).values()))
    if not contents:
        return None
    newest = max(contents, key=lambda content: content["time"])
    # A much older dump does not belong to this hang: a user requested the dump earlier, or the replica group has
    # restarted since.
    since = newest["time"] - 2 * newest["timeout"]
    until = given_up(attempt)
    dumps = {content["rank"]: Dump(content, until) for content in contents if content["time"] > since}
    waits = waits_of(dumps)
    skipped = {rank: usual for rank, dump in dumps.items() if (usual := dump.left_out())}
    if len(skipped) == 1 and waits:
        ((rank, usual),) = skipped.items()
        return _described(attempt, dumps, waits, Wait(rank, rank, usual), left_out=True)
    others = {wait.other for wait in waits}
    late = others - {wait.rank for wait in waits} or {
        rank for rank in others if rank in dumps and not dumps[rank].blocked
    }
    if late:
        mine = [wait for wait in waits if wait.other in late]
        first = min(mine, key=lambda wait: wait.operation["time"] if wait.other in dumps else -wait.operation["time"])
        return _described(attempt, dumps, waits, first, left_out=False)
    return undecided(dumps, waits)


def given_up(attempt: Path) -> float:
    """Return the time of an attempt's first time-out or lost connection, or infinity. Operations after that time do not
    count, as a rank that was only paused may have executed them later.
    """
    errors = (rank.get("error") or {} for rank in layout.RANK.read_all(attempt).values())
    return min((error["time"] for error in errors if error.get("secondary")), default=math.inf)


def waits_of(dumps: dict[int, Dump]) -> list[Wait]:
    """Return every wait of one rank for another; two ranks have at most one wait for each series of operations. A wait
    contains the first operation that the awaited rank has not begun or, if that rank left no dump, the last operation
    of the waiting rank.
    """
    waits: dict[tuple[int, int, Series], Wait] = {}
    for dump in dumps.values():
        for entry in dump.operations:
            if entry["op"] == "send" and entry["done"]:  # a send may be done before the other rank has begun to receive
                continue
            key = series(dump.rank, entry)
            for other in [entry["peer"]] if "peer" in entry else entry["ranks"]:
                if other == dump.rank or (other in dumps and dumps[other].last(key) >= entry["seq"]):
                    continue
                known = waits.get((dump.rank, other, key))
                if known is None or (entry["seq"] < known.operation["seq"]) == (other in dumps):
                    waits[dump.rank, other, key] = Wait(dump.rank, other, entry)
    return list(waits.values())


def _described(attempt: Path, dumps: dict[int, Dump], waits: list[Wait], wait: Wait, left_out: bool) -> Verdict:
    """Describe the late rank, for which the others wait."""
    rank, dump = wait.other, dumps.get(wait.other)
    content = (
        dump.content if dump else max((other.content for other in dumps.values()), key=lambda content: content["step"])
    )
    host = content["host"] if dump else layout.RANK.read(attempt, rank).get("host")
    name, when = f"Rank {rank} on {host}" if host else f"Rank {rank}", f"at step {content['step']}, {content['phase']}"
    line = f"it {'left out' if left_out else 'has not begun'} {wait}"
    if dump and dump.later:
        went_on = dump.later[0]["time"]
        after = f"{went_on - wait.operation['time']:.0f} s after rank {wait.rank}, which waited in {wait}"
        line = f"it went on {after}"
        text = (
            f"{name} came late: {when}, it went on at {time_of_day(went_on)}, {after} and had given up. "
            "The rank, or its host, was paused until then."
        )
    elif left_out:
        text = f"{name} left out {wait} in step {content['step']}, and went on; the number is that of the step before."
    elif dump:
        text = f"{name} is late: {when}, since {time_of_day(content['since'])}, it has not begun {wait}."
    else:
        text = f"{name} is gone: it left no dump. A{when[1:]}, the others wait for it in {wait}."
    text += f" It is called in {site(wait.operation)}."
    held = {other.rank for other in waits if other.other == rank}
    rest = dumps.keys() - held - {rank}
    if held:
        text += f" It holds up {names(held)}{f', and these {names(rest)}' if rest else ''}."
    if dump and (stack := content["stacks"].get("MainThread")):
        text += "\nIts main thread, the innermost call last:" + "".join(f"\n  {frame}" for frame in stack[-14:])
    return Verdict(rank, host, f"rank {rank} was late {when}: {line}", text)


def names(ranks: Iterable[int]) -> str:
    """Format a list of ranks: "rank 3", or "ranks 0, 1, 3"."""
    numbers = sorted(ranks)
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {', '.join(map(str, numbers))}"


def undecided(dumps: dict[int, Dump], waits: list[Wait]) -> Verdict:
    """Describe the state of every rank, for a hang in which no late rank was found. Then no rank is behind, or the
    waits form a circle and no omitted operation was found.
    """
    line = (
        "the ranks wait for one another: one has left out an operation, or their operations differ"
        if waits
        else "no rank is behind"
    )
    text = f"{line[0].upper()}{line[1:]}."
    for rank, dump in sorted(dumps.items()):
        text += f"\n  rank {rank}: step {dump.content['step']}, {dump.content['phase']}, since {time_of_day(dump.content['since'])}"
        text += "".join(f"; waits for rank {wait.other} in {wait}" for wait in waits if wait.rank == rank)
    return Verdict(None, None, line, text)


def operation_text(operation: Operation) -> str:
    """Format an operation's name, number and sizes."""
    preposition = {"send": " to", "recv": " from"}.get(operation["op"], "")
    peer = f"{preposition} rank {operation['peer']}" if "peer" in operation else ""
    return f"{operation['op']}{peer} number {operation['seq']} {' '.join(map(str, operation['sizes']))}"


def site(operation: Operation) -> str:
    """Return the innermost line of an operation's stack outside torch; if all lines are in torch, the outermost line."""
    frames = operation.get("stack") or ["a line that is not recorded"]
    return next((frame for frame in frames if "/torch/" not in frame), frames[-1])
