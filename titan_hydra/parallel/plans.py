"""What a model family's sharding returns, and what it is given: a plan names for each module, in the model or in a block, the style that
splits its weights and its inputs and outputs (models/*/sharding.py).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel


@dataclass(frozen=True)
class Plan:
    """Styles by module name: `around` for the modules outside the blocks, `block` for those of every block."""

    around: dict[str, ParallelStyle]
    block: dict[str, ParallelStyle]


@dataclass(frozen=True)
class Linears:
    """The styles that split linears and prepare their inputs; a number format may replace them."""

    colwise: Callable[..., ParallelStyle] = ColwiseParallel
    rowwise: Callable[..., ParallelStyle] = RowwiseParallel
    prepare: Callable[..., ParallelStyle] = PrepareModuleInput
