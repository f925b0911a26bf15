"""In which dtypes a layout sums gradients over its ranks. A sum in bfloat16 is within the tolerances of most cases."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_hydra.core.base.private import functional_collectives
from titan_hydra.core.job.batches import local_batches, microbatches
from titan_hydra.core.models.init import clean_name
from titan_hydra.core.train.trainer import Trainer


@contextlib.contextmanager
def reductions(trainer: Trainer | None = None) -> Iterator[tuple[list[torch.dtype], list[torch.dtype]]]:
    """Collect the dtypes in which FSDP2 reduces gradients and, if a trainer is given, the dtypes in which its
    tensor-parallel ranks sum the gradients of weights that each of them holds whole. `rounded` cannot detect wrong
    dtypes: a float32 sum of bfloat16 sums has bits that bfloat16 lacks, and the sum of two ranks is rounded once in
    either dtype.
    """
    of_fsdp: list[torch.dtype] = []
    of_whole: list[torch.dtype] = []
    shapes = {
        parameter.shape
        for parameter in (trainer.masters.weights.parameters() if trainer and trainer.mesh.degrees.tp > 1 else ())
        if isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()
    }

    def noting(reduce: Callable[..., Any], dtypes: list[torch.dtype], shapes: set[torch.Size]) -> Callable[..., Any]:
        """Wrap a collective so that it records the dtype in which it sums; with `shapes`, only of tensors of these
        shapes.
        """

        def noted(*given: object, **named: object) -> object:
            summed = next(value for value in (*given, *named.values()) if isinstance(value, torch.Tensor))
            if not shapes or summed.shape in shapes:
                dtypes.append(summed.dtype)
            return reduce(*given, **named)

        return noted

    with contextlib.ExitStack() as patched:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # torch 2.11's name, torch 2.13's name
            if hasattr(dist, name):
                patched.enter_context(mock.patch.object(dist, name, noting(getattr(dist, name), of_fsdp, set())))
        # with a compiler, the function that records the dtypes would be traced too
        if trainer and shapes and trainer.job.compile.name == "off":
            noted = noting(functional_collectives.all_reduce, of_whole, shapes)
            patched.enter_context(mock.patch.object(functional_collectives, "all_reduce", noted))
        yield of_fsdp, of_whole


def wrong_sums(of_fsdp: list[torch.dtype], of_whole: list[torch.dtype], wanted: torch.dtype) -> int:
    """Count gradient sums in a wrong dtype; over tensor-parallel ranks, a wider dtype is right (whole.redistribute)."""
    narrow = [dtype for dtype in of_whole if dtype.itemsize < wanted.itemsize]
    return len(narrow) + sum(dtype != wanted for dtype in of_fsdp)


MANY = 16  # elements of a gradient whose lower bits are not all 0 by chance


def rounded(trainer: Trainer, gradients: dict[str, torch.Tensor]) -> int:
    """Count the parameters whose gradients were summed in bfloat16 although reduce_dtype=float32. Such gradients lack the
    lower bits.
    """
    job = trainer.job
    parts = trainer.mesh.data_ranks * job.parallelism.cp * microbatches(job) * local_batches(job)
    if job.precision.reduce_dtype != "float32" or job.precision.param_dtype != "float32" or parts == 1:
        return 0
    # Only sums are asked. If expert parallelism uses all these ranks, an expert's gradient comes from one rank. A row of
    # a table comes from the ranks that look it up, and with few tokens this is one rank for each row.
    alone = trainer.mesh.experts is not None and parts == job.parallelism.ep
    left_out = [".experts."] if alone else []
    if not getattr(job.model, "tie_embeddings", False):
        modules = trainer.model.named_modules()
        left_out += [clean_name(f"{name}.weight") for name, module in modules if isinstance(module, torch.nn.Embedding)]
    # A zero gradient, such as that of an adapter's A in the first step, proves nothing. Nor do a few numbers, such as those
    # of a router's bias: their sums may need no lower bits by chance.
    moving = {name: gradient for name, gradient in gradients.items() if gradient.any() and gradient.numel() >= MANY}
    return sum(
        torch.equal(gradient, gradient.bfloat16().float())
        for name, gradient in moving.items()
        if not any(part in name for part in left_out)
    )
