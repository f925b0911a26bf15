"""The order in which pipeline ranks compute in torch's schedules, and what follows from the order: idle time,
microbatches in flight. Imports no torch. tests/core/job compares the order with torch's own lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES, resolve
from titan_hydra.core.job.config.schema import Job

from .batches import microbatches
from .pipeline import Action, written_schedule

TIME = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # duration of an action, in units of a forward of the same stage
Step = tuple[int | None, str]  # stage, kind; a W without a stage belongs to the oldest I that has no W yet


def actions_of(job: Job, number: int | None = None) -> list[list[Action]]:
    """Return the actions of every pipeline rank; `number` replaces the job's number of microbatches."""
    if written := written_schedule(job):
        return written
    number = microbatches(job) if number is None else number
    return actions(known(job.pp_schedule.name), job.parallelism.pp, job.pp_schedule.stages_per_rank, number)


def known(name: str) -> str:
    """Return the name of the schedule whose steps predict the schedule `name`: `name` itself if its record has steps,
    else a similar schedule.
    """
    kind = PIPELINE_SCHEDULES[name]
    if kind.steps:
        return name
    looped = "interleaved_zb" if kind.splits_backward else "interleaved_1f1b"
    return "zbv" if kind.v_shaped else "1f1b" if kind.stages_per_rank == 1 else looped


@cache
def actions(name: str, pp: int, stages: int, number: int) -> list[list[Action]]:
    """Return the actions of `pp` ranks with `stages` stages each for a number of microbatches. The result is cached: do
    not change it.
    """
    return [actions_of_rank(rank, name, pp, stages, number) for rank in range(pp)]


def actions_of_rank(rank: int, name: str, pp: int, stages: int, number: int) -> list[Action]:
    """Return the actions of one pipeline rank."""
    order = numbered(resolve(PIPELINE_SCHEDULES[name].steps)(rank, pp, stages, number))
    # the steps of zbv may contain more microbatches than the job has
    return [action for action in order if action[2] < number]


def numbered(steps: Iterable[Step]) -> list[Action]:
    """Give each step its microbatch. The forwards of a stage are numbered in order, and so are its backwards. The steps
    W (gradients of weights) have the same order as the steps I (gradients of inputs).
    """
    counts: Counter[tuple[int, bool]] = Counter()
    pending: list[tuple[int, int]] = []
    done: list[Action] = []
    for stage, kind in steps:
        if kind != "W":
            number = counts[stage, kind == "F"]
            counts[stage, kind == "F"] += 1
            pending += [(stage, number)] * (kind == "I")
            done.append((stage, kind, number))
        elif pending:
            entry = next(waiting for waiting in pending if stage in (None, waiting[0]))
            pending.remove(entry)
            done.append((entry[0], "W", entry[1]))
    return done


def forwards_first(rank: int, pp: int, stages: int, number: int) -> list[Step]:
    """Return the steps of GPipe."""
    return [*[(rank, "F")] * number, *[(rank, "B")] * number]


def one_forward_one_backward(rank: int, pp: int, stages: int, number: int) -> list[Step]:
    """Return the steps of 1F1B."""
    ahead = min(number, pp - rank)
    return [*[(rank, "F")] * ahead, *[(rank, "B"), (rank, "F")] * (number - ahead), *[(rank, "B")] * ahead]


def breadth_first(rank: int, pp: int, stages: int, number: int) -> list[Step]:
    """Return the steps of looped BFS. torch reverses the microbatches in the backward, which changes neither time nor
    memory.
    """
    stages_of_rank = range(rank, pp * stages, pp)
    return [
        *((stage, "F") for stage in stages_of_rank for _ in range(number)),
        *((stage, "B") for stage in reversed(stages_of_rank) for _ in range(number)),
    ]


def interleaved(rank: int, pp: int, stages: int, number: int, zero_bubble: bool = False) -> Iterable[Step]:
    """Yield the steps of interleaved 1F1B. With `zero_bubble`, a backward computes the gradients of its inputs at once,
    and those of its weights `rank` backwards later.
    """
    in_round, all_of_them = number // max(1, number // pp), stages * number
    warm_up = min((stages - 1) * in_round + (1 if zero_bubble else 2) * (pp - 1 - rank), all_of_them)
    for step in range(all_of_them + warm_up):
        if step < all_of_them:
            yield step // in_round % stages * pp + rank, "F"
        if step >= warm_up:
            yield (stages - 1 - (step - warm_up) // in_round % stages) * pp + rank, "I" if zero_bubble else "B"
            if zero_bubble and step - warm_up >= rank:
                yield None, "W"
    yield from [(None, "W")] * (rank * zero_bubble)


interleaved_zero_bubble = partial(interleaved, zero_bubble=True)


def zero_bubble_v(rank: int, pp: int, stages: int, number: int) -> Iterable[Step]:
    """Yield the steps of ZBV (arXiv 2401.10241, section 6)."""
    low, high = rank, 2 * pp - 1 - rank
    number = max(2 * pp - 1, number)
    yield from [(low, "F")] * (2 * (pp - rank) - 1)
    yield from [(high, "F"), (low, "F")] * rank
    yield from [(high, "F"), (high, "I"), (high, "W")] * (pp - rank)
    low_done, high_done = 2 * pp - 1 - rank, pp
    while high_done < low_done or low_done < number:
        yield from [(low, "F")] * (low_done < number)
        low_done, high_done = min(low_done + 1, number), high_done + 1
        yield from [(low, "I"), (low, "W"), (high, "F"), (high, "I"), (high, "W")]
    yield from [(low, "I"), (high, "I")] * rank
    yield from [(low, "I"), (low, "W")] * (pp - rank)
    yield from [(high, "W")] * rank
    yield from [(low, "W")] * rank


def dual_pipe_v(rank: int, pp: int, stages: int, number: int) -> Iterable[Step]:
    """Yield the steps of DualPipeV. A forward and a backward that overlap are two steps here.

    The microbatches go down the low stages and come back up the high ones. Warm-up: forwards, then backwards of the
    high stage. Steady: a forward for each backward. Cool-down: backwards, from the middle on in two halves (I, W).
    """
    low, high, left = rank, 2 * pp - 1 - rank, pp - rank - 1
    # warm-up
    yield from [(low, "F")] * (2 * left)
    yield from [(low, "F"), (high, "F")] * (rank + 1)
    yield from [(high, "I"), (None, "W"), (high, "F")] * left
    # steady
    yield from [(low, "F"), (high, "B"), (high, "F"), (low, "B")] * (number - 2 * pp + rank + 1)
    # cool-down
    yield from [(high, "B"), (high, "F"), (low, "B")] * left
    half = False  # whether backwards are computed in halves by now
    for index in range(rank + 1):
        half = half or (index == (rank + 1) // 2 and rank % 2 == 1)
        yield high, "I" if half else "B"
        half = half or (index == (rank + 1) // 2 and rank % 2 == 0)
        yield low, "I" if half else "B"
    yield from [(None, "W"), (low, "I" if half else "B")] * left
    yield from [(None, "W")] * (rank + 1)


@dataclass(frozen=True)
class Held:
    """How many microbatches' activations a pipeline rank holds. A microbatch on stage s counts as weights[s]."""

    most: float  # largest number that is held at once. A microbatch counts from its forward until its backward is done.
    at_end: float = 0  # number held when a forward of the last stage has just run
    postponed: float = 0  # number of the microbatches in `most` whose weights' gradients are still to be computed


def in_flight(job: Job, rank: int, weights: tuple[float, ...]) -> Held:
    """Return how many microbatches a pipeline rank holds. A microbatch on stage s counts as weights[s]. Without a
    pipeline, a rank holds one microbatch.
    """
    if job.parallelism.pp == 1:
        return Held(weights[0], weights[0])
    if written := written_schedule(job):
        return _held(written[rank], weights)
    return _held_by(
        known(job.pp_schedule.name),
        job.parallelism.pp,
        job.pp_schedule.stages_per_rank,
        microbatches(job),
        rank,
        weights,
    )


@cache
def _held_by(name: str, pp: int, stages: int, number: int, rank: int, weights: tuple[float, ...]) -> Held:
    return _held(actions_of_rank(rank, name, pp, stages, number), weights)


def _held(order: Iterable[Action], weights: tuple[float, ...]) -> Held:
    """Replay a rank's actions, and return how many microbatches' activations it holds: at most, at the last stage's
    forward, and how many of them wait for the weights' gradients only. A stage counts with its weight.
    """
    held = halfway = most = at_end = postponed = 0.0
    for stage, kind, _ in order:
        held += weights[stage] * (kind == "F")
        halfway += weights[stage] * (kind == "I")
        if held > most:
            most, postponed = held, 0.0
        if held == most:
            postponed = max(postponed, halfway)
        if (stage, kind) == (len(weights) - 1, "F"):
            at_end = max(at_end, held)
        held -= weights[stage] * (kind in "BW")
        halfway -= weights[stage] * (kind == "W")
    return Held(most, at_end, postponed)


@cache
def idle_time(name: str, pp: int, stages: int, number: int) -> float:
    """Return the average rank's idle time in units of a stage's forward, if all stages take equally long and a backward
    takes twice as long as a forward.
    """
    order = actions(name, pp, stages, number)
    played = play(order, pp * stages)
    span = max(start + TIME[action[1]] for rank in played for start, action in rank)
    return span - sum(TIME[action[1]] for rank in order for action in rank) / pp


def play(
    ranks: list[list[Action]],
    stages: int,
    seconds: Callable[[Action], float] = lambda action: TIME[action[1]],
    travel: float = 0.0,
) -> list[list[tuple[float, Action]]]:
    """Simulate a schedule. Return when each action starts. A rank runs its actions in order, and each action starts as
    soon as its inputs exist.

    `seconds` returns the duration of an action; `travel` is the time in which an action's output is sent to the next
    stage. If an action waits for ever, its rank has no entries from that action on.
    """
    ends: dict[Action, float] = {}
    played: list[list[tuple[float, Action]]] = [[] for _ in ranks]
    free = [0.0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while (
                len(played[rank]) < len(actions)
                and (ready := _ready(actions[len(played[rank])], ends, stages, travel)) is not None
            ):
                action = actions[len(played[rank])]
                start = max(ready, free[rank])
                played[rank].append((start, action))
                ends[action] = free[rank] = start + seconds(action)
                moved = True
    return played


def _ready(action: Action, ends: dict[Action, float], stages: int, travel: float) -> float | None:
    """Return the time at which the inputs of an action are complete; None if that is not known yet."""
    stage, kind, number = action
    if kind == "F":
        before = ends.get((stage - 1, "F", number))
        return 0.0 if stage == 0 else None if before is None else before + travel
    if kind == "W":
        return ends.get((stage, "I", number))
    forward_end = ends.get((stage, "F", number))
    after = (
        forward_end if stage == stages - 1 else ends.get((stage + 1, "B", number), ends.get((stage + 1, "I", number)))
    )
    return None if forward_end is None or after is None else max(forward_end, after + travel * (stage < stages - 1))
