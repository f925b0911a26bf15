"""A replica group as the training loop uses it. The group exchanges weights with other groups after some steps and,
before the first step, may take a newer state from them.

A group is a world of its own. Its rank 0 agrees with the other groups on a meeting (quorum.py), and broadcasts the
result to the ranks of its group. Then the ranks with the same index in all groups exchange their shards (exchange.py).
When it is certain that all members have the exchanged data, outer.py changes the weights.
"""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_hydra.core.base.errors import RunError, Stopped
from titan_hydra.core.checkpoint import state
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.groups import Groups
from titan_hydra.core.train.observe.watchdog import Watchdog
from titan_hydra.core.train.trainer import Trainer
from titan_hydra.core.train.world import open_store

from .exchange import Peers
from .outer import Fragment, due, fragments_of, shards
from .quorum import Board, Meeting

# time-out of ranks that wait for their group's rank 0; the waits of rank 0 itself end by other limits
LONGEST = timedelta(days=7)


class Replicas(Groups):
    """The replica group of this rank, with its meetings. All ranks of a group must call the same methods in the same
    order.
    """

    def __init__(self, trainer: Trainer, run: Run, watch: Watchdog) -> None:
        """Create the fragments and, on rank 0, the board."""
        job, model = trainer.job, trainer.masters.weights
        self.job, self.config, self.run, self.watch = job, job.fault_tolerance, run, watch
        self.model, self.optimizers = model, trainer.optimizers
        self.stop: Callable[[], bool] = lambda: bool(trainer.stop_requested)
        # meetings that were held before `report_to` was called
        self.unreported: list[tuple[int, dict[str, Any]]] = []
        self.report: Callable[..., None] = lambda event, step, **values: self.unreported.append((step, values))
        self.fragments = fragments_of(model, family_of(job.model).modules(job.model), self.config)
        self.last = torch.zeros((), dtype=torch.int64)  # step of the last meeting
        self.peers = Peers(run.replica, run.rank, self.config.timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=LONGEST)
        self.members = list(range(self.config.replicas))  # groups of the last meeting
        self.board = None
        if run.rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self.store = open_store(host, None, timedelta(seconds=self.config.timeout_seconds))
            self.board = Board(
                run.meetings,
                run.replica,
                self.config.replicas,
                self.config.timeout_seconds,
                f"{host}:{self.store.port}",
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The outer state of this rank, for a checkpoint. The tensors are not copies."""
        outer = {
            f"{number}.{name}": getattr(fragment, name)
            for number, fragment in enumerate(self.fragments)
            for name in ("anchor", "momentum")
            if fragment.anchor is not None
        }
        return {f"rank_{self.run.rank}.{name}": tensor for name, tensor in {"last": self.last, **outer}.items()}

    @property
    def leads(self) -> bool:  # type: ignore[override]  # a constant of a single group
        """Whether this group writes the run's result: whether it is the first group of the last meeting."""
        return self.run.replica == self.members[0]

    def begin(self, step: int, data_step: int, resumed: bool) -> tuple[int, bool]:
        """Join the other groups, with the weights that this group has after `step`. Return the step to continue from,
        and whether a stop was requested meanwhile.

        A group that is behind the others waits here for their next meeting. If the group was stopped just before a
        meeting that was due, it begins with that meeting.
        """
        if not resumed:
            self.last.fill_(step)
            for fragment in self.fragments:
                fragment.remember()
        position = (int(self.last), step)
        behind = self._board("begin", position, self.job.comm.init_timeout_seconds, self.stop)
        owed = due(step, self.job.steps, self.config) and self.last < step
        return self.meet(step, None) if behind or owed else (step, False)

    def report_to(self, event: Callable[..., None]) -> None:
        """From now on, record meetings as events."""
        self.report = event
        for step, values in self.unreported:
            event("meeting", step, **values)

    def steps(self, done: int, last: int) -> Iterator[int]:
        """Yield the steps after `done`, up to `last`. If a meeting moves this group to a later step, continue after
        that step.
        """
        self.done = done
        while self.done < last:
            self.done += 1
            yield self.done

    def after_step(self, step: int, loss: float | None) -> tuple[int, bool]:
        """Exchange weights with the other groups if a meeting is due. Return the step to continue from, and whether a
        stop was requested meanwhile.
        """
        self.watch.at("meeting")
        if not due(step, self.job.steps, self.config):
            return step, False
        self.done, stop = self.meet(step, loss)
        return self.done, stop

    @torch.no_grad()
    def meet(self, step: int, loss: float | None) -> tuple[int, bool]:
        """Hold a meeting with the groups that are alive, and repeat it until it counts."""
        began, position = time.perf_counter(), (int(self.last), step)
        while True:
            meeting: Meeting | None = self._board("convene", position, self.stop)
            if meeting is None and position == (-1, -1):
                self.watch.mark_stopped()
                raise Stopped("stopped while another group's weights were being taken; nothing is saved")
            if meeting is None:
                return step, True
            if meeting.step < 0:
                raise RunError(
                    "the group whose weights were being taken is gone, and there is no other to take them from"
                )
            means = self._exchange(meeting, loss)
            if self._board("settle", meeting, self._all(means is not None)):
                break
            self.peers.part()
            if self.run.replica in meeting.takers:
                position = (-1, -1)  # this group's state is only partly replaced, so the state belongs to no step
        *averages, mean_loss = means
        for number, average in zip(due(meeting.step, self.job.steps, self.config), averages, strict=True):
            self.fragments[number].take(average, self.config)
        self.last.fill_(meeting.step)
        self.members = sorted(meeting.members)
        if self.board is not None:
            self.board.become("training", (meeting.step, meeting.step))
        # the loss is unknown if a stop had postponed the meeting
        known = {} if mean_loss.isnan() else {"loss": float(mean_loss)}
        self.report(
            "meeting",
            meeting.step,
            groups=len(self.members),
            joined=len(meeting.takers),
            **known,
            seconds=time.perf_counter() - began,
        )
        return meeting.step, False

    def _exchange(self, meeting: Meeting, loss: float | None) -> list[Tensor] | None:
        """Return the due fragments and the loss, each averaged over the donors; None if a member was lost. A member
        with an older state (a taker) first receives the whole state of a donor; the state of other members does not
        change here.
        """
        donates = self.run.replica in meeting.donors
        try:
            self.peers.meet(meeting)
            if meeting.takers:
                for tensor in self._state(donates):
                    self.peers.hand_over(tensor, meeting.donors[0])
            offers = [self.fragments[number].offer() for number in due(meeting.step, self.job.steps, self.config)]
            offers.append(torch.tensor([loss if loss is not None else torch.nan], dtype=torch.float64))
            for offer in offers:
                if not donates:
                    offer.zero_()
                self.peers.add_up(offer)
                offer.div_(len(meeting.donors))
            return offers
        except RuntimeError as error:  # gloo and the store raise no other exceptions
            print(
                f"meeting {meeting.number} after step {meeting.step} failed: {str(error).splitlines()[0]}", flush=True
            )
            return None

    def _state(self, donates: bool) -> Iterator[Tensor]:
        """Yield all tensors of this group's state, in the same order in all groups; the caller overwrites them if the
        group is a taker. In that case, load the received state into the optimizers afterwards.
        """
        for fragment in self.fragments:
            yield from self._weights(fragment, donates)
            if fragment.anchor is not None:
                yield fragment.anchor
                yield fragment.momentum
        content: dict[str, Any] = state.of_optimizers(self.model, self.optimizers)
        yield from shards(content)
        if not donates:
            state.into_optimizers(self.model, self.optimizers, content)

    def _weights(self, fragment: Fragment, donates: bool) -> Iterator[Tensor]:
        vector = fragment.weights()
        yield vector
        if not donates:
            fragment.set_weights(vector)

    # --- communication within the group -------------------------------------------------------------------------------

    def _board(self, method: str, *arguments: Any) -> Any:
        """Call a method of rank 0's board and broadcast its result to all ranks."""
        answer = [getattr(self.board, method)(*arguments) if self.board is not None else None]
        dist.broadcast_object_list(answer, src=0, group=self.group, device=torch.device("cpu"))
        return answer[0]

    def _all(self, well: bool) -> bool:
        """Whether the flag `well` is set on all ranks."""
        smallest = torch.tensor([int(well)])
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.group)
        return bool(smallest)

    def close(self) -> None:
        """Leave the other groups."""
        if self.board is not None:
            self.board.close()
