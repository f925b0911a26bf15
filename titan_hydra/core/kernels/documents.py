"""Causal attention within packed documents. No mask is used, so that the time grows only with the number of pairs of
tokens within documents.

The same operator works in eager and compiled code, on CPUs and GPUs, and activation checkpointing can save its results.
`offsets` (int32) are cumulative sequence lengths: the position of each document's first token in the concatenated
tokens of all samples, and the number of all tokens. Documents may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from titan_hydra.core.base.private import flash_attention, flash_attention_backward, flash_on_cpu, flash_on_cpu_backward


def document_offsets(ends: Tensor) -> Tensor:
    """Return the offsets [batch * n + 1] of packed documents. `ends` [batch, n] are the ends of the documents within
    their samples. All samples have the same length.
    """
    samples = torch.arange(len(ends), device=ends.device, dtype=ends.dtype).unsqueeze(1)
    return F.pad((ends + samples * ends[:, -1:]).flatten(), (1, 0))


def document_numbers(offsets: Tensor, batch: int, seq: int) -> Tensor:
    """Return the number of each token's document [batch, seq], counted over all samples."""
    tokens = torch.arange(batch * seq, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, tokens, right=True).view(batch, seq)


def document_mask(ends: Tensor, seq: int) -> Tensor:
    """Return the mask [batch, 1, seq, seq] of all pairs of tokens. It is True where a token attends to another: to
    itself, and to earlier tokens of its document.
    """
    document = document_numbers(document_offsets(ends), len(ends), seq)
    return (document.unsqueeze(2) == document.unsqueeze(1)).tril().unsqueeze(1)


def attend_within(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Return the causal attention of q, k, v [batch, heads, seq, head_dim] within documents."""
    batch, _, seq, _ = q.shape
    width, v = v.shape[-1], as_wide(v, q)
    out, _ = attend_documents(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), offsets, seq)
    return cut_to(out, width).unflatten(0, (batch, seq)).transpose(1, 2)


def as_wide(v: Tensor, q: Tensor) -> Tensor:
    """Return values padded with zeros to the width of the queries, for kernels and collectives that need one width."""
    return v if v.shape[-1] == q.shape[-1] else F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def cut_to(x: Tensor, width: int) -> Tensor:
    """Return the first `width` columns of x. If x has no more columns, return x itself and not a slice, whose gradient
    would be a copy.
    """
    return x if x.shape[-1] == width else x[..., :width]


@custom_op("titan_hydra::attend_documents", mutates_args=(), device_types="cpu")
def attend_documents(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the attention of q, k, v [tokens, heads, head_dim] and its logsumexp [heads, tokens]. `longest` is an upper
    bound of a document's tokens. There may be fewer key and value heads than query heads (grouped-query attention).
    """
    out, sums = _results(q)
    for part in _documents(offsets):
        document_out, document_sums = flash_on_cpu(*_as_batch(part, q, k, v), is_causal=True)
        out[part], sums[:, part] = document_out[0].transpose(0, 1), document_sums[0]
    return out, sums


@custom_op("titan_hydra::attend_documents_backward", mutates_args=(), device_types="cpu")
def attend_documents_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    whole = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in _documents(offsets):
        gradients = flash_on_cpu_backward(
            *_as_batch(part, gradient, q, k, v, out), sums[:, part].unsqueeze(0), 0.0, True
        )
        for x, part_gradient in zip(whole, gradients, strict=True):
            x[part] = part_gradient[0].transpose(0, 1)
    return whole


@attend_documents.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    out, sums, *_ = flash_attention(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)
    return out, sums


@attend_documents_backward.register_kernel("cuda")
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of the dropout, which is not used
    return flash_attention_backward(
        gradient,
        q,
        k,
        v,
        out,
        sums,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        True,
        state,
        torch.empty(0, device=q.device),
    )


@attend_documents.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    return _results(q)


@attend_documents_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, ctx.longest = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_documents_backward(gradient, *ctx.saved_tensors, ctx.longest), None, None


attend_documents.register_autograd(_differentiate, setup_context=_keep)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for the output and the logsumexp."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=exact, device=q.device)


def _documents(offsets: Tensor) -> Iterator[slice]:
    """Yield, for each document that is not empty, the slice of its tokens."""
    for begin, end in pairwise(offsets.tolist()):
        if begin < end:
            yield slice(begin, end)


def _as_batch(part: slice, *tensors: Tensor) -> list[Tensor]:
    """Return for each tensor the part of one document, as [1, heads, tokens, head_dim]."""
    return [x[part].transpose(0, 1).unsqueeze(0) for x in tensors]
