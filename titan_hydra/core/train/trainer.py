"""The state of a step: the model of a job on this rank, its gradients and its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from titan_hydra.core import models, parallel
from titan_hydra.core.data.batch import Batch, onto
from titan_hydra.core.data.loader import Loader
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.parametrization import rules_of
from titan_hydra.core.kernels.attention import check_attention
from titan_hydra.core.models.init import init_weights, scale_forward
from titan_hydra.core.parallel import context as context_parallel
from titan_hydra.core.parallel import experts, formats, loss_head
from titan_hydra.core.parallel import tensor as tensor_parallel
from titan_hydra.core.parallel.gradients import gradient_norm
from titan_hydra.core.parallel.masters import Masters, separate
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.parallel.split_masters import split_masters
from titan_hydra.core.parallel.stages import split, whole

from . import ema, qk_clip
from .groups import Groups
from .objectives import Objective, build_objective
from .offloaded import Offloaded
from .optimizer import build_optimizers
from .optimizer import step as optimizer_step
from .step import Agreement, Plain, build_step

if TYPE_CHECKING:
    from titan_hydra.core.parallel.pipeline import Pipeline


@dataclass
class Trainer:
    """The state of a step. `build` creates a trainer; the equivalence harness steps it exactly as `train` does."""

    job: Job
    mesh: Mesh
    device: torch.device
    objective: Objective
    model: nn.Module  # the modules of all of this rank's stages, under the names of the unsplit model
    masters: Masters  # the parameters in the form in which the optimizers update them
    step: Plain | Pipeline
    optimizers: list[torch.optim.Optimizer]
    parameters: int  # number of parameters of the whole model, over all ranks
    notes: list[str] = field(default_factory=list)  # lines for the log about how the model was changed
    stop_requested: list[int] = field(default_factory=list)  # signals received
    # called for every local batch, to show the watchdog that the rank is not stuck
    progress: Callable[[], None] = lambda: None
    groups: Groups = field(default_factory=Groups)  # the run's replica groups
    balance: experts.Balance | None = None  # balance of the experts in the last step
    clip: qk_clip.Clip | None = None  # the heads whose logits are limited (optimizer.qk_clip)
    empty: torch.Tensor | None = None  # whether no element of the last step's global batch counts

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of one global batch from this rank's samples of it. Returns this rank's shares of the
        mean loss and of the objective's columns.

        The loss is the sum over all elements that count, divided by their number in the whole global batch. The count
        is made before the first microbatch, so that accumulation, uneven masks and replica groups give the right loss.
        """
        self.prepare_weights()
        count = onto(self.device, self.objective.count(batch.tensors))
        if self.mesh.batch is not None:
            dist.all_reduce(count, group=self.mesh.batch)
        self.groups.add_up([count])
        self.empty = count == 0
        count = count.masked_fill(self.empty, 1)  # not `clamp`, as the weights of elements can sum to less than 1
        total = torch.zeros(1 + len(self.objective.columns), device=self.device)
        parts = batch.split(self.job.data.local_batch)
        for number, part in enumerate(parts, start=1):
            part = self.prepare(part)
            with tensor_parallel.loss_context(self.mesh):
                total += self.step.forward_backward(part, count, last=number == len(parts))
        self.masters.take_gradients()
        self.groups.add_up([total])
        self.groups.add_up_gradients()
        return total

    def prepare_weights(self) -> None:
        """Compute what the forwards need of the present weights: copies in the compute dtype, and the format's scales.
        An optimizer step, a checkpoint or another replica group may have changed the weights.
        """
        self.masters.cast()
        formats.before_forward(self.model, self.job)

    def prepare(self, batch: Batch) -> Batch:
        """Return this rank's part of a local batch, on its device."""
        self.progress()
        return context_parallel.shard_batch(batch, self.mesh).to(self.device)

    def measure(self) -> torch.Tensor:
        """Return the norm of the whole model's gradient."""
        return gradient_norm(self.masters.weights.parameters(), self.mesh.pipeline)

    def agree(self, shares: torch.Tensor, norm: torch.Tensor, votes: Sequence[float] = ()) -> Agreement:
        """Sum the loss, the requests to stop, the votes and the objective's columns over all ranks."""
        share = shares.flatten().double() * self.mesh.reports_loss
        asked = torch.tensor([float(bool(self.stop_requested)), *votes], dtype=torch.float64)
        values = torch.cat([share[:1], onto(self.device, asked), share[1:]])
        dist.all_reduce(values)
        return Agreement(norm, values, self.empty)

    def update(self, agreement: Agreement) -> None:
        """Apply the optimizer's step with clipping, and drop the gradients. The weights change only if loss and norm
        are finite.
        """
        limit = self.job.optimizer.max_norm
        divisor = ((agreement.norm + 1e-6) / limit).clamp(min=1.0) if limit else torch.ones_like(agreement.norm)
        if self.clip is not None:
            self.clip.measure(agreement.finite)
        optimizer_step(self.optimizers, divisor, agreement.finite)
        self.balance = experts.after_step(self.model, self.mesh, self.job.model, agreement.finite)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Delete this step's gradients, and reset the experts' counts and the largest logits."""
        experts.forget(self.model)
        if self.clip is not None:
            self.clip.forget()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def held_out_weights(self) -> AbstractContextManager:
        """Return the context in which held-out numbers are measured: with the averages of the weights if
        validation.ema is true, else with the weights.
        """
        return ema.averaged_weights(self.model, self.optimizers) if self.job.validation.ema else nullcontext()

    @torch.no_grad()
    def validate(self, loader: Loader, steps: int) -> tuple[float, dict[str, float]]:
        """Return the objective's mean over `steps` held-out global batches, and those of its columns by name; NaN if no
        element counts. Every element counts once, whatever the layout.
        """
        self.model.eval()
        self.prepare_weights()
        totals = torch.zeros(2 + len(self.objective.columns), dtype=torch.float64, device=self.device)
        loader.rewind()
        for _ in range(steps):
            for part in loader.next().split(self.job.data.local_batch):
                part = self.prepare(part)
                with tensor_parallel.loss_context(self.mesh):
                    summed = self.step.forward(part)
                if self.mesh.reports_loss and self.step.has_loss:
                    count = self.objective.count(part.tensors)
                    totals += torch.cat([count.double().reshape(1), summed.double().flatten()])
        dist.all_reduce(totals)
        self.model.train()
        loss, *means = (totals[1:] / totals[0]).tolist()
        return loss, self.objective.named(means)


@dataclass
class Parts:
    """A rank's stages on the meta device, parallelized, with the other arguments of a Trainer."""

    job: Job
    mesh: Mesh
    stages: list[nn.Module]
    parameters: int
    notes: list[str]

    def trainer(self, device: torch.device) -> Trainer:
        """Build the trainer, after memory was allocated for the stages."""
        job, model, objective = self.job, whole(self.stages).train(), build_objective(self.job)
        masters = (
            split_masters(model, job) if job.optimizer.masters == "split" else separate(model, self.mesh, job.precision)
        )
        step = build_step(self.stages, self.mesh, job, device, objective)
        rules = rules_of(job.model, job.parametrization)
        optimizers = build_optimizers(masters.weights, job.optimizer, self.mesh, rules)
        clip = None
        if job.optimizer.qk_clip is not None:
            clip = qk_clip.Clip(model, masters.weights, self.mesh, job)
            clip.follow(optimizers)  # before the averages, which are those of the scaled weights
        if job.optimizer.ema_decay:
            ema.follow_weights(optimizers, job.optimizer.ema_decay)
        if job.optimizer.offload:  # last, as it takes all states
            for optimizer in optimizers:
                Offloaded(optimizer)
        return Trainer(
            job=job,
            mesh=self.mesh,
            device=device,
            objective=objective,
            model=model,
            masters=masters,
            step=step,
            optimizers=optimizers,
            parameters=self.parameters,
            notes=self.notes,
            clip=clip,
        )


def assemble(job: Job, device: torch.device, mesh: Mesh | None = None) -> Parts:
    """Build this rank's part of the model, split and parallelized, on the meta device. The whole model is never in
    memory.

    `mesh`, if given, is the mesh of an earlier job in this process with the same degrees.
    """
    check_attention(job, device)
    if mesh is None:
        mesh = parallel.build_mesh(job.parallelism, device.type, job.model.sparse)
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    scale_forward(model, job.model, rules_of(job.model, job.parametrization))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # only parameters: buffers, such as a rotary table or the bias of a router, keep their dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, job.precision.param_dtype))
    notes = formats.convert(model, job, mesh, device)
    if job.loss.name == "linear_cross_entropy":
        notes += loss_head.convert(model, job.loss)
    stages = split(model, mesh, job)  # [model] without pipeline parallelism
    for stage in stages:
        parallel.apply(stage, mesh, job)
    return Parts(job, mesh, stages, parameters, notes)


def build(job: Job, device: torch.device, mesh: Mesh | None = None) -> Trainer:
    """Build this rank's part of the model in memory, with its initial values, and its optimizers. `mesh` has the same
    meaning as for `assemble`.
    """
    parts = assemble(job, device, mesh)
    for stage in parts.stages:
        stage.to_empty(device=device)
        init_weights(stage, job.model, job.seed, rules_of(job.model, job.parametrization))
    return parts.trainer(device)
