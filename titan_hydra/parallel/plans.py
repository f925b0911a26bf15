"""How each model family is split over tensor-parallel ranks: one plan a family, under the name it has in `models.REGISTRY`.

A plan says for each module, by its name in the model or in a block, what happens to its weights and to what goes in and out.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from titan_hydra.config.schema import Parallelism

from .norm import Norm


@dataclass(frozen=True)
class Plan:
    """Styles by module name: of the parts around the blocks, and of every block."""

    around: dict[str, ParallelStyle]
    block: dict[str, ParallelStyle]


@dataclass(frozen=True)
class Linears:
    """The styles that split linears and bring their inputs; another number format brings its own."""

    colwise: type[ParallelStyle] = ColwiseParallel
    rowwise: type[ParallelStyle] = RowwiseParallel
    prepare: type[ParallelStyle] = PrepareModuleInput


def llama3(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Megatron's split (arXiv 1909.08053): heads and feed-forward width over ranks, and each block's two sums over ranks at its ends.

    With sequence parallelism (arXiv 2205.05198) the residual stream and the norms between hold 1/tp of the sequence each, and a
    sum becomes a reduce-scatter, the way in an all-gather: the same bytes. The vocabulary is split in embedding and head. These
    sums are in the compute dtype, as the matmuls around them: under bf16 they round once a rank.
    """
    residual = Shard(1) if config.sequence_parallel else Replicate()
    logits = Shard(-1) if config.loss_parallel else Replicate()
    return Plan(
        around={
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
            "norm": norm,
            "output": ColwiseParallel(input_layouts=residual, output_layouts=logits, use_local_output=not config.loss_parallel),
        },
        block={
            "attention_norm": norm,
            # Gathered once for the three that read it. Positions and mask are whole on every rank.
            "attention": linears.prepare(input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None)),
            "attention.wq": linears.colwise(),
            "attention.wk": linears.colwise(),
            "attention.wv": linears.colwise(),
            "attention.wo": linears.rowwise(output_layouts=residual),
            "ffn_norm": norm,
            "feed_forward": linears.prepare(input_layouts=(residual,), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": linears.colwise(),
            "feed_forward.w3": linears.colwise(),
            "feed_forward.w2": linears.rowwise(output_layouts=residual),
        },
    )


PLANS: dict[str, Callable[[Parallelism, Norm, Linears], Plan]] = {"llama3": llama3}
