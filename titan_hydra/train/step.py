"""Run one local batch through the model: gradients or loss alone, with the same loss function whether or not there is a pipeline."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_hydra.config.schema import Job
from titan_hydra.parallel import compile
from titan_hydra.parallel import data as data_parallel
from titan_hydra.parallel.mesh import Mesh, local_part
from titan_hydra.parallel.pipeline import Pipeline


def build_step(stages: list[nn.Module], mesh: Mesh, job: Job, device: torch.device, loss_function: Callable) -> Plain | Pipeline:
    """Build the object that runs a local batch, with `forward_backward` and `forward`, pipelined or not."""
    summed = compile.function(loss_function, job.compile)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return local_part(summed(output, labels))

    if mesh.degrees.pp > 1:
        return Pipeline(stages, mesh, job, device, loss)
    return Plain(stages[0], loss)


class Plain:
    """Runs local batches through a whole model. `loss(output, labels)` is a sum over tokens."""

    has_loss = True  # on every rank; in a pipeline only on the rank of the last stage

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):
        self.model, self.loss = model, loss

    def forward_backward(self, inputs: Tensor, labels: Tensor, tokens: Tensor, last: bool, **context: Tensor) -> Tensor:
        """Accumulate a local batch's gradients of its summed loss / `tokens`, and return that loss. Replicas reduce their gradients at the
        `last`.
        """
        data_parallel.last_microbatch(self.model, last)
        loss = self.forward(inputs, labels, **context) / tokens
        loss.backward()
        return loss.detach()

    def forward(self, inputs: Tensor, labels: Tensor, **context: Tensor) -> Tensor:
        """Return the summed loss of a local batch."""
        return self.loss(self.model(inputs, **context), labels)
