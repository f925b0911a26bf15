"""Styles for modules whose whole weight every tensor-parallel rank holds, RMSNorm among them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titan_hydra.core.base.errors import ConfigError


class Whole(ParallelStyle):
    """A module that computes the same output from the same input on every rank. Every rank gets the whole gradient of
    the output.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        hold_whole(module, mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        )
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class WholeTree(ParallelStyle):
    """A module of many parts, each of them `Whole`. With `split`, its output is cut along the sequence, for sequence
    parallelism.
    """

    def __init__(self, split: bool):
        super().__init__()
        self.split = split

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Let each module with parameters hold them whole on every rank."""
        for part in list(module.modules()):
            if next(part.parameters(recurse=False), None) is not None:
                parallelize_module(part, mesh, Whole())
        if self.split:
            module.register_forward_hook(
                lambda _, inputs, output: (
                    DTensor.from_local(output, mesh, [Replicate()], run_check=False)
                    .redistribute(placements=[Shard(1)])
                    .to_local()
                )
            )
        return module


class SplitTokens(ParallelStyle):
    """A module that each rank applies to its own tokens. So a rank has only a partial gradient of the weights; the
    gradients of all ranks are summed in `reduce_dtype`.

    The module reads its weights through its attribute `read`.
    """

    def __init__(self, reduce_dtype: torch.dtype):
        super().__init__()
        self.reduce_dtype = reduce_dtype

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        hold_whole(module, mesh)
        reader: Any = module  # Any, as torch's annotations declare a module's attributes to be tensors
        reader.read = partial(read_whole, reduce_dtype=self.reduce_dtype, gradient=Partial())
        return module


class SummedGradient(ParallelStyle):
    """A module that returns its input unchanged. Its backward sums the partial gradients of all ranks."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Hook the module so that its output counts as replicated and the output's gradient as a partial sum."""

        def summed(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return DTensor.from_local(output, mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )

        module.register_forward_hook(summed)
        return module


def hold_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's own parameters over the mesh, in place. Nothing is communicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(
            name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None))
        )


def read_whole(weight: Any, reduce_dtype: torch.dtype, gradient: Placement) -> Tensor:
    """Return a weight that every rank holds whole, as a plain tensor. `gradient` is the placement of its gradient,
    which is summed over the ranks in `reduce_dtype` and then rounded once to the weight's dtype.
    """
    replicated = redistribute(weight, [Replicate()], weight.dtype, reduce_dtype)
    return replicated.to_local(grad_placements=[gradient])


def redistribute(
    weight: Any, placements: list[Placement], forward_dtype: torch.dtype, backward_dtype: torch.dtype
) -> Any:
    """Redistribute a DTensor: it is gathered in `forward_dtype`, and its gradient is summed in `backward_dtype`.

    torch 2.12 sums in the dtype of the tensor itself and ignores `backward_dtype` (pytorch#182032). So the tensor is cast
    first to the wider of its own dtype and `backward_dtype`, which loses no bits.
    """
    wide = weight.to(torch.promote_types(weight.dtype, backward_dtype))
    return wide.redistribute(placements=placements, forward_dtype=forward_dtype, backward_dtype=backward_dtype)


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
        """Turn an RMSNorm into one that knows where its weight's gradient arises. Raises ConfigError for another class."""
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
