"""Split masters: modules and FSDP hold the upper half of each weight, in bfloat16, and the optimizer the lower one.
Nothing is cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_hydra.base.private import keep_gradients_in
from titan_hydra.config.schema import Job
from titan_hydra.job.dtypes import gradient_dtype
from titan_hydra.kernels.split_masters import halves_of, join

from .masters import Masters
from .mesh import like, local_part


def split_masters(model: nn.Module, job: Job) -> Masters:
    """Split every parameter of this rank, in place, before the first forward.

    FSDP learns of the new parameters as of those that `load_state_dict` assigns, and leaves the gradients in the dtype
    of their sum. Without it gradients of vectors are float32, in which norms compute them.
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
    """Return the upper half of a float32 parameter, with the lower one as its `lower_half`. `dtype` is that of its
    gradient.
    """
    weight, remainder = halves_of(local_part(parameter))
    half: Any = nn.Parameter(like(parameter, weight), requires_grad=parameter.requires_grad)
    half.grad_dtype, half.lower_half = dtype, remainder
    return half


@torch.no_grad()
def master_of(parameter: nn.Parameter) -> Tensor:
    """Return the value of a parameter as the optimizer knows it: of split ones both halves together, in memory of its
    own.
    """
    if not is_split(parameter):
        return parameter.detach()
    return like(parameter, join(local_part(parameter), lower_half(parameter)))


def lower_half(parameter: Any) -> Tensor:
    """Return what the float32 master of this rank's shard has beyond its bfloat16."""
    return parameter.lower_half


def is_split(parameter: nn.Parameter) -> bool:
    """Whether a parameter is the upper half of its master."""
    return hasattr(parameter, "lower_half")
