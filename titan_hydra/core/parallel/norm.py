"""RMSNorm under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from titan_hydra.core.base.errors import ConfigError

from .whole import hold_whole, read_whole


class Norm(ParallelStyle):
    """Every rank holds the norm's whole weight, and applies the norm to the whole residual stream or, if `split`, to
    its shard of the sequence.

    From its shard, a rank computes only a partial gradient of the weight. With torch's SequenceParallel, the next
    operation on the gradient sums it over ranks, in the gradient's dtype, so FSDP's reduce_dtype=float32 would not
    apply (pytorch#190626). Here the gradient is summed in `reduce_dtype` in the backward. Norms of single heads are
    always split, because each rank has different heads.

    Raises ConfigError for a module of another class than nn.RMSNorm, as its own forward would be lost.
    """

    def __init__(self, split: bool, reduce_dtype: torch.dtype):
        super().__init__()
        self.split, self.reduce_dtype = split, reduce_dtype

    def _apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.RMSNorm:
            raise ConfigError(
                f"parallelism.tp={mesh.size()}: the style Norm is for nn.RMSNorm itself, and a norm of this model is a "
                f"{type(module).__name__}; nearest legal: 1, or another style in its sharding"
            )
        norm: Any = module
        hold_whole(norm, mesh)
        norm.gradient_arises, norm.reduce_dtype = (Partial() if self.split else Replicate()), self.reduce_dtype
        norm.__class__ = _Norm
        return norm


class _Norm(nn.RMSNorm):
    """RMSNorm on plain tensors. Only the gradient of its weight is summed over ranks."""

    gradient_arises: Placement
    reduce_dtype: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(
            x, self.normalized_shape, read_whole(self.weight, self.reduce_dtype, self.gradient_arises), self.eps
        )
