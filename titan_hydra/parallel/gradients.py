"""The norm of the whole model's gradient, and clipping by it: the same number on every layout."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients, in place, so that their total norm is at most `max_norm` (0: leave them). Returns the norm before.

    Parameters may live on different meshes, whose shards cannot be stacked; each mesh's norm is made whole by itself and the
    squares are added.
    """
    by_mesh = defaultdict(list)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
