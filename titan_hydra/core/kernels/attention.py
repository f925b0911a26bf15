"""Attention by torch's kernels. core/job/config/attention.py decides which kernels may compute a call; `SDPA` prepares the call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_hydra.core.base.private import constant_when_compiled
from titan_hydra.core.job.config.attention import Call, Machine, call_of, kernels
from titan_hydra.core.job.config.schema import Job

from .documents import as_wide, attend_within, cut_to

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = {getattr(torch, name): name for name in ("float64", "float32", "bfloat16", "float16")}


class SDPA(nn.Module):
    """Attention of q, k, v [batch, heads, seq, head_dim] by one of torch's kernels. It is a module of its own, so that
    context parallelism can replace it.
    """

    def __init__(self, backend: str, causal: bool = True):
        super().__init__()
        self.backend, self.causal = backend, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute attention within `documents`, if they are given, else of whole sequences (causal if `self.causal`).
        `documents` are the offsets of packed documents (int32; see `attend_within`), or a mask of all pairs [batch, 1,
        seq, seq]. Raises ConfigError if the kernel that the job names may not compute this call.
        """
        if documents is not None and documents.dtype != torch.bool:
            return attend_within(q, k, v, documents)
        causal = self.causal and documents is None
        chosen = kernels(self.backend, call_on(q, v, causal, documents is not None))
        k, v, width = suited(chosen[0], q, k, v)
        with sdpa_kernel([BACKENDS[kernel] for kernel in chosen], set_priority=True):
            out = F.scaled_dot_product_attention(
                q, k, v, documents, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return cut_to(OneLayout.apply(out), width)


def call_on(q: Tensor, v: Tensor, causal: bool, masked: bool = False, ring: bool = False) -> Call:
    """Return the facts on which the choice of a kernel depends, for queries and values [batch, heads, seq, head_dim]."""
    machine = machine_of(q.device.index or 0) if q.is_cuda else None
    return Call(
        device=q.device.type,
        dtype=DTYPES[q.dtype],
        width=q.shape[-1],
        value_width=v.shape[-1],
        keys=v.shape[2],
        causal=causal,
        masked=masked,
        ring=ring,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        machine=machine,
    )


def check_attention(job: Job, device: torch.device) -> None:
    """Raise ConfigError if the kernel that a job names may not run on this device. Called before compilation."""
    kernels(
        job.model.attention, call_of(job, device.type, machine_of(device.index or 0) if device.type == "cuda" else None)
    )


@constant_when_compiled
def machine_of(index: int) -> Machine:
    """Return the compute capability of a GPU, and torch's versions of CUDA and cuDNN."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
    return Machine(torch.cuda.get_device_capability(index), cuda, torch.backends.cudnn.version() or 0)


def suited(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return keys and values in the form that a kernel accepts, and the width of a value. Flash attention needs values
    as wide as queries. Efficient attention (before torch 2.14) needs as many key heads as query heads. For tensors in
    other forms, torch would choose the math kernel, which stores all scores.
    """
    width = v.shape[-1]
    if kernel == "flash":
        v = as_wide(v, q)
    if kernel == "efficient" and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return k, v, width


class OneLayout(torch.autograd.Function):
    """Returns attention's output [batch, heads, seq, head_dim] unchanged; the backward gives the gradient the memory
    layout of the output.

    torch builds one graph of cuDNN's backward for each layout of q, k and v, with the strides of the first gradient. If
    a later gradient has other strides, the graph reads wrong elements, or torch raises an error (repaired by
    pytorch#191576, after 2.13). This can happen if one model has two kinds of blocks.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        # whether the order in memory is [batch, seq, heads, head_dim]
        ctx.by_token = bool(out.stride(1) < out.stride(2))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # No `if` tests the strides, because a compiler would evaluate the `if` before it knows the strides. `reshape`
        # copies only if it must, and also sets the strides of dimensions of size 1.
        gradient = gradient.transpose(1, 2) if ctx.by_token else gradient
        gradient = gradient.reshape(-1).view(gradient.shape)
        return gradient.transpose(1, 2) if ctx.by_token else gradient
