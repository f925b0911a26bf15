"""SimpleFSDP (arXiv 2411.00284): fully sharded data parallelism as a parametrization, without hooks and without state.

A parameter is a DTensor sharded over the mesh; reading it in a forward gathers it, and the backward of the gather
reduces the gradient to the shard. All communication is in the graph, where a compiler can bucket and reorder it.
Without a compiler, a gathered parameter stays in memory until its backward, unless activation checkpointing gathers it
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titan_hydra.core.base.private import StridedShard
from titan_hydra.core.job.config.schema import Job

from .mesh import Mesh
from .whole import redistribute


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Shard every parameter of a meta-device stage over `mesh.fsdp`, in place, so that reading it gathers it."""
    if mesh.fsdp is None:
        return
    gather = Gather(mesh, getattr(torch, job.precision.compute_dtype), getattr(torch, job.precision.reduce_dtype))
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    for part in module.modules():
        names = tuple(name for name, parameter in part._parameters.items() if parameter is not None)
        for name in names:
            part._parameters[name] = nn.Parameter(shard(part._parameters[name], mesh))
        if names:
            key = (type(part), names)
            if key not in classes:  # one class for all equal modules, so that a compiler sees them as equal
                classes[key] = gathering(*key, gather)
            part.__class__ = classes[key]


def gathering(cls: type, names: tuple[str, ...], gather: Gather) -> type:
    """Return a subclass of a module's class whose parameters are gathered when they are read as attributes."""

    def whole(name: str) -> property:
        return property(lambda self: gather(self._parameters[name]))

    return type(cls.__name__, (cls,), {name: whole(name) for name in names})


def shard(parameter: nn.Parameter, mesh: Mesh) -> DTensor:
    """Return this rank's shard, split along dimension 0, unevenly if necessary. A tensor-parallel parameter becomes one
    DTensor over both meshes.

    Nothing is communicated: on the meta device there is no data.
    """
    placements = placements_of(mesh.fsdp)
    if not isinstance(parameter, DTensor):
        return distribute_tensor(parameter.detach(), mesh.fsdp, placements, src_data_rank=None)
    local = distribute_tensor(parameter.to_local().detach(), mesh.fsdp, placements, src_data_rank=None).to_local()
    (inner,) = parameter.placements
    # tensor parallelism has already split dimension 0, so FSDP's shards are strided parts of the whole
    if inner == Shard(0):
        placements = (*placements[:-1], StridedShard(0, split_factor=parameter.device_mesh.size()))
    both = mesh.world[(*mesh.fsdp.mesh_dim_names, *parameter.device_mesh.mesh_dim_names)]
    return DTensor.from_local(
        local, both, (*placements, inner), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def placements_of(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return a parameter's placements: replicated over the mesh's replicas, if it has them, and sharded on dim 0 over the
    last dimension of the mesh.
    """
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


class Gather:
    """Gathers a shard to the whole tensor in the compute dtype; the backward reduces the whole gradient to the shard in
    the reduction's dtype, as a plain sum.
    """

    def __init__(self, mesh: Mesh, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Look up the process groups that `__call__` uses."""
        self.mesh: Any = mesh.fsdp
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        # Groups are looked up here and not in __call__, where a compiler might use the groups of an earlier job in this
        # process.
        if mesh.degrees.tp > 1:
            self.tp = mesh.world["tp"]
            self.tp_rank: Any = mesh.coordinate("tp")  # an int, declared as Any because of torch's type annotations

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """Return the whole parameter in the compute dtype; under tensor parallelism, the rank's tensor-parallel part of
        it.
        """
        if parameter.device_mesh.ndim == self.mesh.ndim:
            return self._whole(parameter)
        # With tensor parallelism, gather only over the data-parallel dimensions: the result is still a DTensor over tp.
        *_, inner = parameter.placements
        shape = list(parameter.shape)
        if isinstance(inner, Shard):
            # as Shard.local_shard_size_and_offset, which torch 2.11 cannot compile
            rows = -(-shape[inner.dim] // self.tp.size())
            shape[inner.dim] = max(0, min(rows, shape[inner.dim] - rows * self.tp_rank))
        local = DTensor.from_local(
            parameter.to_local(),
            self.mesh,
            placements_of(self.mesh),
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        return DTensor.from_local(
            self._whole(local), self.tp, (inner,), run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def _whole(self, parameter: DTensor) -> torch.Tensor:
        replicated = redistribute(parameter, [Replicate()] * self.mesh.ndim, self.compute_dtype, self.reduce_dtype)
        # Each rank has the gradient of its own samples, which is a partial sum. Without this placement, torch would
        # treat these gradients as equal copies (TorchTitan #2217).
        return replicated.to_local(grad_placements=[Partial()] * self.mesh.ndim)
