"""torch.compile for each transformer block separately, where one compilation serves all equal blocks, or for a whole
model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
import torch.compiler.config
from torch import nn

from titan_hydra.core.base.private import GraphBreak, join_collectives
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import fault_at
from titan_hydra.core.job.config.schema import Compile, Job

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Compile the blocks of a stage, in place, at their first call. The names of modules do not change. A graph break
    is an error, and not just a slower block. If a block lists methods in `compiled`, as a block with experts does, only
    these methods are compiled, each by itself.

    compile=model compiles the whole module instead, as one graph with the communication of SimpleFSDP: the compiler
    merges the parameters of a block into one all-gather, as FSDP2 does, and overlaps communication with computation.

    Compiled code for DTensors contains constants of a rank: its rows of the vocabulary, and the names of its process
    groups. torch's cache on disk does not distinguish them: from the second run on, ranks would load another rank's
    code and compute wrong results without an error. The cache key tag prevents that.
    """
    torch.compiler.config.cache_key_tag = place(mesh)
    config, blocks = job.compile, family_of(job.model).blocks(module)
    if config.name != "off":
        whole = config.name == "model"
        join_collectives(max(map(size_of, blocks.values())) if whole else 0)
        for block in [module] if whole else blocks.values():
            for owner, method in compiled_parts(block):
                options = {"fullgraph": True, "backend": config.backend, "dynamic": getattr(owner, "dynamic", None)}
                if method == "forward":  # the module compiles itself, so that its hooks run outside the compiled code
                    owner.compile(**options)
                else:
                    setattr(owner, method, torch.compile(getattr(owner, method), **options))


@contextmanager
def breaks_refused(job: Job) -> Iterator[None]:
    """Turn a graph break into a ConfigError that names the line. Breaks are found when a block is first called."""
    if job.compile.name == "off":
        yield
        return
    try:
        yield
    except GraphBreak as error:
        text = str(error)
        lines = re.findall(r'File "(.*)", line (\d+)', text)
        why = re.search(r"Explanation: (.*)", text)
        reason = f"a block of {job.model.family} is more than one graph: {why[1] if why else text.splitlines()[0]}"
        where = f" ({lines[-1][0]}, line {lines[-1][1]})" if lines else ""
        raise fault_at(job, "compile.name", reason.rstrip(".") + where, "off").error from error


def compiled_parts(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the owner and the name of each method of a block that is compiled by itself: the methods in its `compiled`,
    else its forward.
    """
    for name in getattr(block, "compiled", ("forward",)):
        path, _, method = name.rpartition(".")
        yield block.get_submodule(path), method


def size_of(module: nn.Module) -> int:
    """Return the size of a module's parameters in MiB, rounded up."""
    return ceil(sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 2**20)


def place(mesh: Mesh) -> str:
    """Return this rank's coordinates in the mesh and the names of its groups along them, as text."""
    if mesh.world is None:
        return ""
    names = mesh.world.mesh_dim_names
    return ", ".join(
        f"{name} {mesh.coordinate(name)} in group {mesh.world.get_group(name).group_name}" for name in names
    )


def function(function: Callable[..., Any], config: Compile) -> Callable[..., Any]:
    """Compile the loss function like the blocks, so that softmax and up-cast become one pass over the logits."""
    return torch.compile(function, fullgraph=True, backend=config.backend) if config.name != "off" else function
