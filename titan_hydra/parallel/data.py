"""Data parallelism in all its forms: FSDP2 over a mesh of (replicas, shards); DDP and HSDP are special cases."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_hydra.config.family import family_of, places_of_blocks
from titan_hydra.config.schema import Job

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Shard a meta-device stage over `mesh.fsdp`, block by block, in place. Without data-parallel ranks nothing is wrapped.

    Each block is gathered just before it runs, as is each module before the blocks. What follows them (norm and output) is one group: the
    first in the backward, so freeing it after the forward would only cost another gather.
    """
    if mesh.fsdp is None:
        return
    family, precision, always = family_of(job.model), job.precision, job.parallelism.reshard_after_forward == "always"
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        # Inputs are not cast: what is computed in fp32 (the rotary table) is the same fp32 with and without FSDP.
        "mp_policy": MixedPrecisionPolicy(param_dtype=_dtype(precision.compute_dtype), reduce_dtype=_dtype(precision.reduce_dtype),
                                          cast_forward_inputs=False),
    }
    default = mesh.degrees.pp == 1  # with microbatches, ZeRO-3 would gather every block once for each
    reshard = {"always": True, "never": False, "default": default}[job.parallelism.reshard_after_forward]
    for block in family.blocks(module).values():
        fully_shard(block, **options, reshard_after_forward=reshard)
    first, last = around_blocks(module, family.modules(job.model))
    if not job.model.tie_embeddings:
        for part in first:
            fully_shard(part, **options, reshard_after_forward=reshard)
        if last:
            fully_shard(last, **options, reshard_after_forward=always)
    fully_shard(module, **options, reshard_after_forward=reshard)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is a sum divided once by the tokens of the global batch: every reduction over ranks must be a plain sum.
            # By default FSDP divides by the ranks, and with a custom factor HSDP would still do so (TorchTitan #2318).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def around_blocks(module: nn.Module, names: list[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of a stage before its family's blocks and after them. `names` are those of the whole model in running order."""
    blocks = places_of_blocks(names)
    sides = names[: blocks[0]], names[blocks[-1] + 1 :]
    first, last = ([part for name in side if (part := getattr(module, name)) is not None] for side in sides)
    return first, last


def last_microbatch(module: nn.Module, last: bool) -> None:
    """Set whether this backward is the step's last: replicas reduce their gradients only then (TorchTitan #1929)."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_all_reduce(last)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
