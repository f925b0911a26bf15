"""Model families by name: the record of a family's parts, and the registry of families, whose names `model.family`
selects. Imports no torch.

The package's own families are folders of titan_hydra/core/models. They register themselves in the same way as
the families of a user's module (`train.imports`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fault import Fault, suggest
from .model import Model
from .registry import REGISTRIES, Registry, resolve
from .registry import register as register  # exported here, so that a family's folder needs to import only this module

# What a parameter maps between. A width grows with the model; the number of tokens and the number of experts do not.
ROLES = (
    "embedding",  # tokens to the width
    "hidden",  # a width to a width
    "output",  # the width to tokens
    "router",  # the width to experts
    "vector",  # one value for each element of a width: norms and biases
)


def decoder_modules(config: Model) -> list[str]:
    """Return the modules of a decoder in running order: the embedding, the blocks, the last norm, the head."""
    return ["tok_embeddings", *(f"layers.{block}" for block in range(config.n_layers)), "norm", "output"]


def decoder_blocks(module: Any) -> Mapping[str, Any]:
    """Return the blocks of a decoder, or of one stage of it, by number."""
    return module.layers


def decoder_flops(config: Model, seq_len: int, parameters: int) -> int:
    """Return the FLOPs of forward and backward for one token, counted as TorchTitan does: 6 per weight, 12 * layers *
    heads * head width * seq_len for attention.

    An embedding is a look-up without FLOPs, unless it is also the head. Causal attention counts in full, and recomputation
    does not count.
    """
    lookups = 0 if config.tie_embeddings else config.vocab_size * config.dim
    return 6 * (parameters - lookups) + 12 * config.n_layers * config.n_heads * config.head_width * seq_len


def decoder_parameters(config: Model) -> int:
    """Return the number of parameters of a decoder with a gated feed-forward and two norms in each block. A tied weight
    counts once.
    """
    attention = 2 * config.dim * config.head_width * (config.n_heads + config.n_kv_heads)
    block = attention + 3 * config.dim * config.ffn_width + 2 * config.dim
    return config.n_layers * block + config.dim + config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)


def decoder_role(name: str) -> str:
    """Return the role of a decoder's parameter, one of ROLES. The parameter's factors depend on its role."""
    if name.startswith(("tok_embeddings.", "output.")):
        return "embedding" if name.startswith("tok_embeddings.") else "output"
    if "norm" in name:
        return "vector"
    return "router" if name.endswith(".router.weight") else "hidden"


def causal_keys(config: Model, seq_len: int) -> float:
    """Return how many keys causal attention computes for a query, as a mean over a sequence: half of them."""
    return seq_len / 2


def decoder_clipped(config: Model) -> dict[str, Sequence[tuple[int, float]]]:
    """Return what QK-clip scales: queries and keys by the square root of a head's factor. A key that several heads share
    is left as it is, as the paper does with the rotated key that all heads share, and their queries take the whole
    factor.
    """
    if config.n_kv_heads < config.n_heads:
        return {"wq": ((config.head_width, 1.0),)}
    return dict.fromkeys(("wq", "wk"), ((config.head_width, 0.5),))


@dataclass(frozen=True)
class Linear:
    """The widths of a linear of a block. With tensor parallelism, a rank has a part of the outputs of a `column`
    linear, all of a `whole` linear, and a part of the inputs of any other linear.
    """

    name: str
    inputs: int
    outputs: int
    column: bool = True
    whole: bool = False
    tokens: float = 1.0  # fraction of a sample's tokens that the linear multiplies

    def size(self, tp: int) -> float:
        """Return the number of multiplications in this linear on one of `tp` ranks, as a mean over a sample's tokens."""
        return self.tokens * self.inputs * self.outputs / (1 if self.whole else tp)

    def share(self, side: str, tp: int) -> float:
        """Return how many of the `inputs` or `outputs` one of `tp` ranks has."""
        split = not self.whole and self.column is (side == "outputs")
        return getattr(self, side) / (tp if split else 1)


def decoder_linears(config: Model, width: int | None = None) -> tuple[Linear, ...]:
    """Return the linears of a decoder's block in running order: attention with grouped queries, then a gated
    feed-forward of width `width` (None: the model's).
    """
    width = config.ffn_width if width is None else width
    queries, keys = config.n_heads * config.head_width, config.n_kv_heads * config.head_width
    return (
        Linear("wq", config.dim, queries),
        Linear("wk", config.dim, keys),
        Linear("wv", config.dim, keys),
        Linear("wo", queries, config.dim, column=False),
        Linear("w1", config.dim, width),
        Linear("w3", config.dim, width),
        Linear("w2", width, config.dim, column=False),
    )


@dataclass(frozen=True)
class Stack:
    """A sequence of equal blocks that do not belong to a decoder, for predictions: the blocks of a tower before a
    decoder, or one of several kinds of blocks in a model. The attention of these blocks is not causal.
    """

    depth: int
    linears: tuple[Linear, ...]  # the linears of one block, in running order
    parameters: int  # of a block
    kept: float  # elements per token that a block's forward keeps in eager code, without attention's logsumexp and mask
    again: float  # elements of `kept` that compiled code recomputes instead
    backward: float  # elements per token that are alive in a block's backward in addition to `kept`
    # for a tower: the keys of the model section that describe the tower, and the number of its tokens in a sample. A
    # tower is neither compiled nor checkpointed. Every rank of a pipeline's first stage computes the tower on whole
    # samples, with a mask of all pairs of tokens.
    tower: Mapping[str, Any] | None = None
    tokens: int = 0


def place_in_order(name: str, modules: list[str]) -> int | None:
    """Return the position, in the running order `modules`, of the module to which the parameter or part `name` belongs.
    None if there is no such module.
    """
    return next((index for index, module in enumerate(modules) if f"{name}.".startswith(f"{module}.")), None)


def places_of_blocks(modules: list[str]) -> list[int]:
    """Return the positions of the blocks in the running order."""
    return [index for index, module in enumerate(modules) if "." in module]


@dataclass(frozen=True)
class Family:
    """The parts of a model family. A part that needs torch may be given as "package.module:name", which is imported
    only where the part is used.

    All fields but the first three have defaults, which suit a decoder with the modules tok_embeddings, layers, norm and
    output.
    """

    name: str  # the value of model.family
    config: type[Model]  # the dataclass of the family's keys
    model: Callable[..., Any] | str  # (config, seq_len) -> the whole module
    # (Parallelism, Norm, Linears) -> a Plan for tensor parallelism; None: tensor parallelism is refused
    sharding: Callable[..., Any] | str | None = None
    # a models.hf.HuggingFace: Hugging Face's names of the weights, and its config.json; None: conversion is refused
    hf: Any = None
    # (config) -> names of modules in running order; "layers.3" is block 3
    modules: Callable[[Any], list[str]] = decoder_modules
    # (module or stage) -> the blocks by number, which FSDP, checkpointing and compile wrap
    blocks: Callable[[Any], Mapping[str, Any]] = decoder_blocks
    # (config) -> the number of parameters, computed without torch; None: unknown
    parameters: Callable[[Any], int] | None = None
    # (config, seq_len, parameters) -> the FLOPs of a token, forward and backward
    flops: Callable[[Any, int, int], int] | None = decoder_flops
    # (config, seq_len) -> how many keys attention computes for a query, as a mean over a sequence, for plan; None: not
    # known, and predictions of time count `causal_keys` without an error band
    attended: Callable[[Any, int], float] | None = None
    # (Job) -> the bytes per token that a block's forward keeps in eager code, for plan; None: as a decoder of this package
    kept: Callable[[Any], float] | None = None
    # (config) -> a block's linears, for plan and adapters
    linears: Callable[[Any], tuple[Linear, ...]] = decoder_linears
    # (config) -> for each linear beside `sdpa` from which queries or keys are computed: the parts of the rows of one head,
    # as (number of rows, exponent of the head's factor under QK-clip); None: optimizer.qk_clip is refused
    clipped: Callable[[Any], Mapping[str, Sequence[tuple[int, float]]]] | None = None
    # (Job) -> the stacks of blocks outside the decoder, in running order, for plan; None: the model is only a decoder
    stacks: Callable[[Any], tuple[Stack, ...]] | None = None
    # (name of a parameter) -> one of ROLES; the model then computes with the scales of its parametrization (core/models/init.py).
    # None: parametrization=mup is refused
    role: Callable[[str], str] | None = None
    takes: str = "tokens"  # the input of the model: tokens or latents
    # (weights, batch, Job) -> logits [batch, seq, vocab] in float64, for `titan verify`; None: a decoder of this package,
    # which instruments/verify/reference.py computes
    exact: Callable[..., Any] | str | None = None
    # (config) -> the config with the keys that a file says filled in; raises ConfigError. None: all keys are typed
    fill: Callable[[Any], Any] | None = None
    # (Job) -> faults: what the family cannot be combined with
    faults: Callable[[Any], Iterable[Fault]] = lambda job: ()
    pipeline: bool = True  # whether a stage passes only one tensor to the next; False: pipeline parallelism is refused

    def part(self, name: str) -> Any:
        """Return the model, the sharding or the Hugging Face record; it is imported first if it was given by name."""
        return resolve(getattr(self, name))


FAMILIES: Registry[Family] = Registry("model.family")
REGISTRIES[Family] = FAMILIES  # `register` finds the registry of a record by its type


def family_of(config: Model) -> Family:
    """Return the family of a model. Raises ConfigError if there is none of that name."""
    return family_named(config.family)


def family_named(name: Any) -> Family:
    """Return a family by its name. Raises ConfigError if there is none."""
    if name not in FAMILIES:
        raise unknown_family(name).error
    return FAMILIES[name]


def unknown_family(name: Any) -> Fault:
    """Return the fault of a name that no family has."""
    return Fault("model.family", name, "no such model", legal=suggest(str(name), FAMILIES) or tuple(FAMILIES))
