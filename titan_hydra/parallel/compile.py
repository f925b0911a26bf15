"""torch.compile for each transformer block by itself: one compilation serves all equal blocks."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.compiler.config
from torch import nn

from titan_hydra.config.schema import Compile

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, config: Compile) -> None:
    """Compile the blocks of a stage, in place, at their first call. Names stay. A graph break is an error, not a slow block.

    Code that DTensor splits holds constants of its rank (which rows of the vocabulary are here), but torch's cache on disk does not
    tell such ranks apart: from the second run on all would load the code of one, and learn something wrong without an error.
    """
    torch.compiler.config.cache_key_tag = f"tp {mesh.coordinate('tp')}, cp {mesh.coordinate('cp')}"
    if config.name == "block":
        for block in module.layers.values():
            block.compile(fullgraph=True, backend=config.backend)


def function(function: Callable, config: Compile) -> Callable:
    """The loss function, compiled like the blocks: softmax and up-cast become one pass over the logits."""
    return torch.compile(function, fullgraph=True, backend=config.backend) if config.name == "block" else function
