"""RMSNorm under tensor parallelism."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class Norm(ParallelStyle):
    """Every rank holds the norm's whole weight and applies it to what it has of the residual stream: all of it or, if `split`, a part.

    A part gives only a part of the weight's gradient. torch's SequenceParallel leaves the sum over ranks to whoever reads the
    gradient next, in the gradient's dtype: FSDP's reduce_dtype=float32 would not cover it (pytorch#190626). Here it is summed in
    `reduce_dtype` where it arises, and then rounded once to the dtype that the weight is computed in.
    """

    def __init__(self, split: bool, reduce_dtype: torch.dtype):
        super().__init__()
        self.split, self.reduce_dtype = split, reduce_dtype

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate()], src_data_rank=None))
        module.gradient_arises, module.reduce_dtype = (Partial() if self.split else Replicate()), self.reduce_dtype
        module.__class__ = _Norm
        return module


class _Norm(nn.RMSNorm):
    """On plain tensors: only the weight's gradient knows of other ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: DTensor = self.weight.redistribute(placements=[Replicate()], backward_dtype=self.reduce_dtype)
        return F.rms_norm(x, self.normalized_shape, weight.to_local(grad_placements=[self.gradient_arises]), self.eps)
