"""QK-clip (MuonClip, arXiv 2507.20534, section 2.1): after a step, the weights of the queries and keys of each head whose
attention logits have exceeded a threshold are scaled, so that its largest logit would have been the threshold.
core/parallel/logits.py measures the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.models.init import clean_name, local_box
from titan_hydra.core.parallel.logits import MeasuredAttention
from titan_hydra.core.parallel.mesh import Mesh, local_part
from titan_hydra.core.parallel.split_masters import master_of, set_master


class Clip:
    """The heads of this rank's stages: their largest logits in a step, and the weights that make these logits."""

    def __init__(self, model: nn.Module, weights: nn.Module, mesh: Mesh, job: Job):
        """Take the measured heads of `model`, and the parameters of `weights`, which the optimizers update."""
        self.threshold, self.mesh, self.heads = job.optimizer.qk_clip, mesh, job.model.n_heads
        self.measured = {
            clean_name(name): part for name, part in model.named_modules() if isinstance(part, MeasuredAttention)
        }
        self.largest = self.factors = torch.empty(0)
        clipped: Any = family_of(job.model).clipped
        parameters = {clean_name(name): weight for name, weight in weights.named_parameters()}
        # of each weight: the index of its layer; the head and the exponent of each of its rows on this rank
        self.places: dict[nn.Parameter, tuple[int, Tensor, Tensor]] = {}
        for layer, name in enumerate(self.measured):
            for linear, parts in clipped(job.model).items():
                parameter = parameters[f"{name.removesuffix('sdpa')}{linear}.weight"]
                (first, *_), (size, *_) = local_box(parameter)
                exponents = torch.cat([torch.full((width,), exponent) for width, exponent in parts])
                rows = torch.arange(first, first + size)
                where = parameter.device
                self.places[parameter] = (
                    layer,
                    (rows // len(exponents)).to(where),
                    exponents[rows % len(exponents)].to(where),
                )

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """From now on, scale weights after each step of these optimizers."""
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._scale)

    @torch.no_grad()
    def measure(self, finite: Tensor) -> None:
        """Find the largest logits of the step over all ranks of the stage, and the factor of each head: 1 if the step's
        loss or norm is not `finite`. This is a collective.
        """
        self.largest = torch.full((len(self.measured), self.heads), -torch.inf, device=finite.device)
        for of_layer, part in zip(self.largest, self.measured.values(), strict=True):
            largest: Any = part.largest
            of_layer.narrow(0, self.mesh.coordinate("tp") * len(largest), len(largest)).copy_(largest)
        if self.mesh.stage is not None:
            dist.all_reduce(self.largest, dist.ReduceOp.MAX, group=self.mesh.stage)
        exceeds = finite & (self.largest > self.threshold)
        self.factors = torch.where(exceeds, self.threshold / self.largest, 1.0)

    @torch.no_grad()
    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Multiply the weights of each head whose logits were too large by the head's factor; called after an
        optimizer's step.
        """
        if not self.factors.numel():  # no step was measured: torch makes one to create the states of an optimizer
            return
        for parameter in (
            weight for group in optimizer.param_groups for weight in group["params"] if weight in self.places
        ):
            layer, heads, exponents = self.places[parameter]
            factors = self.factors[layer][heads].pow(exponents).unsqueeze(1)
            set_master(parameter, local_part(master_of(parameter)) * factors)

    def forget(self) -> None:
        """Forget the logits of this step."""
        for part in self.measured.values():
            part.reset_buffers()

    def read(self) -> dict[str, float]:
        """Return the largest logit of the step in any head, for a row of metrics. This is a collective over all ranks."""
        largest = torch.cat([self.largest.flatten(), self.largest.new_full((1,), -torch.inf)]).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"max_logit": largest.item()}
