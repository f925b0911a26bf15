"""Pipeline parallelism: this rank's stages under one of torch's schedules, one local batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from titan_hydra.core.base.private import Action as TorchAction
from titan_hydra.core.base.private import (
    ComputationType,
    PipelineSchedule,
    PipelineScheduleRuntime,
    forget_forward,
    holds_sent,
    load_csv,
)
from titan_hydra.core.job.batches import microbatch_size, microbatches
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import Action, stage_count, stages_of_ranks
from titan_hydra.core.job.schedules import TIME, actions_of

from .mesh import Mesh, local_part, loss_in

Tensors = dict[str, Tensor]  # the tensors of a batch, by name
# a function from a batch to the first argument of the model's forward, and the other arguments by name
Inputs = Callable[[Tensors], tuple[Tensor, Tensors]]
Summed = Callable[[Tensor, Tensors], Tensor]  # a function from the model's output and the batch to a sum
META = torch.device("meta")
FORWARD = (ComputationType.FORWARD, ComputationType.SEND_F, ComputationType.RECV_F)


class Stage(PipelineStage):
    """torch's pipeline stage, with given shapes of its input and output. `inputs` is the objective's function, applied
    to a microbatch.
    """

    def __init__(
        self, module: nn.Module, index: int, mesh: Mesh, job: Job, device: torch.device, first: Tensor, inputs: Inputs
    ):
        """Tell torch the shapes of this stage's input and output; `first` has those of the model's input."""
        hidden = hidden_state(job)
        # With given shapes, torch need not run the stage to infer them. Only the loss uses the last stage's output.
        super().__init__(
            module,
            index,
            stage_count(job),
            device,
            output_args=hidden,
            group=mesh.pipeline,
            input_args=hidden if index else torch.empty_like(first, device="meta"),
        )
        self.inputs, self.microbatches = inputs, list[Tensors]()
        self.newest: Tensors = {}  # the microbatch whose forward was run last

    def forward_one_chunk(self, number: int, args: tuple = (), kwargs: dict | None = None, **options: bool) -> Tensor:  # type: ignore[override]
        """Run the forward of a microbatch, which `Pipeline` has cut: torch would cut every tensor along its first
        dimension.
        """
        self.newest = self.microbatches[number]
        first, others = self.inputs(self.newest)
        output = super().forward_one_chunk(number, (first,), others, **options)
        if not self.has_backward:
            move_received(self.args_recv_info[number], META)
            if self.is_last:
                # otherwise the stage would hold the logits of all microbatches until the next step
                forget_forward(self, number)
        return output

    def backward_one_chunk(self, number: int, *args: Any, **options: Any) -> None:  # type: ignore[override]
        """Run the backward of a microbatch, or only the half that gives its inputs' gradients, and free the tensors
        that were received for it.
        """
        super().backward_one_chunk(number, *args, **options)
        if options.get("loss") is not None and options.get("full_backward", True):
            # torch keeps the losses of a step, and the graph of a loss would keep what was received for it
            options["loss"].detach_()
        move_received(self.args_recv_info[number], META)
        move_received(self.grad_recv_info.get(number, ()), META)

    def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """Allocate the input of a microbatch and return the operations that receive it."""
        move_received(self.args_recv_info[number], self.device)
        return super().get_fwd_recv_ops(number)

    def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """Allocate the gradient of a microbatch's output and return the operations that receive it."""
        move_received(self.grad_recv_info.get(number, ()), self.device)
        return super().get_bwd_recv_ops(number)

    def get_fwd_send_ops(self, number: int) -> list[dist.P2POp]:
        """Return the operations that send the output of a microbatch."""
        operations = super().get_fwd_send_ops(number)
        if not self.has_backward and holds_sent(self):
            # otherwise the stage would hold the outputs of all microbatches until the next step
            forget_forward(self, number)
        return operations

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        with _receives_on_meta(self):
            return super()._prepare_forward_infra(*args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        with _receives_on_meta(self):
            return super()._prepare_backward_infra(*args, **options)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        # torch 2.11 validates the output of every stage, but the last stage's output has no declared shape
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # removes torch 2.11's first exchange with the neighbours, which fails on gloo if both stages are on one rank
        return []


@contextlib.contextmanager
def _receives_on_meta(stage: Stage) -> Iterator[None]:
    """While the block runs, let torch describe the tensors that a stage receives without allocating them. Before 2.15
    torch would allocate them for all microbatches at once (40 GiB for 128 microbatches), although 1F1B has only one
    microbatch for each stage in flight.
    """
    device, stage.device = stage.device, META
    try:
        yield
    finally:
        stage.device = device


def move_received(received: tuple[Any, ...], device: torch.device) -> None:
    """Replace each tensor that a stage receives by an empty one on a device; on `META` it has no memory. torch 2.15
    does this itself, so its records have no tensor here.
    """
    for info in received:
        if getattr(info, "buffer", None) is not None:  # torch 2.11's records of the first stage have no buffer
            info.buffer = torch.empty_like(info.buffer, device=device).requires_grad_(info.buffer.requires_grad)


class Pipeline:
    """This rank's stages under the job's schedule. `inputs`, `loss` and `measure` are the objective's functions; the rank
    with the last stage computes the sums. `first` has the shape and the dtype of the first stage's input.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        mesh: Mesh,
        job: Job,
        device: torch.device,
        first: Tensor,
        inputs: Inputs,
        loss: Summed,
        measure: Summed,
    ):
        """Create this rank's stages and their schedule. `summed` is the sum of the present call, loss or measure;
        `count` is the number of elements over which the step's loss is a mean.
        """
        indices = stages_of_ranks(job)[mesh.coordinate("pp")]
        self.stages = [
            Stage(module, index, mesh, job, device, first, inputs)
            for module, index in zip(modules, indices, strict=True)
        ]
        self.has_loss = self.stages[-1].is_last
        self.size = microbatch_size(job)
        self.device, self.inputs, self.loss, self.measure = device, inputs, loss, measure
        self.summed, self.count = loss, torch.ones((), device=device)
        self.shares: list[Tensor] = []  # of each microbatch: its shares of the mean loss and of the columns
        self.schedule = build_schedule(self.stages, job, self._loss_of)
        # This all-reduce creates the group's communicator. NCCL would create it at the first mixed exchange, in which
        # not every rank takes part.
        dist.all_reduce(torch.zeros(1, device=device), group=mesh.pipeline)

    def forward_backward(self, batch: Any, count: Tensor, last: bool) -> Tensor:
        """Accumulate the gradients of a local batch's summed loss divided by `count`. Return this quotient and those of
        the objective's columns; 0 if another rank has the last stage.

        torch's stages reduce gradients over the data-parallel ranks once for every local batch, not only for the step's
        `last`.
        """
        return self._run(self.schedule.step, batch, self.inputs, self.loss, count)

    def forward(self, batch: Any, objective: Any = None) -> Tensor:
        """Return the summed measure of a local batch; 0 if another rank has the last stage. If `objective` is given,
        the inputs and the measure are those of this objective. Call with gradients off.
        """
        inputs, measure = (objective.inputs, objective.measure) if objective else (self.inputs, self.measure)
        with forward_only(self.schedule, self.stages):
            return self._run(self.schedule.eval, batch, inputs, measure, torch.ones((), device=self.device))

    def _loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        """Return a microbatch's share of the mean loss, on the last stage. torch needs `target` only to count
        microbatches; the tensors of the batch are in the stage.
        """
        shares = local_part(self.summed(output, self.stages[-1].newest)) / self.count
        self.shares.append(shares.detach())
        return loss_in(shares)

    def _run(self, run: Callable[..., Any], batch: Any, inputs: Inputs, summed: Summed, count: Tensor) -> Tensor:
        """Run the schedule over the microbatches of a titan_hydra.core.data.batch.Batch. Returns the sum of what the last
        stage computed.
        """
        self.summed, self.count, self.shares = summed, count, []
        parts = [part.tensors for part in batch.split(self.size)]
        for stage in self.stages:
            stage.microbatches, stage.inputs = parts, inputs
        run(**{"target": torch.empty(len(parts))} if self.has_loss else {}, return_outputs=False)
        return torch.stack(self.shares).sum(0) if self.shares else torch.zeros((), device=self.device)


def build_schedule(stages: list[Stage], job: Job, loss: Callable[[Tensor, Tensor], Tensor]) -> PipelineSchedule:
    """Build torch's schedule over this rank's stages. It must not scale gradients, as the loss is already divided by the
    count of the global batch.
    """
    record, config = PIPELINE_SCHEDULES[job.pp_schedule.name], cast(Any, job.pp_schedule)
    kind = resolve(record.schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, n_microbatches=microbatches(job), loss_fn=loss, scale_grads=False)
    if record.from_file:
        load_csv(schedule, config.csv)
    return schedule


def actions_of_ranks(schedule: PipelineSchedule, job: Job) -> list[list[Action]]:
    """Return the computations of every pipeline rank in order, from torch's own list."""
    # in torch 2.13, torch's own list of 1F1B has wrong microbatches on the last rank
    if isinstance(schedule, PipelineScheduleSingle) and PIPELINE_SCHEDULES[job.pp_schedule.name].steps:
        return actions_of(job)
    order = schedule.pipeline_order
    return [[action for step in order[rank] if step for action in _computations(step)] for rank in sorted(order)]


def _computations(step: TorchAction) -> list[Action]:
    """Return the computations of a step of the schedule, without communication. If a step overlaps a forward with a
    backward, return both.
    """
    parts = [
        (part.stage_index, part.computation_type.value, part.microbatch_index) for part in step.sub_actions or (step,)
    ]
    return [part for part in parts if part[1] in TIME]


@contextlib.contextmanager
def forward_only(schedule: PipelineSchedule, stages: list[Stage]) -> Iterator[None]:
    """Remove everything except the forward from a schedule while the block runs.

    torch's own eval also walks through the backward actions, which fails in a V schedule where two adjacent stages are
    on one rank. The remaining sends and receives still match, as those of a backward are removed on both ranks.
    """
    if not isinstance(schedule, PipelineScheduleRuntime):
        yield
        return
    all_actions = schedule.pipeline_order_with_comms
    indices = sorted({stage.stage_index for stage in stages})
    gather, free = (
        [TorchAction(stage, kind) for stage in indices] for kind in (ComputationType.UNSHARD, ComputationType.RESHARD)
    )
    forward = [
        part
        for action in all_actions[schedule.rank]
        for part in action.sub_actions or (action,)
        if part.computation_type in FORWARD
    ]
    schedule.pipeline_order_with_comms = all_actions | {schedule.rank: [*gather, *forward, *free]}
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = all_actions


def hidden_state(job: Job) -> Tensor:
    """Return one microbatch of the tensor sent between stages, in this rank's shape, on the meta device.

    It requires grad, as otherwise torch would not send its gradient back and would raise no error.
    """
    degrees = job.parallelism
    parts = degrees.cp * (degrees.tp if degrees.sequence_parallel else 1)
    shape = (microbatch_size(job), job.data.seq_len // parts, job.model.dim)
    return torch.empty(shape, dtype=getattr(torch, job.precision.compute_dtype), device="meta", requires_grad=True)
