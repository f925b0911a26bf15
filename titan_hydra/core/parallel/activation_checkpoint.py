"""Activation checkpointing: the backward of a block recomputes what its forward did not save.

A block is checkpointed by replacing its class with one whose forward is wrapped; the names of the block and of its
parameters do not change. A block draws no random numbers, so the random state need not be restored. If experts are
compiled, ac=op and ac=lean checkpoint each compiled part separately.

With ac=op and ac=lean, what experts send back to other ranks is neither kept nor computed again, because no backward
reads it: the ranks that receive it keep it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import OpOverload, TorchDispatchMode, functorch_config, operator_names
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.parts import OperatorCheckpoint
from titan_hydra.core.job.config.registry import resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.recomputation import EXCHANGE, kept, mode_of
from titan_hydra.core.kernels import documents, grouped, logits  # noqa: F401 - they register operators that SAVED names

from .compile import compiled_parts
from .experts import sparse_layers
from .mesh import Mesh
from .offload import Host

GROUPED, SENT = "titan_hydra.grouped_matmul", "titan_hydra.sent_grouped_matmul"
MATMULS = ("aten.mm", "aten.addmm", "aten._scaled_mm", GROUPED, SENT)  # addmm is a matmul with bias
SAVED = (  # results that are expensive to recompute, or need communication
    *MATMULS,
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "titan_hydra.attend_documents",
    "titan_hydra.largest_logits",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "aten.max",  # Float8's amax: one number, but computed in a pass over a whole tensor
)
SAVED_OF_EXPERTS = (EXCHANGE,)


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Checkpoint the blocks of a stage, in place. Raises ConfigError for a name in ac.save_ops that this torch does not
    have.

    The mode's record (core/job/config/registry.py) determines which blocks are checkpointed, and what they save in addition to
    their input.
    """
    config, mode, blocks = job.ac, mode_of(job), family_of(job.model).blocks(module)
    functorch_config.activation_memory_budget = mode.budget(config) if mode.budget else 1.0
    every = mode.every(config)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode.contexts:
        options["context_fn"] = resolve(mode.contexts)(config, bool(sparse_layers(module)))
    around = Host().hooks if mode.host else nullcontext
    # equal blocks share one class: the compiler compiles once per class
    classes: dict[tuple[type, str, bool], type] = {}
    for name, block in blocks.items():
        if every == 0 or int(name) % every:
            continue
        sparse = bool(sparse_layers(block))
        options_of_method, methods = options, [(block, "forward")]
        if sparse and "context_fn" in options and job.compile.name != "off":
            # No policy may wrap compiled parts: inductor's code reuses memory, which would overwrite tensors that the
            # policy saved. So each part is checkpointed by itself.
            methods = list(compiled_parts(block))
        elif sparse:
            options_of_method = options | {"context_fn": partial(keeping, options.get("context_fn"))}
        for owner, method in methods:
            key = (type(owner), method, sparse)
            if key not in classes:
                classes[key] = checkpointed(type(owner), method, options_of_method, around)
            owner.__class__ = classes[key]


def checkpointed(
    kind: type[nn.Module], method: str, options: dict[str, Any], around: Callable[[], AbstractContextManager]
) -> type[nn.Module]:
    """Return a subclass of the same name whose method `method` is checkpointed, in a context of `around`.

    Compiled code saves its inputs by itself, where no context sees them. So with a context, only what is checkpointed is
    compiled.
    """
    plain = getattr(kind, method)
    inside = {} if around is nullcontext or hasattr(kind, "compiled") else {"plain": plain, "compiled": ("plain",)}

    def forward(self, *args, **kwargs):
        with around():
            return checkpoint(self.plain if inside else partial(plain, self), *args, **options, **kwargs)

    # a code object of its own, as the compiler limits the number of compilations of each
    forward.__code__ = forward.__code__.replace(co_name=f"{kind.__name__}_{method}")
    return type(kind.__name__, (kind,), {method: forward, "__module__": kind.__module__} | inside)


def every_matmul(config: OperatorCheckpoint, sparse: bool) -> Callable[[], tuple]:
    """Return the context_fn of ac=lean, which saves the results of all listed operators."""
    return partial(selective_contexts, _saved(config, sparse), False)


def every_second_matmul(config: OperatorCheckpoint, sparse: bool) -> Callable[[], tuple]:
    """Return the context_fn of ac=op, which saves the results of the listed operators, but only every second matmul."""
    return partial(selective_contexts, _saved(config, sparse), True)


def _saved(config: OperatorCheckpoint, sparse: bool) -> frozenset:
    saved = operators(config.save_ops or (SAVED + SAVED_OF_EXPERTS if sparse else SAVED))
    if operators((EXCHANGE,)) <= saved:  # the received rows are kept
        return frozenset(saved - operators((SENT,)))
    return frozenset(saved | operators((SENT,)) if operators((GROUPED,)) <= saved else saved)


def keeping(others: Callable[[], tuple] | None) -> tuple:
    """Return a context for a forward and one for its recomputation, in which `keep` works. Both enclose the contexts
    that `others` returns. If these save received rows, the recomputation does not compute the rows that are sent.
    """
    forward, again = others() if others else (nullcontext(), nullcontext())
    if isinstance(others, partial) and others.func is selective_contexts and operators((EXCHANGE,)) <= others.args[0]:
        again = both(Unsent(), again)
    return tuple(both(*pair) for pair in zip(kept(), (forward, again), strict=True))


@contextmanager
def both(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    """Enter two contexts."""
    with first, second:
        yield


def selective_contexts(saved: frozenset, alternate: bool) -> tuple:
    """Return the contexts of one block's forward and of its recomputation. All matmuls are saved or, if `alternate`,
    every second one, beginning with the first.

    Forward and recomputation count matmuls separately, because torch before 2.13 calls the policy again in the
    recomputation.
    """
    matmuls = operators(MATMULS)
    counts: Counter[bool] = Counter()

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in matmuls:
            counts[context.is_recompute] += 1
            if alternate and counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Unsent(TorchDispatchMode):
    """Replaces the products that experts send to other ranks by uninitialized tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = operators((SENT,))

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator in self.sent:
            rows, weights, *_ = args
            return rows.new_empty(len(rows), weights.shape[1])
        return operator(*args, **(kwargs or {}))


def operators(names: Iterable[str]) -> set[OpOverload]:
    """Return the operators for names such as aten.mm (all its overloads) or aten.max.default. Raises ConfigError for an
    unknown name.
    """
    overloads_found = set()
    for name in names:
        namespace, operator, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is None or not set(overload) <= set(packet.overloads()):
            known = [known.replace("::", ".") for known in operator_names()]
            raise ConfigError(
                f"ac.save_ops={name}: this torch has no such operator; nearest legal: "
                f"{' or '.join(difflib.get_close_matches(name, known, n=2, cutoff=0))}"
            )
        overloads_found |= {getattr(packet, name) for name in overload or packet.overloads()}
    return overloads_found
