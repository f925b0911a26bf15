"""Run one local batch through the model, for gradients or only for the loss. The loss function is the same with and
without a pipeline. `Agreement` holds what the ranks agree on in each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.batches import microbatch_size
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.parallel import compile
from titan_hydra.core.parallel import context as context_parallel
from titan_hydra.core.parallel import data as data_parallel
from titan_hydra.core.parallel.mesh import Mesh, local_part, loss_in

from .objectives import Objective

if TYPE_CHECKING:
    from titan_hydra.core.parallel.pipeline import Inputs, Pipeline, Summed


def build_step(
    stages: list[nn.Module], mesh: Mesh, job: Job, device: torch.device, objective: Objective
) -> Plain | Pipeline:
    """Build the object whose `forward_backward` and `forward` run a local batch, with or without a pipeline."""
    loss, measure = (compile.function(function, job.compile) for function in (objective.loss, objective.measure))
    if mesh.degrees.pp == 1:
        return Plain(stages[0], objective.inputs, loss, measure)
    # imported here, because the import takes a second, and only jobs with a pipeline need it
    from titan_hydra.core.parallel.pipeline import Pipeline

    microbatch = objective.example(microbatch_size(job))
    first, _ = objective.inputs(context_parallel.shard_batch(microbatch, mesh).tensors)
    return Pipeline(stages, mesh, job, device, first, objective.inputs, loss, measure)


class Plain:
    """Runs local batches through a whole model. `inputs`, `loss` and `measure` are the objective's functions."""

    has_loss = True  # True on every rank; with a pipeline only on the rank of the last stage

    def __init__(self, model: nn.Module, inputs: Inputs, loss: Summed, measure: Summed):
        self.model, self.inputs, self.loss, self.measure = model, inputs, loss, measure

    def forward_backward(self, batch: Batch, count: Tensor, last: bool) -> Tensor:
        """Accumulate the gradients of a local batch's summed loss divided by `count`, and return this quotient and
        those of the objective's columns. Replicas reduce gradients only in the `last` local batch of a step.
        """
        data_parallel.last_microbatch(self.model, last)
        shares = self._sum(self.loss, batch, self.inputs) / count
        loss_in(shares).backward()
        return shares.detach()

    def forward(self, batch: Batch, objective: Objective | None = None) -> Tensor:
        """Return the summed measure of a local batch. `objective`, if given, replaces the job's objective."""
        inputs, measure = (objective.inputs, objective.measure) if objective else (self.inputs, self.measure)
        return self._sum(measure, batch, inputs)

    def _sum(self, function: Summed, batch: Batch, inputs: Inputs) -> Tensor:
        first, others = inputs(batch.tensors)
        return local_part(function(self.model(first, **others), batch.tensors))


class Agreement:
    """Values of a step that are the same on all ranks once the step's gradients are computed. The device can use them
    at once, the host after `read`.
    """

    empty = False  # after `read`: whether no element of the global batch counts, so that there is no loss

    def __init__(self, norm: torch.Tensor, sums: torch.Tensor, empty: torch.Tensor | None = None) -> None:
        """Store values. `sums` are sums over all ranks (float64): the loss, the number of ranks that were asked to
        stop, the votes. `empty` is whether no element counts, which all ranks know.
        """
        self.norm, self.finite = norm, sums[0].isfinite() & norm.isfinite()
        no_loss = torch.zeros_like(norm) if empty is None else empty
        # the copy begins now, so that it does not wait for work queued later
        self.host = torch.cat([torch.stack([norm.double(), no_loss.double()]), sums]).to("cpu", non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None

    def read(self) -> tuple[float, float, bool, list[float]]:
        """Return loss, norm, whether any rank was asked to stop, and the sums of the votes. This is the step's only
        wait for the device.
        """
        if self.copied is not None:
            self.copied.synchronize()
        norm, empty, loss, stop, *votes = self.host.tolist()
        self.empty = empty > 0
        return loss, norm, stop > 0, votes
