"""Context parallelism: each rank holds a part of every sequence, and only attention combines the parts.

Ring attention (torch's own; arXiv 2310.01889) keeps queries in place and communicates keys and values: they are
gathered at once (`cp_rotate=allgather`) or passed from rank to rank (`alltoall`). With Ulysses (arXiv 2309.14509), a
rank has a part of the sequence with all heads; for attention, an all-to-all gives it the whole sequence with a part of
the heads, and another all-to-all reverses this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

from titan_hydra.core.base import private
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import all_to_all_single_autograd
from titan_hydra.core.base.private import ring_options as OPTIONS
from titan_hydra.core.job.config.attention import Call, kernels
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.registry import resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import rotation
from titan_hydra.core.kernels.attention import BACKENDS, SDPA, call_on, suited
from titan_hydra.core.kernels.documents import as_wide, cut_to

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """In every block of a stage, replace the attention kernel, the child called `sdpa`, by one that covers the whole
    sequence.

    torch's options of the ring hold for the whole process. So every job sets them, and a job without context
    parallelism switches the ring off. Raises ConfigError for a block without such a kernel. With a ring, raises
    ConfigError also for a kernel that is not the package's, as torch's kernel would replace that kernel.
    """
    private.disable_ring_dispatcher()
    if mesh.degrees.cp == 1:
        return
    cp, record = mesh.world["cp"], rotation(job)
    if record.ring:
        enable_ring(job, cp.device_type)
    for number, block in family_of(job.model).blocks(module).items():
        attentions = [part for part in block.modules() if hasattr(part, "sdpa")]
        if not attentions:
            raise ConfigError(
                f"parallelism.cp={mesh.degrees.cp}: block {number} of {job.model.family} has no child called sdpa that could "
                "see the whole sequence; nearest legal: 1"
            )
        for attention in attentions:
            if record.ring and type(attention.sdpa) is not SDPA:
                raise ConfigError(
                    f"parallelism.cp_rotate={record.name}: a ring replaces the attention kernel of {job.model.family}, a "
                    f"{type(attention.sdpa).__name__}, by torch's; nearest legal: ulysses"
                )
            attention.sdpa = resolve(record.attention)(attention.sdpa, cp)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Return this rank's part of every sequence of a titan_hydra.core.data.batch.Batch. Each tensor declares the dimension
    along which it is cut.
    """
    return batch if mesh.degrees.cp == 1 else batch.of_sequences(lambda length: local_index(length, mesh))


def local_index(seq_len: int, mesh: Mesh) -> Tensor:
    """Return the indices of a sequence that this rank holds.

    The cost of a causal query grows with its position. In the ring's load-balanced order, the sequence has 2 * cp
    chunks, and rank r takes the r-th chunk from the front and the r-th from the back, as torch's ring expects. With
    Ulysses, every rank has all queries, so the order is kept.
    """
    cp, rank = mesh.degrees.cp, mesh.coordinate("cp")
    in_order, parts = not mesh.degrees.balanced, mesh.degrees.sequence_parts
    if seq_len % parts:
        raise ConfigError(f"parallelism.cp={cp}: a sequence of length {seq_len} cannot be cut into {parts} parts")
    chunks = torch.arange(seq_len).chunk(parts)
    if in_order:
        return chunks[rank]
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def enable_ring(job: Job, device_type: str) -> None:
    """Make torch dispatch attention on sequence-sharded DTensors to its ring, with this job's options.

    Raises ConfigError for float32 on CUDA: cuDNN and flash do not support it, and the plain kernel has no ring.
    """
    if device_type == "cuda" and job.precision.compute_dtype == "float32":
        raise ConfigError(
            "precision.compute_dtype=float32: ring attention has no float32 kernel on CUDA; "
            "nearest legal: bfloat16, or parallelism.cp_rotate=ulysses"
        )
    if device_type == "cpu":
        from . import ring_cpu

        ring_cpu.register_ring()
    # without causal attention all queries cost the same, in any order
    OPTIONS.enable_load_balance = job.parallelism.balanced and job.model.causal
    private.set_rotate_method(job.parallelism.cp_rotate)
    private.enable_ring_dispatcher()


def ring_options() -> tuple[Any, ...]:
    """Return the present options of torch's ring in this process."""
    return OPTIONS.rotate_method, OPTIONS.enable_load_balance


class Ring(nn.Module):
    """Attention of this rank's q, k, v [batch, heads, seq / ranks, head_dim] to the whole sequence. The attention is
    causal if `sdpa` is.
    """

    def __init__(self, sdpa: SDPA, mesh: DeviceMesh):
        """Take the options of the attention from `sdpa`. Raises ConfigError if its kernel has no ring."""
        super().__init__()
        self.mesh, self.causal, self.backend = mesh, sdpa.causal, sdpa.backend
        self.options = ring_options()
        kernels(self.backend, Call(mesh.device_type, ring=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend to the whole sequence by torch's ring attention, with the fastest kernel that the ring and these
        shapes allow.
        """
        if documents is not None:
            raise ValueError("ring attention cannot mask documents")
        # The options are read here so that torch.compile guards on them. Otherwise a block that was compiled with
        # another job's options would be reused.
        if ring_options() != self.options:
            raise RuntimeError("torch's options for ring attention are now those of another job in this process")
        chosen = kernels(self.backend, call_on(q, v, self.causal, ring=True))
        k, v, width = suited(chosen[0], q, k, v)
        q, k, v = (DTensor.from_local(x, self.mesh, [Shard(2)], run_check=False) for x in (q, k, v))
        with sdpa_kernel([BACKENDS[kernel] for kernel in chosen], set_priority=True):
            h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
        return cut_to(h.to_local(), width)


class Ulysses(nn.Module):
    """Attention of q, k, v [batch, heads, seq / ranks, head_dim]. The ranks exchange them, so that `sdpa` computes the
    whole sequence for 1 / ranks of the heads.
    """

    def __init__(self, sdpa: nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.sdpa, self.group = sdpa, mesh.get_group()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute attention. `documents` are those of the whole sequence."""
        ranks = self.group.size()
        heads = [x.shape[1] // ranks for x in (q, k, v)]
        width, v = v.shape[-1], as_wide(v, q)
        # The parts for one rank are contiguous, so that q, k and v need only one exchange.
        qkv = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q, k, v)], dim=2).flatten(1, 2)
        q, k, v = self.exchange(qkv, scatter=1, gather=2).split(heads, dim=1)
        return self.exchange(self.sdpa(q, k, cut_to(v, width), documents), scatter=2, gather=1)

    def exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        """All-to-all: split dimension `scatter` over the ranks and concatenate along `gather` (the two dimensions are
        adjacent).
        """
        parts = x.unflatten(scatter, (self.group.size(), -1)).movedim(scatter, 0).contiguous()
        parts = all_to_all_single_autograd(parts, None, None, self.group)
        return parts.movedim(0, gather).flatten(gather, gather + 1)
