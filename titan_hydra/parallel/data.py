"""Data parallelism in all its forms: FSDP2 over a mesh of (replicas, shards); DDP and HSDP are special cases."""
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_hydra.config.schema import Parallelism, Precision

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, precision: Precision, parallelism: Parallelism) -> None:
    """Shard a meta-device stage over `mesh.fsdp`, block by block, in place. Without data-parallel ranks nothing is wrapped.

    Each block is gathered just before it runs. The last group (norm and output) is the first in the backward, so freeing it after the
    forward would only cost another gather.
    """
    if mesh.fsdp is None:
        return
    options = {
        "mesh": mesh.fsdp,
        # Inputs are not cast: what is computed in fp32 (the rotary table) is the same fp32 with and without FSDP.
        "mp_policy": MixedPrecisionPolicy(param_dtype=_dtype(precision.compute_dtype), reduce_dtype=_dtype(precision.reduce_dtype),
                                          cast_forward_inputs=False),
    }
    default = mesh.degrees.pp == 1  # with microbatches, ZeRO-3 would gather every block once for each
    reshard = {"always": True, "never": False, "default": default}[parallelism.reshard_after_forward]
    for block in module.layers.values():
        fully_shard(block, **options, reshard_after_forward=reshard)
    if module.tok_embeddings is not None and not module.config.tie_embeddings:
        fully_shard(module.tok_embeddings, **options, reshard_after_forward=reshard)
    last = [part for part in (module.norm, module.output) if part is not None]
    if last and not module.config.tie_embeddings:
        fully_shard(last, **options, reshard_after_forward=parallelism.reshard_after_forward == "always")
    fully_shard(module, **options, reshard_after_forward=reshard)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is a sum divided once by the tokens of the global batch: every reduction over ranks must be a plain sum.
            # By default FSDP divides by the ranks, and with a custom factor HSDP would still do so (TorchTitan #2318).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def last_microbatch(module: nn.Module, last: bool) -> None:
    """Set whether this backward is the step's last: replicas reduce their gradients only then (TorchTitan #1929)."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_all_reduce(last)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
