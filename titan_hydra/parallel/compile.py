"""torch.compile for each transformer block separately, where one compilation serves all equal blocks, or for a whole model."""
from __future__ import annotations

from collections.abc import Callable
from math import ceil
from operator import attrgetter
from typing import Any

import torch
import torch.compiler.config
from torch import nn

from titan_hydra.base.private import join_collectives
from titan_hydra.config.family import family_of
from titan_hydra.config.schema import Compile, Job

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Compile the blocks of a stage, in place, at their first call. Names stay. A graph break is an error, not a slow block. Of a block
    that names its `compiled` parts (methods, modules), as one with experts does, only those are compiled.

    compile=model compiles the whole module instead, as one graph with the communication of SimpleFSDP: the compiler joins the parameters of
    a block into one message, as FSDP2 does, and communicates while it computes.

    Code for DTensors contains constants of its rank: its rows of the vocabulary, and the names of its process groups. torch's cache on disk
    does not distinguish them: from the second run on, ranks would load another rank's code and compute wrong results without an error. The
    cache key tag prevents that.
    """
    torch.compiler.config.cache_key_tag = place(mesh)
    config, blocks = job.compile, family_of(job.model).blocks(module)
    if config.name != "off":
        whole = config.name == "model"
        join_collectives(max(map(size_of, blocks.values())) if whole else 0)
        for block in [module] if whole else blocks.values():
            for name in getattr(block, "compiled", ("",)):
                part = attrgetter(name)(block) if name else block
                if isinstance(part, nn.Module):
                    part.compile(fullgraph=True, backend=config.backend)
                elif part is not None:
                    setattr(block, name, torch.compile(part, fullgraph=True, backend=config.backend))


def size_of(module: nn.Module) -> int:
    """Return the size of a module's parameters in MiB, rounded up."""
    return ceil(sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 2**20)


def place(mesh: Mesh) -> str:
    """Return this rank's coordinates in the mesh and the names of its groups along them, as text."""
    if mesh.world is None:
        return ""
    names = mesh.world.mesh_dim_names
    return ", ".join(f"{name} {mesh.coordinate(name)} in group {mesh.world.get_group(name).group_name}" for name in names)


def function(function: Callable[..., Any], config: Compile) -> Callable[..., Any]:
    """Compile the loss function like the blocks: softmax and up-cast become one pass over the logits."""
    return torch.compile(function, fullgraph=True, backend=config.backend) if config.name != "off" else function
