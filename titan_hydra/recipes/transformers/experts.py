"""Expert parallelism of transformers' experts, which are packed: each weight of a module of experts has one entry per expert
along its first dimension. What core/parallel/experts.py does for this package's experts it does for these: it splits the
weights, and replaces `exchange`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.models.moe import Moved, plain, sorted_by_expert


def route_experts(blocks: nn.ModuleList) -> None:
    """Let the experts of every block send their tokens through `exchange`, if one is set, in place."""
    modules: list[Any] = [part for path, part in blocks.named_modules() if path.endswith(".experts")]
    for experts in modules:
        experts.expert_count, experts.exchange, experts.read = experts.num_experts, None, plain
        experts.__class__ = type(type(experts).__name__, (RoutedExperts, type(experts)), {})


class RoutedExperts(nn.Module):
    """Experts of transformers, whose class follows this one."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for each token [tokens, dim] the weighted sum of the outputs of its experts `chosen` [tokens, k]."""
        own: Any = self
        if own.exchange is None:
            return super().forward(hidden, chosen, weights)
        rows = own.exchange(hidden, sorted_by_expert(chosen, own.expert_count), self.compute)
        return (rows.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def compute(self, rows: Tensor, order: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
        """Return the output of each row's expert. `order` sorts the rows by expert, `inverse` is its inverse, and `counts`
        are the numbers of rows of this rank's experts.
        """
        own: Any = self
        parts = {name: own.read(weight) for name, weight in self.named_parameters(recurse=False)}
        if not len(rows):  # the weights still need a gradient, of 0: all ranks take part in its reduction
            return rows + sum(part.flatten()[:1].sum() * 0 for part in parts.values())
        experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        own.num_experts = len(counts)
        self.__dict__.update(parts)  # attributes of the object hide the parameters
        try:
            out = super().forward(Moved.apply(rows, order, inverse), experts[:, None], torch.ones_like(rows[:, :1]))
        finally:
            for name in parts:
                del self.__dict__[name]
        return Moved.apply(out, inverse, order)
