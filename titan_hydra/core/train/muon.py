"""Muon on sharded matrices. Each rank orthogonalizes a different whole matrix, so that two exchanges suffice for as
many matrices as there are ranks.

torch's own Muon computes on DTensors: all ranks orthogonalize each matrix together, in about 15 collectives.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_hydra.core.base.private import muon_adjust_lr, muon_orthogonalize
from titan_hydra.core.models.init import local_box
from titan_hydra.core.parallel.mesh import local_part


class Muon(torch.optim.Muon):
    """torch's Muon for matrices that are sharded or replicated over the ranks of `group` (None: for plain tensors). The
    updates are the same. In stacked experts [experts, rows, columns], each expert is a matrix.

    Like torch's fused optimizers, this one divides gradients by `grad_scale` and changes nothing if `found_inf` is 1,
    without a host synchronization.
    """

    _step_supports_amp_scaling = True

    def __init__(self, matrices: Iterable[nn.Parameter], group: dist.ProcessGroup | None, **options: Any) -> None:
        """Put matrices and stacks of matrices into groups of their own. `grad_scale` divides gradients, and a
        `found_inf` of 1 skips the step, as in torch's fused AdamW.
        """
        matrices = list(matrices)
        super().__init__([matrix for matrix in matrices if matrix.ndim == 2], **options)
        if stacks := [matrix for matrix in matrices if matrix.ndim > 2]:
            self.add_param_group({"params": stacks})  # torch's constructor would refuse stacks
        self.group = group
        self.grad_scale: Tensor | float = 1.0
        self.found_inf: Tensor | float = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # our optimizers take no closure
        """Update every matrix that has a gradient. This is a collective over the group."""
        ranks = 1 if self.group is None else self.group.size()
        keep = 1 - self.found_inf
        for options in self.param_groups:
            matrices = [matrix for matrix in options["params"] if matrix.grad is not None]
            for start in range(0, len(matrices), ranks):
                batch = matrices[start : start + ranks]
                directions = self.orthogonal(
                    batch, [self.direction(matrix, options, keep) for matrix in batch], options
                )
                for matrix, direction in zip(batch, directions, strict=True):
                    rate = muon_adjust_lr(options["lr"], options["adjust_lr_fn"], matrix.shape[-2:])
                    local = local_part(matrix.detach())
                    local.mul_(1 - keep * options["lr"] * options["weight_decay"]).sub_(
                        direction.float() * (keep * rate)
                    )

    def direction(self, matrix: nn.Parameter, options: dict[str, Any], keep: Tensor | float) -> Tensor:
        """Return this rank's shard of the gradient with Nesterov momentum, in bfloat16, the dtype of the
        orthogonalization.
        """
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        momentum, gradient = local_part(state["momentum_buffer"]), local_part(matrix.grad) / self.grad_scale
        gradient = torch.where(torch.as_tensor(keep, device=gradient.device) > 0, gradient, 0)
        momentum.lerp_(gradient, keep * (1 - options["momentum"]))
        return gradient.lerp(momentum, options["momentum"]).bfloat16()

    def orthogonal(
        self, matrices: list[nn.Parameter], directions: list[Tensor], options: dict[str, Any]
    ) -> list[Tensor]:
        """Return this rank's shards of the orthogonalized matrices. There are at most as many matrices as ranks in the
        group; rank i computes the i-th matrix.
        """

        def orthogonalize(whole: Tensor) -> Tensor:
            if whole.ndim > 2:
                return torch.stack([orthogonalize(matrix) for matrix in whole])
            return muon_orthogonalize(whole, options["ns_coefficients"], options["ns_steps"], options["eps"])

        if self.group is None:
            return [orthogonalize(direction) for direction in directions]
        rank, ranks = self.group.rank(), range(self.group.size())
        nothing = directions[0].new_empty(0)
        my_matrix = matrices[rank] if rank < len(matrices) else None
        parts = [] if my_matrix is None else [part_of(my_matrix, coordinate(my_matrix, other)) for other in ranks]
        # The rank that computes a matrix receives each part once: from ranks with the same copy of the matrix.
        given = [
            direction.flatten() if same_copy(matrix, rank, owner) else nothing
            for owner, (matrix, direction) in enumerate(zip(matrices, directions, strict=True))
        ]
        sizes = [elements_of(part) if same_copy(my_matrix, rank, other) else 0 for other, part in enumerate(parts)] or [
            0
        ] * len(ranks)
        received = self.exchange([*given, *[nothing] * (len(ranks) - len(given))], sizes)
        answers = [nothing] * len(ranks)
        if my_matrix is not None:
            whole = directions[0].new_zeros(my_matrix.shape)
            for part, values in zip(parts, received, strict=True):
                if values.numel():
                    whole[part] = values.view_as(whole[part])
            whole = orthogonalize(whole)
            answers = [whole[part].flatten() for part in parts]
        sizes = [direction.numel() for direction in directions] + [0] * (len(ranks) - len(directions))
        results = self.exchange(answers, sizes)
        return [result.view_as(direction) for result, direction in zip(results, directions, strict=False)]

    def exchange(self, given: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send the i-th of `given` to rank i, and receive `sizes[i]` elements from it."""
        received = given[0].new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(given), sizes, [part.numel() for part in given], group=self.group)
        return list(received.split(sizes))


def coordinate(matrix: nn.Parameter, rank: int) -> list[int]:
    """Return a rank's coordinate in the matrix's mesh. `rank` is its number in the group of all ranks of the mesh,
    which has them in row-major order.
    """
    return [int(index) for index in np.unravel_index(rank, matrix.device_mesh.shape)]


def same_copy(matrix: nn.Parameter, first: int, second: int) -> bool:
    """Whether two ranks of the group hold shards of the same copy of a matrix."""
    coordinates = zip(coordinate(matrix, first), coordinate(matrix, second), matrix.placements, strict=True)
    return all(a == b for a, b, placement in coordinates if placement.is_replicate())


def part_of(matrix: nn.Parameter, at: list[int]) -> tuple[slice, ...]:
    """Return the rows and columns of a matrix held by the rank at `at` in its mesh."""
    return tuple(slice(offset, offset + size) for offset, size in zip(*local_box(matrix, at), strict=True))


def elements_of(part: tuple[slice, ...]) -> int:
    """Return the number of elements of a part."""
    return math.prod(dim.stop - dim.start for dim in part)
