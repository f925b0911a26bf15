"""Run many ranks as threads of one process: 128 ranks on one core, with real arithmetic.

Only one thread runs at a time, and another thread gets its turn only inside a collective. So a run is reproducible, and
if no thread can continue, the collectives in which the ranks wait are known at once. The process groups are those of
torch's own tests. They have no point-to-point messages, so pipelines cannot run.
"""

import logging
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from titan_hydra.core.base.private import op_dispatcher, private_handlers, threaded_groups
from titan_hydra.core.base.threads import thread

# Functions of torch.distributed that `sums.reductions` replaces while a rank computes gradients.
REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single")


@dataclass
class OpenCollective:
    """A collective that some ranks of its group have not entered yet."""

    # torch's object for this collective; its method `work` computes all ranks' results from all ranks' data
    collective: Any
    group: str
    data: dict[int, Any] = field(default_factory=dict)  # each rank's data, by the rank's number in the group
    waiting: list[int] = field(default_factory=list)  # global numbers of the ranks that wait


class Stuck(RuntimeError):
    """Ranks wait for each other in different collectives, or for a rank that has ended."""


class OtherRankFailed(BaseException):
    """Ends a rank's thread because another rank has failed."""


class RankTurns:
    """Lets one thread run at a time. Only the thread that has the turn calls these methods."""

    def __init__(self, ranks: int):
        """Begin with the turn of no thread. `gates` block the threads that wait, `ready` are the ranks that can
        continue, `meetings` the collectives for which some ranks have not come yet.
        """
        self.gates = [threading.Semaphore(0) for _ in range(ranks)]
        self.ready = deque(range(ranks))
        self.ended: set[int] = set()
        self.meetings: dict[tuple[str, int], OpenCollective] = {}
        self.arrivals: dict[int, Counter[str]] = defaultdict(Counter)  # number of collectives by rank and group
        self.failure: BaseException | None = None
        self.own = threading.local()

    def run(self, rank: int, task: Callable[[], None]) -> None:
        """Run a rank's task in this thread, from its first turn on."""
        self.gates[rank].acquire()
        self.own.rank = rank
        try:
            if self.failure is None:
                task()
        except OtherRankFailed:
            pass
        except BaseException as error:
            error.add_note(f"on rank {rank} of {len(self.gates)}")
            self.fail(error)
        self.ended.add(rank)
        self.next()

    def meet(self, collective: Any, group: Any, member: int, data: Any) -> None:
        """Return once all ranks of a group have entered a collective with their data, and its results are in their
        tensors. Raises RuntimeError if they do not all call the same collective.
        """
        rank, name = self.own.rank, group.group_name
        self.arrivals[rank][name] += 1
        key = name, self.arrivals[rank][name]
        meeting = self.meetings.setdefault(
            key, OpenCollective(collective, f"{sorted(dist.get_process_group_ranks(group))}")
        )
        if described_call(collective) != described_call(meeting.collective):
            raise RuntimeError(
                f"rank {rank} calls {described_call(collective)} where ranks {meeting.waiting} call {described_call(meeting.collective)}, "
                f"in the group of ranks {meeting.group}"
            )
        meeting.data[member] = data
        if len(meeting.data) < group.size():
            meeting.waiting.append(rank)
            self.wait(rank)
            return
        del self.meetings[key]
        self.ready.extend(meeting.waiting)
        meeting.collective.work([meeting.data[index] for index in range(group.size())])

    def wait(self, rank: int) -> None:
        """Give the turn to another thread. Return when this rank gets its next turn, with its process-wide state
        restored.
        """
        handlers = dict(private_handlers(op_dispatcher))
        reductions = {name: vars(dist)[name] for name in REDUCTIONS if name in vars(dist)}
        self.next()
        self.gates[rank].acquire()
        if self.failure is not None:
            raise OtherRankFailed
        private_handlers(op_dispatcher).clear()
        private_handlers(op_dispatcher).update(handlers)
        vars(dist).update(reductions)

    def next(self) -> None:
        """Give the turn to the next thread that can continue. If there is none although some ranks have not ended, all
        waiting ranks fail.
        """
        if not self.ready and len(self.ended) < len(self.gates):
            lines = [
                f"ranks {waiting_call.waiting} wait in {described_call(waiting_call.collective)} of ranks {waiting_call.group}"
                for waiting_call in self.meetings.values()
            ]
            self.fail(Stuck("\n".join([f"ranks that have ended: {sorted(self.ended)}", *lines])))
        if self.ready:
            self.gates[self.ready.popleft()].release()

    def fail(self, error: BaseException) -> None:
        """End all waiting threads, one after another."""
        self.failure = self.failure or error
        waiting = [rank for meeting in self.meetings.values() for rank in meeting.waiting]
        self.meetings.clear()
        self.ready.extend(waiting)


def described_call(collective: Any) -> str:
    """Return the name of a collective with its operation or source."""
    options = [value for value in vars(collective).values() if value is not None]
    # a ReduceOp would be printed as an address
    options = [str(getattr(value, "op", value)) for value in options]
    return f"{type(collective).__name__}({', '.join(options)})"


@contextmanager
def _one_rank_warns(turns: RankTurns) -> Iterator[None]:
    """While the block runs, show torch's log messages of the first rank only, as all ranks log the same."""
    loggers = [logging.getLogger(name) for name in tuple(logging.root.manager.loggerDict) if name.startswith("torch")]
    handlers = {handler for logger in loggers for handler in logger.handlers}

    def of_first(record: logging.LogRecord) -> bool:
        return getattr(turns.own, "rank", 0) == 0

    for handler in handlers:
        handler.addFilter(of_first)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(of_first)


def as_threads(ranks: int, task: Callable[[], None]) -> None:
    """Run `task` on `ranks` ranks, each a thread of this process with its own default process group. Raises the
    exception of the rank that failed first.
    """
    turns, store = RankTurns(ranks), dist.HashStore()

    def rank_of_world(rank: int) -> Callable[[], None]:
        """Return what the thread of a rank runs: the task in a process group of its own."""

        def start() -> None:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=ranks)
            try:
                task()
            finally:
                dist.destroy_process_group()

        return lambda: turns.run(rank, start)

    with threaded_groups(turns.meet), mock.patch.object(sys, "excepthook", sys.excepthook), _one_rank_warns(turns):
        threads = [thread(rank_of_world(rank), f"rank {rank}") for rank in range(ranks)]
        for of_rank in threads:
            of_rank.start()
        turns.next()
        for of_rank in threads:
            of_rank.join()
    if turns.failure is not None:
        raise turns.failure
