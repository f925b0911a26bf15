"""Mixed precision without FSDP: the optimizer's weights, and copies of them in the compute dtype for the modules."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from titan_hydra.base.private import foreach_copy
from titan_hydra.config.schema import Precision

from .mesh import Mesh, local_part


@dataclass
class Masters:
    """A rank's parameters as the optimizer holds them, under their plain names, and the copies that the modules compute with.

    The casts are those of FSDP2's mixed precision: weights once a step; each microbatch's gradient, which is in the compute dtype, to the
    masters' dtype before it is accumulated. If FSDP casts itself, or nothing is cast, `weights` is the model and there are no copies.
    """

    weights: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)  # (master, copy)

    @torch.no_grad()
    def cast(self) -> None:
        """Update the copies from the masters. Call before a step's first forward."""
        if self.pairs:
            masters, copies = zip(*self.pairs, strict=True)
            foreach_copy(list(map(local_part, copies)), list(map(local_part, masters)))

    def take_gradients(self) -> None:
        """Move the gradients from the copies to the masters."""
        for master, copy in self.pairs:
            master.grad, copy.grad = copy.grad, None


def separate(model: nn.Module, mesh: Mesh, precision: Precision) -> Masters:
    """Give the modules copies of their parameters in the compute dtype, in place, unless FSDP casts or there is nothing to cast."""
    dtype = getattr(torch, precision.compute_dtype)
    if mesh.fsdp is not None or precision.compute_dtype == precision.param_dtype:
        return Masters(model)
    masters = Masters(nn.Module())
    parameters = dict(model.named_parameters())
    for name, tensor in (parameters | {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}).items():
        *path, leaf = name.split(".")
        place = masters.weights
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        register: Any = place.register_parameter if name in parameters else place.register_buffer
        register(leaf, tensor)
    copies = {parameter: copy_of(parameter, dtype) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, copies[parameter])
    masters.pairs = list(copies.items())
    return masters


def copy_of(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a copy of a parameter in another dtype, whose gradients accumulate in the master's dtype."""
    copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    copy.grad_dtype = master.dtype
    return copy
