"""The device mesh: each rank's coordinates in (pp, dp_replicate, dp_shard, cp, tp), and the process groups that follow
from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titan_hydra.core.base.private import concatenate, flatten
from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.job.ranks import DEGREES


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_in(sums: Tensor) -> Tensor:
    """Return the loss in what an objective's `loss` returns: it stands alone, or before the sums of the columns. It is no
    view, as a schedule that splits the backward detaches it in place.
    """
    return sums[0].clone() if sums.dim() else sums


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor that is sharded like `parameter` and whose shard on this rank is `local`. If `parameter` is no
    DTensor, return `local` itself.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass(frozen=True)
class Mesh:
    """The mesh as this rank sees it. `fsdp` is the part of the mesh over which parameters are sharded and replicated;
    None if they are neither.

    `experts` is the mesh (pp, dp_replicate, efsdp, ep) of models with experts. Its dimensions efsdp and ep cover the
    same ranks as dp_shard x cp x tp. `batch` contains the ranks that see different samples, and `loss` the ranks that
    see different tokens (batch and cp). `stage` contains the ranks that hold the same stage of the model, sharded or
    replicated (all dimensions except pp).
    """

    degrees: Parallelism
    world: DeviceMesh | None
    fsdp: DeviceMesh | None
    batch: dist.ProcessGroup | None
    loss: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None

    @property
    def data_ranks(self) -> int:
        """The number of ranks that see different samples."""
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def data_rank(self) -> int:
        """This rank's index among the data-parallel ranks, which determines its slots of a batch."""
        return self.coordinate("dp_replicate") * self.degrees.dp_shard + self.coordinate("dp_shard")

    def coordinate(self, name: str) -> int:
        """Return this rank's coordinate along one dimension; 0 if the mesh does not have it."""
        if self.world is None or name not in self.world.mesh_dim_names:
            return 0
        return self.world.get_local_rank(name)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts in the sum over all ranks. Of the tp ranks, which hold copies of the loss,
        only one counts. Pipeline ranks without the last stage contribute 0.
        """
        return self.coordinate("tp") == 0

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages of the same model; None without pipeline parallelism."""
        return self.world.get_group("pp") if self.degrees.pp > 1 else None


def build_mesh(degrees: Parallelism, device_type: str, sparse: bool = False) -> Mesh:
    """Build the mesh on all ranks. Raises RuntimeError if the product of the degrees is not the number of ranks,
    ValueError for a degree below 1.

    Dimensions of size 1 are left out, because each would cost a process group. dp_shard stays wherever parameters are
    sharded or replicated, so that FSDP, HSDP and DDP are one case: a 2-D mesh whose inner dimension may be 1. A
    `sparse` model has this package's experts: FSDP shards them over tp ranks too, which hold different tokens.
    """
    if any(getattr(degrees, name) < 1 for name in DEGREES):
        raise ValueError(f"a degree is at least 1: {degrees}")
    sharded = degrees.dp_replicate * degrees.dp_shard * degrees.cp > 1 or (sparse and degrees.tp > 1)
    names = [name for name in DEGREES if getattr(degrees, name) > 1 or (name == "dp_shard" and sharded)]
    if not names:
        if dist.get_world_size() != 1:
            raise RuntimeError(f"all degrees are 1, but there are {dist.get_world_size()} ranks")
        return Mesh(degrees, None, None, None, None)
    world = _mesh(device_type, {name: getattr(degrees, name) for name in names})
    if world.size() != dist.get_world_size():
        raise RuntimeError(f"the degrees need {world.size()} ranks, but there are {dist.get_world_size()}")
    fsdp = None
    if sharded:
        fsdp = _flat(world["dp_shard", "cp"], "dp_shard_cp") if degrees.cp > 1 else world["dp_shard"]
        if degrees.dp_replicate > 1:
            fsdp = concatenate([world["dp_replicate"], fsdp])
    batch, loss, stage = (_group(world, dims) for dims in (DEGREES[1:3], DEGREES[1:4], DEGREES[1:]))
    experts = experts_mesh(degrees, device_type) if degrees.ep > 1 or (sparse and degrees.tp > 1) else None
    return Mesh(degrees=degrees, world=world, fsdp=fsdp, batch=batch, loss=loss, stage=stage, experts=experts)


def experts_mesh(degrees: Parallelism, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts over the same ranks in the same order: ep groups consist of neighbours in dp_shard
    x cp x tp.
    """
    rest = degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep
    sizes = {"pp": degrees.pp, "dp_replicate": degrees.dp_replicate, "efsdp": rest, "ep": degrees.ep}
    split = {name: size for name, size in sizes.items() if size > 1 or name == "efsdp"}
    return _mesh(device_type, split)


def _mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Build a mesh from the names and sizes of its dimensions."""
    alone: dict[int | str, Any] = {
        name: backend for name, size in sizes.items() if (backend := _own_backend(device_type, size))
    }
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=alone)


def _own_backend(device_type: str, size: int) -> str | None:
    """Return the back end of a mesh's groups of `size` ranks; None: the default group's back end.

    On GPUs, a group other than the default group has only NCCL. A gloo back end, if inherited, would connect each rank
    with all others (gloo#419), and is not needed: host tensors go through the default group.
    """
    if device_type != "cuda" or size == dist.get_world_size():
        return None
    return dict(entry.split(":") for entry in dist.get_backend_config().split(","))["cuda"]


def _flat(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with all its dimensions flattened into one, called `name`."""
    return flatten(mesh, name, _own_backend(mesh.device_type, mesh.size()))


def _group(world: DeviceMesh, dims: tuple[str, ...]) -> dist.ProcessGroup | None:
    """Return the process group over several dimensions at once; None if the mesh has none of them."""
    present = tuple(name for name in dims if name in world.mesh_dim_names)
    if not present:
        return None
    if len(present) == 1:
        return world.get_group(present[0])
    return _flat(world[present], "_".join(present)).get_group()
