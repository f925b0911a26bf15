"""A causal decoder of the library transformers, under the names of this package's decoder: tok_embeddings, layers, norm,
output. Its forward is transformers' own.
"""

from __future__ import annotations

import math
import sys
import threading
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import initialize_part
from titan_hydra.core.models.init import Normal
from titan_hydra.core.models.layers import TiedOutput

from .attention import positions_of_sequences, route_attention
from .config import WITH_EXPERTS, TransformersConfig
from .experts import route_experts
from .known import build_library_model


class Transformers(nn.Module):
    """Token ids [batch, seq] to logits [batch, seq, vocab], as any decoder of this package.

    The parts of transformers' model are children of this module; transformers' own modules around them are hidden in
    `whole`, and hold the same parts. So techniques that change a part in place change it for transformers' forward too.
    """

    def __init__(self, config: TransformersConfig, seq_len: int):
        """Build transformers' model, and take its parts: embedding, blocks, norm and head, under this package's names.
        Raises ConfigError for a model that is built otherwise.
        """
        super().__init__()
        self.config, self.seq_len = config, seq_len
        library = build_library_model(config)
        mask_documents(library)
        base, head = getattr(library, library.base_model_prefix, library), library.get_output_embeddings()
        embedding = library.get_input_embeddings()
        parts = {id(part): (name, part) for name, part in base.named_children()}
        blocks = [
            part for _, part in parts.values() if isinstance(part, nn.ModuleList) and len(part) == config.n_layers
        ]
        others = [part for part in parts.values() if part[1] is not embedding and part[1] not in blocks]
        norms = [name for name, part in others if any(True for _ in part.parameters())]
        outside = list(dict(library.named_parameters(recurse=False))) + list(dict(base.named_parameters(recurse=False)))
        if len(blocks) != 1 or len(norms) != 1 or head is None or outside or id(embedding) not in parts:
            raise ConfigError(
                f"model.path={config.path}: a {type(library).__name__} is not an embedding, one list of {config.n_layers} blocks, a "
                f"norm and a head ({', '.join([name for name, _ in parts.values()] + outside)})"
            )
        # an embedding with a padding token would give this token's row no gradient
        embedding.padding_idx = None
        self.distributions = initial_distributions(library)
        plain = is_plain_head(library, base, head)
        if config.tie_embeddings:
            head = TiedOutput(embedding)
            library.set_output_embeddings(head)
        if not plain:
            head.__class__ = type(f"HeadOf{type(library).__name__}", (Head, type(head)), {})
        self.tok_embeddings, self.output = embedding, head
        route_attention(library, blocks[0])
        if config.model_type in WITH_EXPERTS:
            route_experts(blocks[0])
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks[0])})
        for name, part in others:
            self.add_module("norm" if name in norms else name, part)
        self.whole = (library, base)  # a tuple hides modules from named_parameters and state_dict
        # transformers' names of the children
        inside = f"{library.base_model_prefix}." if base is not library else ""
        heads = {id(module): name for name, module in library.named_modules()}
        self.names = {"output": heads[id(head)], "tok_embeddings": inside + parts[id(embedding)][0]}
        self.names |= {"layers": inside + parts[id(blocks[0])][0]}
        self.names |= {"norm" if name in norms else name: inside + name for name, _ in others}

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, ends: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Compute logits or, if the head accepts `targets`, the loss. In a pipeline, `tokens` is the hidden state from the
        stage before, and a stage without the head returns the hidden state. `positions` [batch, seq] begin at 0 in each packed
        document, from which transformers derives the masks of all its kinds of attention; `ends` say nothing more.
        """
        library, base = self.whole
        options = {"position_ids": positions, "use_cache": False}
        options["inputs_embeds" if self.tok_embeddings is None else "input_ids"] = tokens
        PACKED.positions = positions_of_sequences(positions, self.layers.values())
        try:
            if targets is None and self.output is not None:
                logits: Tensor = library(**options).logits
                return logits
            hidden: Tensor = base(**options).last_hidden_state
        finally:
            PACKED.positions = None
        return hidden if self.output is None else self.output(hidden, targets=targets)

    def close_gaps(self) -> None:
        """Let transformers' forward pass over the blocks and the norm that another pipeline stage has."""
        _, base = self.whole
        blocks = getattr(base, self.names["layers"].rpartition(".")[2])
        for number in range(len(blocks)):
            if str(number) not in self.layers:
                blocks[number] = PassThrough()
        if self.norm is None:
            setattr(base, self.names["norm"].rpartition(".")[2], PassThrough())

    def reset_buffers(self) -> None:
        """Compute the buffers that `to_empty` has left uninitialized, as transformers does. Raises ConfigError if one of
        them stays without values.
        """
        library = self.whole[0]
        for name, module in self.named_modules():
            if not (buffers := dict(module.named_buffers(recurse=False))):
                continue
            for buffer in buffers.values():
                if buffer.is_floating_point():
                    buffer.fill_(math.nan)
            initialize_part(library, module, buffers_alone=True)
            for buffer_name, buffer in buffers.items():
                if buffer.is_floating_point() and buffer.isnan().any():
                    kind = type(library).__name__
                    raise ConfigError(
                        f"model.path={self.config.path}: transformers gives {name}.{buffer_name} of a {kind} no value"
                    )

    def initial_distribution(self, fqn: str, config: TransformersConfig) -> Normal | float:
        """Return the distribution that transformers would draw the parameter from."""
        name, _, rest = fqn.partition(".")
        return self.distributions[f"{self.names[name]}.{rest}"]


PACKED = threading.local()  # the positions of this rank's batch; ranks may be threads


def mask_documents(library: Any) -> None:
    """Let every mask of transformers' model separate documents, which begin where positions begin. Some of its models, such
    as gpt-oss, give their positions to the rotary embedding alone, and their documents would see each other.
    """
    for kind in {type(part) for part in library.modules()}:
        code = sys.modules[kind.__module__]
        for name in [name for name in vars(code) if name.startswith("create_") and name.endswith("causal_mask")]:
            if not hasattr(make := getattr(code, name), "with_positions"):
                setattr(code, name, _with_positions(make))


def _with_positions(make: Any) -> Any:
    """Wrap a function that makes masks so that it gets the positions of packed documents, if none are given."""

    @wraps(make)
    def made(config: Any, inputs_embeds: Tensor, *args: Any, **options: Any) -> Any:
        if (positions := getattr(PACKED, "positions", None)) is not None:
            options["position_ids"] = positions
            if positions.shape[1] > inputs_embeds.shape[1]:  # transformers reads no more than its shape and dtype
                inputs_embeds = inputs_embeds[:, :1, :1].expand(-1, positions.shape[1], -1)
        return make(config, inputs_embeds, *args, **options)

    made.with_positions = True  # type: ignore[attr-defined]
    return made


class PassThrough(nn.Module):
    """The place of a block or a norm of another pipeline stage."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Head(nn.Linear):
    """A head after which transformers' model computes more, such as a soft cap. As its forward is its own, techniques that
    replace a linear's product refuse it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x)


def is_plain_head(library: Any, base: Any, head: Any) -> bool:
    """Whether transformers' logits are the head's product with the last hidden state, and nothing else. Calls the forward
    of the whole model with a base model and a head that compute nothing.
    """
    hidden = torch.rand(1, 2, head.in_features, device="cpu")
    product, seen = torch.empty(1, 2, head.out_features, device="cpu"), []

    def base_forward(*args: Any, **options: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=hidden)

    def head_forward(x: Tensor) -> Tensor:
        seen.append(x)
        return product

    with mock.patch.object(base, "forward", base_forward), mock.patch.object(head, "forward", head_forward):
        logits = library(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="cpu"), use_cache=False).logits
    return logits is product and [torch.equal(x, hidden) for x in seen] == [True]


def initial_distributions(library: Any) -> dict[str, Normal | float]:
    """Return the initial distribution of every parameter, as transformers draws it: its calls are
    recorded, and nothing is drawn. Raises ConfigError for a distribution that is neither normal nor constant.
    """
    from transformers import initialization

    drawn: dict[int, Normal | float] = {}

    def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *_: Any, **__: Any) -> Tensor:
        if mean == 0:
            drawn[id(x)] = Normal(std)
        return x

    def truncated(x: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any) -> Tensor:
        if mean == 0 and a == -b:
            drawn[id(x)] = Normal(std, cut=b / std)
        return x

    def constant(value: float | None) -> Any:
        def record(x: Tensor, val: float | None = value, **_: Any) -> Tensor:
            drawn[id(x)] = float(val)
            return x

        return record

    def other(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    recorders = dict.fromkeys(initialization.TORCH_INIT_FUNCTIONS, other) | {
        "normal_": normal,
        "trunc_normal_": truncated,
        "zeros_": constant(0.0),
        "ones_": constant(1.0),
        "constant_": constant(None),
        "copy_": other,
    }
    with ExitStack() as patches:
        for name, recorder in recorders.items():
            patches.enter_context(mock.patch.object(initialization, name, recorder))
        for module in library.modules():
            initialize_part(library, module)
    wanted = dict(library.named_parameters(remove_duplicate=False))
    if lost := [name for name, parameter in wanted.items() if id(parameter) not in drawn]:
        raise ConfigError(
            f"transformers draws {lost[0]} of a {type(library).__name__} neither from a normal distribution nor as a constant"
        )
    return {name: drawn[id(parameter)] for name, parameter in wanted.items()}
