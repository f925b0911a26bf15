"""Split masters: modules and FSDP hold the upper half of each weight, in bfloat16, and the optimizer holds the lower half.
No weight is cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_hydra.core.base.private import keep_gradients_in
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import gradient_dtype
from titan_hydra.core.kernels.split_masters import halves_of, join

from .masters import Masters
from .mesh import like, local_part


def split_masters(model: nn.Module, job: Job) -> Masters:
    """Split every parameter of this rank, in place, before the first forward.

    FSDP treats the new parameters like parameters that `load_state_dict` assigns, and leaves gradients in the dtype in
    which it has summed them. Without FSDP, the gradients of vectors are in float32, as norms compute in float32.
    """
    dtype = getattr(torch, gradient_dtype(job))
    wrapped = any(isinstance(module, FSDPModule) for module in model.modules())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            half = split_parameter(parameter, dtype if wrapped or parameter.ndim > 1 else torch.float32)
            module.load_state_dict({name: half}, strict=False, assign=True)
        if isinstance(module, FSDPModule):
            keep_gradients_in(dtype, module)
    return Masters(model)


@torch.no_grad()
def split_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return the upper half of a float32 parameter, with the lower half as its attribute `lower_half`. `dtype` is the
    dtype of the returned parameter's gradient.
    """
    weight, remainder = halves_of(local_part(parameter))
    half: Any = nn.Parameter(like(parameter, weight), requires_grad=parameter.requires_grad)
    half.grad_dtype, half.lower_half = dtype, remainder
    return half


@torch.no_grad()
def master_of(parameter: nn.Parameter) -> Tensor:
    """Return the full value of a parameter, as the optimizer uses it. For a split parameter, this is a new tensor that
    joins both halves.
    """
    if not is_split(parameter):
        return parameter.detach()
    return like(parameter, join(local_part(parameter), lower_half(parameter)))


@torch.no_grad()
def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy float32 values into this rank's shard of a parameter, or into both of its halves."""
    if not is_split(parameter):
        local_part(parameter).copy_(value)
        return
    upper, lower = halves_of(value)
    local_part(parameter).copy_(upper)
    lower_half(parameter).copy_(lower)


def lower_half(parameter: Any) -> Tensor:
    """Return the lower half of this rank's shard: the bits of its float32 master that the bfloat16 number lacks."""
    return parameter.lower_half


def is_split(parameter: nn.Parameter) -> bool:
    """Whether a parameter is the upper half of its master."""
    return hasattr(parameter, "lower_half")
