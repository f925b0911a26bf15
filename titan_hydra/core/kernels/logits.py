"""The largest attention logit of each head, as one operator: eager and compiled code and activation checkpointing see its
result alone. No matrix of all logits is kept.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.library import custom_op

from .documents import document_numbers

CHUNK = 2**24  # number of logits that are computed at a time


@custom_op("titan_hydra::largest_logits", mutates_args=())
def largest_logits(q: Tensor, k: Tensor, documents: Tensor | None, starts: list[int], chunk: int) -> Tensor:
    """Return for each head the largest of the logits that causal attention's softmax reads, in float32: [heads].

    `q` [batch, heads, n, width] are the queries of parts of the sequence: equally long parts that begin at `starts`. `k`
    [batch, shared heads, seq, width] are the keys of the whole sequence. `documents` are None, the offsets of packed
    documents, or a mask of all pairs (see kernels/documents.py). About `chunk` logits are computed at a time.
    """
    batch, heads, length, width = q.shape
    shared, seq = k.shape[1:3]
    if documents is not None and documents.dtype != torch.bool:
        documents = document_numbers(documents, batch, seq)
    rows = min(max(chunk // (batch * heads * seq), 1), part := length // len(starts))
    keys, largest = k.transpose(2, 3).flatten(0, 1), q.new_full((heads,), -torch.inf, dtype=torch.float32)
    for number, start in enumerate(starts):
        for begin, end in pairwise([*range(0, part, rows), part]):
            first, last = start + begin, start + end  # positions of these queries
            some = q[:, :, number * part + begin : number * part + end].unflatten(1, (shared, -1)).flatten(2, 3)
            logits = _products(some.flatten(0, 1), keys[..., :last]).view(batch, heads, end - begin, last)
            hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
            logits[..., first:].masked_fill_(hidden, -torch.inf)
            if documents is not None:
                logits.masked_fill_(_apart(documents, first, last), -torch.inf)
            largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest * width**-0.5


@largest_logits.register_fake
def _(q: Tensor, k: Tensor, documents: Tensor | None, starts: list[int], chunk: int) -> Tensor:
    return q.new_empty((q.shape[1],), dtype=torch.float32)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products of queries [n, rows, width] and keys [n, width, columns], summed and kept in float32."""
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(q, k, out_dtype=torch.float32)
    return q.float() @ k.float()


def _apart(documents: Tensor, first: int, last: int) -> Tensor:
    """Return whether each query from `first` to `last` and each key before `last` are in different documents."""
    if documents.dtype == torch.bool:
        return ~documents[:, :, first:last, :last]
    return (documents[:, first:last, None] != documents[:, None, :last]).unsqueeze(1)
