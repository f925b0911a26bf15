"""Mixed precision without FSDP: the optimizer's weights, and copies of them in the compute dtype for the modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from titan_hydra.core.base.private import foreach_copy
from titan_hydra.core.job.config.schema import Precision

from .mesh import Mesh, local_part


@dataclass
class Masters:
    """A rank's parameters as the optimizer holds them, under their plain names, and the copies with which the modules
    compute.

    The casts are those of FSDP2's mixed precision: weights are cast once in each step; each microbatch's gradient, which
    is in the compute dtype, is cast to the masters' dtype before it is accumulated. If FSDP casts, or nothing is cast,
    there are no copies and `weights` is the model; with adapters `weights` is a tree of the trained parameters.
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
    """Replace the modules' parameters by copies in the compute dtype, in place, unless FSDP casts or there is nothing
    to cast. With adapters, frozen weights already have the compute dtype, and are in no optimizer.
    """
    dtype = getattr(torch, precision.compute_dtype)
    parameters = dict(model.named_parameters())
    adapted = any(".lora_" in name for name in parameters)
    frozen = {name: parameter for name, parameter in parameters.items() if adapted and not parameter.requires_grad}
    held = {name: parameter for name, parameter in parameters.items() if name not in frozen}
    copied = mesh.fsdp is None and precision.compute_dtype != precision.param_dtype
    if not copied and not frozen:
        return Masters(model)
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    # buffers, such as a router's bias, come with the frozen weights, and go on in the checkpoints of the adapters
    masters = Masters(Tree(held | buffers, Tree(frozen | buffers) if frozen else None))
    if not copied:
        return masters
    copies = {parameter: copy_of(parameter, dtype) for parameter in held.values()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, copies.get(parameter, parameter))
    masters.pairs = list(copies.items())
    return masters


class Tree(nn.Module):
    """Parameters and buffers under their names, in a tree of modules that cannot be run. `frozen` is the tree of
    parameters that are not trained; it is not a submodule.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], frozen: Tree | None = None):
        """Register the tensors, whose dotted names give the modules in which they stand."""
        super().__init__()
        self.__dict__["frozen"] = frozen  # nn.Module's own __setattr__ would make it a submodule
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                parent.register_parameter(leaf, tensor)
            else:
                parent.register_buffer(leaf, tensor)


def copy_of(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a copy of a parameter in another dtype, whose gradients accumulate in the master's dtype."""
    copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    copy.grad_dtype = master.dtype
    return copy
