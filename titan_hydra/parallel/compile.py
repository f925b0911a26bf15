"""torch.compile for each transformer block by itself: one compilation serves all equal blocks."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from titan_hydra.config.schema import Compile


def apply(module: nn.Module, config: Compile) -> None:
    """Compile the blocks of a stage, in place, at their first call. Names stay. A graph break is an error, not a slow block."""
    if config.name == "block":
        for block in module.layers.values():
            block.compile(fullgraph=True, backend=config.backend)


def function(function: Callable, config: Compile) -> Callable:
    """The loss function, compiled like the blocks: softmax and up-cast become one pass over the logits."""
    return torch.compile(function, fullgraph=True, backend=config.backend) if config.name == "block" else function
