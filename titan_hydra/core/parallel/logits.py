"""Measure each head's largest attention logit of a step, for QK-clip (core/train/qk_clip.py): a maximum over all samples,
microbatches and parts of a sequence, which a recomputation does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.base.private import all_gather_single
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.kernels.logits import CHUNK, largest_logits

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Measure the logits of every block of a stage, in place, if the job has QK-clip."""
    if job.optimizer.qk_clip is None:
        return
    for block in family_of(job.model).blocks(module).values():
        attentions = [part for part in block.modules() if hasattr(part, "sdpa")]
        inner = {inside for part in attentions for inside in part.sdpa.modules()}  # Ulysses has an `sdpa` too
        for part in attentions:
            if part not in inner:
                part.sdpa = MeasuredAttention(part.sdpa, mesh, job)


class MeasuredAttention(nn.Module):
    """Attention that also keeps, in training, the largest logit of each of this rank's heads since the last reset."""

    def __init__(self, sdpa: nn.Module, mesh: Mesh, job: Job):
        """Wrap `sdpa`. `starts` are the positions where this rank's parts of the sequence begin, `order` is the order
        of the parts of all ranks: a balanced ring gives each rank one part from either end.
        """
        super().__init__()
        self.sdpa = sdpa
        self.register_buffer("largest", torch.empty(job.model.n_heads // mesh.degrees.tp), persistent=False)
        cp, balanced = mesh.degrees.cp, mesh.degrees.sequence_parts > mesh.degrees.cp
        part = job.data.seq_len // mesh.degrees.sequence_parts
        # where the parts of the sequence begin that each context-parallel rank holds
        held = [[rank, 2 * cp - 1 - rank] if balanced else [rank] for rank in range(cp)]
        self.starts = [number * part for number in held[mesh.coordinate("cp")]]
        self.order = [number for numbers in held for number in numbers]
        self.group: Any = mesh.world.get_group("cp") if cp > 1 and mesh.world is not None else None

    def reset_buffers(self) -> None:
        """Forget the logits of earlier steps."""
        largest: Any = self.largest
        largest.fill_(-torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.training:
            largest_now = largest_logits(q.detach(), self.keys(k.detach()), documents, self.starts, CHUNK)
            largest: Any = self.largest
            largest.copy_(torch.maximum(largest, largest_now))
        return self.sdpa(q, k, v, documents)

    def keys(self, k: Tensor) -> Tensor:
        """Return the keys of the whole sequence, in its order."""
        if self.group is None:
            return k
        # [ranks * batch, heads, seq / ranks, width]
        every = all_gather_single(k.contiguous(), 0, self.group)
        parts = every.unflatten(0, (self.group.size(), -1)).unflatten(3, (len(self.starts), -1))
        by_place = parts.movedim(3, 1).flatten(0, 1)
        return torch.cat([by_place[self.order.index(position)] for position in range(len(self.order))], dim=2)
