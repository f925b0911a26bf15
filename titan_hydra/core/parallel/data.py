"""Data parallelism in all its forms: FSDP2 over a mesh of (replicas, shards); DDP and HSDP are special cases."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titan_hydra.core.base.private import placed_on
from titan_hydra.core.job.config.family import family_of, places_of_blocks
from titan_hydra.core.job.config.schema import Job

from .experts import exchanging_layers
from .mesh import Mesh, local_part


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Shard a meta-device stage over `mesh.fsdp`, block by block, in place. Without data-parallel ranks nothing is
    wrapped.

    Each block is gathered just before it runs, as is each module before the blocks. The modules after the blocks (norm
    and output) are one group. The backward begins with that group, so the group stays gathered after the forward.
    """
    if mesh.fsdp is None:
        return
    family, always = family_of(job.model), job.parallelism.reshard_after_forward == "always"
    compute, reduce = (getattr(torch, name) for name in (job.precision.compute_dtype, job.precision.reduce_dtype))
    # Inputs are not cast, so values in fp32 (the rotary table) are the same with and without FSDP.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.fsdp, "mp_policy": policy}
    default = mesh.degrees.pp == 1  # with microbatches, ZeRO-3 would gather every block once per microbatch
    reshard = {"always": True, "never": False, "default": default}[job.parallelism.reshard_after_forward]
    for block in family.blocks(module).values():
        shard_block(block, mesh, options | {"reshard_after_forward": reshard})
    first, last = around_blocks(module, family.modules(job.model))
    if not job.model.tie_embeddings:
        for part in first:
            fully_shard(part, **options, reshard_after_forward=reshard)
        if last:
            fully_shard(last, **options, reshard_after_forward=always)
    fully_shard(module, **options, reshard_after_forward=reshard)
    # FSDP warns of modules that return views, such as heads under tp; the warning is suppressed, as no output is
    # changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if mesh.degrees.ep > 1:
        gather_ahead(list(family.blocks(module).values()))
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is a sum that is divided once, by the tokens of the global batch. So every reduction over ranks must
            # be a plain sum. By default FSDP divides by the number of ranks, and HSDP does so even with a custom factor
            # (TorchTitan #2318).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def shard_block(block: nn.Module, mesh: Mesh, options: dict[str, Any]) -> None:
    """Shard a block. Its experts are sharded over the ranks that hold the same experts: by expert if the number of
    experts is a multiple of the number of ranks, else by width.

    One group of hooks gathers the experts and the rest of the block, if torch supports this (2.11 does not). A second
    group, inside the block, would run again when the block is recomputed.
    """
    modules = [experts for _, experts in exchanging_layers(block)] if mesh.experts is not None else []
    if not modules:
        fully_shard(block, **options)
        return
    experts_mesh = mesh.experts[
        tuple(name for name in ("dp_replicate", "efsdp") if name in mesh.experts.mesh_dim_names)
    ]
    weights = {weight for experts in modules for weight in experts.parameters()}

    def place(weight: nn.Parameter) -> Shard:
        return Shard(0 if local_part(weight).shape[0] % experts_mesh["efsdp"].size() == 0 else 1)

    if together := placed_on(experts_mesh):
        fully_shard(
            block, **options, shard_placement_fn=lambda weight: together(place(weight)) if weight in weights else None
        )
        return
    for experts in modules:
        fully_shard(experts, **options | {"mesh": experts_mesh}, shard_placement_fn=place)
    fully_shard(block, **options)


def gather_ahead(blocks: list[Any]) -> None:
    """Let each block start the all-gathers of the next block when its own forward begins. Later in the forward of
    experts, the host waits for the device to read the numbers of tokens, which would delay these all-gathers. In the
    backward the host does not wait, so FSDP's own prefetching suffices. In torch 2.11 experts are gathered separately.
    """
    for block, later in pairwise(blocks):
        block.set_modules_to_forward_prefetch([part for part in later.modules() if isinstance(part, FSDPModule)])


def around_blocks(module: nn.Module, names: list[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of a stage before the blocks, and those after the blocks. `names` are the names of the whole
    model's modules in running order.
    """
    blocks = places_of_blocks(names)
    sides = names[: blocks[0]], names[blocks[-1] + 1 :]
    first, last = ([part for name in side if (part := getattr(module, name)) is not None] for side in sides)
    return first, last


def last_microbatch(module: nn.Module, last: bool) -> None:
    """Set whether this backward is the step's last. Replicas reduce their gradients only in the last (TorchTitan #1929).

    FSDP itself is told in every backward that it is the last one. Otherwise FSDP would keep the recorded order of
    earlier forwards, and gather the heads of those forwards again.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
