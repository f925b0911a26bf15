"""`fault_tolerance=torchft`: before every step the live replica groups agree on a quorum, and then sum their gradients.

torchft's manager finds the quorum, detects failures and decides whether a step counts; summation and state transfer are
implemented here. All groups together learn what their ranks would learn as one data-parallel world. Tokens are counted
over all groups before the first microbatch, so the sum of the gradients needs no division. A group that joins later
receives the weights, the optimizer state and the step number of a group that is ahead.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions
from torchft.checkpointing import CheckpointTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from titan_hydra.core.base.amounts import time_of_day
from titan_hydra.core.base.errors import RunError
from titan_hydra.core.checkpoint import state
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.data.loader import Loader
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.groups import Groups
from titan_hydra.core.train.observe.watchdog import Watchdog
from titan_hydra.core.train.step import Agreement
from titan_hydra.core.train.trainer import Trainer
from titan_hydra.core.train.world import open_store, steady_timeout

from . import shared_lighthouse
from .outer import local, shards

POLL = 0.05  # seconds between two reads of the files
RETRIES = 100  # maximum number of repetitions of a request, after a lighthouse has died and before another replaces it
COUNTS = ("step", "batches_committed")  # names of the counts in the state of torchft's manager


class PerStep(Groups):
    """The replica group of this rank, with its quorums. All ranks of a group must call the same methods in the same
    order.
    """

    def __init__(self, trainer: Trainer, run: Run, watch: Watchdog) -> None:
        """Create the manager."""
        job, self.job, self.run, self.watch = trainer.job, trainer.job, run, watch
        self.model, self.optimizers, self.stop = trainer.masters.weights, trainer.optimizers, trainer.stop_requested
        # `asked`: whether any group was asked to stop; `counts`: whether the step counts
        self.asked = self.counts = False
        self.last: Batch | None = None  # the batch of the newest step
        self.report: Callable[..., None] = lambda event, step, **values: None
        self.groups = 0  # number of groups in the last quorum
        # number of steps that this group skipped when it joined the next step's quorum; None: there is no such quorum
        # yet
        self.caught_up: int | None = None
        self.received: list[Tensor] | None = None  # another group's shards
        self.data_ahead = 0  # data step minus training step; more than 0 if a new run continues an old run's data
        for name in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.ERROR)  # otherwise torchft writes several lines per step
        limit = timedelta(seconds=job.comm.init_timeout_seconds)
        self.exchange = AllreduceOptions()
        # half of `limit`, which is how long the ranks of this group wait for each other
        self.exchange.timeout = limit / 2
        # time-out for connecting; all groups connect at the same time
        self.channel = ProcessGroupGloo(timedelta(seconds=job.fault_tolerance.timeout_seconds))
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # the host of rank 0
        self.store = open_store(host, None, limit) if run.rank == 0 else None
        port = [self.store.port if self.store is not None else 0]
        dist.broadcast_object_list(port, src=0, device=torch.device("cpu"))
        self.manager = Manager(
            self.channel,
            self.receive,
            self.own,
            min_replica_size=1,
            use_async_quorum=False,
            init_sync=False,
            quorum_retries=RETRIES,
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            rank=run.rank,
            world_size=run.world_size,
            store_addr=host,
            store_port=port[0],
            hostname=host,
            replica_id=f"group_{run.replica}",
            lighthouse_addr=self._lighthouse() if run.rank == 0 else None,
            checkpoint_transport=Handover(self.channel, self.own),
        )

    @property
    def leads(self) -> bool:  # type: ignore[override]  # a constant of a single group
        """Whether this group writes the run's result: whether it is the first group of the last quorum."""
        return self.manager.participating_rank() == 0

    def begin(self, step: int, data_step: int, resumed: bool) -> tuple[int, bool]:
        """Wait until all groups have arrived once in this attempt. Then agree with them on the first step, as
        `before_step` does for later steps.

        Return the step that this group has reached, and whether a stop was requested meanwhile.
        """
        self.data_ahead = data_step - step
        self.manager.load_state_dict({"step": step, "batches_committed": 0})
        if self.run.rank == 0:
            self.run.meetings.mkdir(parents=True, exist_ok=True)
            (self.run.meetings / f"came_{self.run.replica}").touch()
            # At the deadline, the groups that have arrived begin. This group's other ranks wait twice as long in the
            # barrier.
            deadline = time.monotonic() + self.job.comm.init_timeout_seconds / 2
            while len(list(self.run.meetings.glob("came_*"))) < self.job.fault_tolerance.replicas:
                if self.stop or time.monotonic() > deadline:
                    break
                time.sleep(POLL)
        dist.barrier()
        if self._any(bool(self.stop)):
            return step, True
        self._agree(step)
        return self.manager.current_step(), False

    def report_to(self, event: Callable[..., None]) -> None:
        """From now on, record changes of the quorum as events."""
        self.report = event

    def steps(self, done: int, last: int) -> Iterator[int]:
        """Yield the steps after `done`, up to `last`. A step is yielded when the groups have agreed on it, and is
        yielded again as long as it does not count.
        """
        while done < last:
            self.watch.at("meeting")
            done = self.before_step(done)
            yield done + 1
            done += self.counts

    def batch(self, step: int, loader: Loader) -> Batch:
        """Return the batch of a step. For a repeated step, return the same batch again. If this group has skipped steps
        to catch up with another group, the batches of these steps are skipped too.
        """
        while self.last is None or loader.state()["step"] < step + self.data_ahead:
            self.last = loader.next()
        return self.last

    def before_step(self, step: int) -> int:
        """Agree on the groups of the next step. Return the step that this group has reached. This is a later step than
        `step` if the group has taken the state of another group.
        """
        if self.caught_up is None:
            self._agree(step)
        now, groups = self.manager.current_step(), self.manager.num_participants()
        if groups != self.groups or self.caught_up:
            self.report("quorum", now, groups=groups, caught_up=self.caught_up)
        self.groups, self.caught_up = groups, None
        return now

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the groups, in place; the sums are bit-identical in all groups. After a failure nothing is
        summed, as the step will not count.
        """
        for tensor in tensors:
            if self.manager.errored():
                break
            host = tensor.detach().cpu().contiguous()
            try:
                self.channel.allreduce([host], self.exchange).wait()
                tensor.copy_(host)  # has no effect if `host` shares the tensor's memory
            except RuntimeError as error:  # gloo raises no other exceptions
                reason = str(error).splitlines()[0]
                print(f"{time_of_day()}  step {self.manager.current_step() + 1} is repeated: {reason}", flush=True)
                self.manager.report_error(error)
        if self.manager.errored():
            # Shut down the channel now. Otherwise a group that is blocked in it, waiting for this group, would never
            # reach the next quorum.
            self.channel.shutdown()

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        """Sum this rank's shards of the gradients over the groups."""
        self.add_up(local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None)

    def commits(self, agreement: Agreement) -> bool:
        """Return whether the step counts. If any group was asked to stop, all groups stop after the same step. On
        SLURM, where each group is a separate job, only the group that was asked stops.
        """
        _, _, stop, _ = agreement.read()
        asked = torch.tensor([float(stop)])
        self.add_up([asked])
        self.counts = self.manager.should_commit()
        if self.counts:
            self.exchange.timeout = timedelta(seconds=steady_timeout(self.job)) / 2
        self.asked = stop or (self.counts and bool(asked) and not self.run.submission)
        return self.counts

    def stops(self, asked: bool) -> bool:
        """Whether any group was asked to stop before the groups agreed on this step."""
        return self.asked

    def close(self) -> None:
        """Leave the other groups. They detect this after `fault_tolerance.timeout_seconds`."""
        if self.asked:  # when the groups begin again, they must also wait for this group
            (self.run.meetings / f"came_{self.run.replica}").unlink(missing_ok=True)
        self.manager.shutdown(wait=False)

    # --- a group's state, for a group that is behind
    # ----------------------------------------------------------------------

    def own(self) -> list[Tensor]:
        """Return this rank's shards of weights and optimizer state, in the same order in every group."""
        return shards(state.weights(self.model) | state.of_optimizers(self.model, self.optimizers))

    def receive(self, tensors: list[Tensor]) -> None:
        """Store another group's shards until it is known that all ranks of this group have received theirs."""
        self.received = tensors

    @torch.no_grad()
    def take(self, received: list[Tensor]) -> None:
        """Replace this group's state by the received shards."""
        optimizers: dict[str, Any] = state.of_optimizers(self.model, self.optimizers)
        for mine, theirs in zip(shards(state.weights(self.model) | optimizers), received, strict=True):
            mine.copy_(theirs)
        state.into_optimizers(self.model, self.optimizers, optimizers)

    # --- communication within the group -------------------------------------------------------------------------------

    def _any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        largest = torch.tensor([int(flag)])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return bool(largest)

    def _agree(self, step: int) -> None:
        """Find a quorum. If another group is ahead, all ranks of this group take its state, or none does."""
        before = self.manager.state_dict()
        self.manager.start_quorum()
        steps = torch.tensor([self.manager.current_step(), -self.manager.current_step()])
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        # torchft would not notice that the ranks of a group have reached different steps: it asks only one of them
        if steps.sum():
            self.manager.load_state_dict(before)
            self.manager.report_error(RuntimeError("not all ranks of this group received the others' state"))
        elif self.received is not None:
            self.take(self.received)
        self.received = None
        self.caught_up = self.manager.current_step() - step

    def _lighthouse(self) -> str:
        """Return the address of the lighthouse. The address comes from the configuration if it names one; else, on
        SLURM, from this rank's lighthouse process; else from the file that the local launcher writes.

        Raises RunError after the time-out.
        """
        config, limit = self.job.fault_tolerance, self.job.comm.init_timeout_seconds
        if config.lighthouse:
            return f"http://{config.lighthouse}"
        if self.run.submission:
            wait = limit / 4 if self.run.replica else 0
            self.helper, address = shared_lighthouse.start_shared_lighthouse(
                self.run.meetings, config.timeout_seconds, wait
            )
            return address
        path, deadline = self.run.meetings / "lighthouse", time.monotonic() + limit
        while not path.exists():
            if time.monotonic() > deadline:
                raise RunError(f"torchft's lighthouse did not start: {path} is not there; its errors are in parent.log")
            time.sleep(POLL)
        return path.read_text()


class Handover(CheckpointTransport):
    """Transfers a group's state, tensor by tensor, through the groups' channel. It replaces torchft's own transport,
    which would unpickle any data that another group sends.
    """

    def __init__(self, channel: ProcessGroupGloo, own: Callable[[], list[Tensor]]) -> None:
        self.channel, self.own = channel, own

    def metadata(self) -> str:
        """Return "": the receiver needs no address, as it already has the channel."""
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Send this rank's shards, and return when they are sent."""
        counts = torch.tensor([state_dict["torchft"][name] for name in COUNTS])
        for tensor in [counts, *state_dict["user"]["default"]]:
            host = tensor.detach().cpu().contiguous()
            for rank in dst_ranks:
                self.channel.send([host], rank, tag=0).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Receive another group's shards into new memory, so that a partial transfer does not change this group's
        state.
        """
        received = [
            torch.zeros(len(COUNTS), dtype=torch.int64),
            *(torch.empty_like(tensor, device="cpu") for tensor in self.own()),
        ]
        for tensor in received:
            self.channel.recv([tensor], src_rank, tag=0).wait(timeout)
        counts, *tensors = received
        return {"torchft": dict(zip(COUNTS, counts.tolist(), strict=True)), "user": {"default": tensors}}
