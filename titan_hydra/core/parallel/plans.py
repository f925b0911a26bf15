"""The arguments and the result of a model family's `plan` (models/*/sharding.py). The result has dictionaries of styles
by module name: one for the modules outside the blocks, others for the modules of a block. A style splits a module's
weights, inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from .experts import sparse_layers
from .whole import Norm, SplitTokens


@dataclass(frozen=True)
class Plan:
    """Styles by module name: `around` for modules outside the blocks, `block` for modules of a block. A block with experts
    uses `sparse` instead of `block`.
    """

    around: dict[str, ParallelStyle]
    block: dict[str, ParallelStyle]
    sparse: dict[str, ParallelStyle] = field(default_factory=dict)

    def of(self, block: nn.Module) -> dict[str, ParallelStyle]:
        """Return the styles of the modules that a block has."""
        styles = self.sparse if sparse_layers(block) else self.block
        names = {name for name, _ in block.named_modules()}
        return {name: style for name, style in styles.items() if name in names}


def with_experts(dense: Plan, norm: Norm) -> Plan:
    """Return a plan whose blocks may have experts in place of the feed-forward. Shared experts are split like the
    feed-forward; each rank's router gets only the rank's own tokens.
    """
    without_feed_forward = {name: style for name, style in dense.block.items() if not name.startswith("feed_forward")}
    shared = {
        name.replace("feed_forward", "feed_forward.shared_experts"): dense.block[name]
        for name in dense.block.keys() - without_feed_forward.keys()
    }
    return Plan(
        dense.around,
        dense.block,
        {**without_feed_forward, **shared, "feed_forward.router": SplitTokens(norm.reduce_dtype)},
    )


@dataclass(frozen=True)
class Linears:
    """The styles that split linears and prepare their inputs; a number format may replace them."""

    colwise: Callable[..., ParallelStyle] = ColwiseParallel
    rowwise: Callable[..., ParallelStyle] = RowwiseParallel
    prepare: Callable[..., ParallelStyle] = PrepareModuleInput
