"""Attention of a model of transformers, through the interface by which transformers finds its attention functions. Every
block's attention calls a child `sdpa`, which context parallelism replaces (core/parallel/context.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_hydra.core.base.private import attention_of, choose_attention

SINKS = "sinks"  # transformers' name of a parameter of attention with one number for each head


@dataclass(frozen=True)
class LibraryCall:
    """What a block of transformers gives to its attention function beside queries, keys and values."""

    module: nn.Module
    mask: Tensor | None  # for the whole sequence
    options: dict[str, Any]
    group: ProcessGroup | None  # of the ranks that share a sequence; each computes a part of the heads


class LibraryAttention(nn.Module):
    """Attention of q, k, v [batch, heads, seq, head_dim] by a function of transformers."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: LibraryCall) -> Tensor:
        with own_sinks(call) as options:
            output: Tensor = self.function(call.module, q, k, v, call.mask, **options)[0]
        return output.transpose(1, 2)


def route_attention(library: Any, blocks: nn.ModuleList) -> None:
    """Let the attention of every block call its child `sdpa`, in place. Blocks without a child `self_attn` stay as they
    are.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = attention_of(library)
    for block in blocks:
        if (attention := getattr(block, "self_attn", None)) is not None:
            plain = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
            attention.sdpa = LibraryAttention(ALL_ATTENTION_FUNCTIONS.get_interface(function, plain))
    name = f"titan_hydra_{function}"
    ALL_ATTENTION_FUNCTIONS.register(name, call_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[function])
    choose_attention(library, name)


def call_sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Compute attention by the module's child `sdpa`. Return [batch, seq, heads, head_dim], as transformers expects."""
    call = LibraryCall(module, mask, options, sequence_group(module))
    return module.sdpa(q, k, v, call).transpose(1, 2).contiguous(), None


def sequence_group(attention: Any) -> ProcessGroup | None:
    """Return the group of the ranks that share a sequence; None without context parallelism."""
    return getattr(getattr(attention, "sdpa", None), "group", None)


def positions_of_sequences(positions: Tensor | None, blocks: Iterable[Any]) -> Tensor | None:
    """Return the positions [batch, seq] of all tokens of this rank's sequences, of which context parallelism gives it a
    part.
    """
    group = next((group for block in blocks if (group := sequence_group(block.self_attn))), None)
    if positions is None or group is None:
        return positions
    parts = [torch.empty_like(positions) for _ in range(group.size())]
    dist.all_gather(parts, positions.contiguous(), group)
    return torch.cat(parts, 1)


@contextmanager
def own_sinks(call: LibraryCall) -> Iterator[dict[str, Any]]:
    """Yield the options of a call, with the sinks of this rank's heads alone, which the module has meanwhile too."""
    sinks = getattr(call.module, SINKS, None)
    if call.group is None or sinks is None:
        yield call.options
        return
    part = sinks.chunk(call.group.size())[call.group.rank()]
    hidden = call.module.__dict__.get(SINKS)
    call.module.__dict__[SINKS] = part  # an attribute of the object hides the parameter
    try:
        yield {name: part if value is sinks else value for name, value in call.options.items()}
    finally:
        del call.module.__dict__[SINKS]
        if hidden is not None:
            call.module.__dict__[SINKS] = hidden
