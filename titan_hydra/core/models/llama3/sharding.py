"""How tensor parallelism splits Llama 3."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.parallel.plans import Linears, Plan
from titan_hydra.core.parallel.whole import Norm


def plan(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Megatron's split (arXiv 1909.08053): heads and feed-forward width are split over ranks, and each half of a
    block ends with a sum over ranks.

    With sequence parallelism (arXiv 2205.05198), each rank has 1/tp of the sequence in the residual stream and the
    norms. Each sum then becomes a reduce-scatter and an all-gather, with the same number of bytes in total. Embedding
    and head split the vocabulary. Like the matmuls around them, sums are in the compute dtype: with bf16, they round
    once for each rank.
    """
    residual = Shard(1) if config.sequence_parallel else Replicate()
    logits = Shard(-1) if config.loss_parallel else Replicate()
    return Plan(
        around={
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
            "norm": norm,
            "output": ColwiseParallel(
                input_layouts=residual, output_layouts=logits, use_local_output=not config.loss_parallel
            ),
        },
        block={
            "attention_norm": norm,
            # The input is gathered once for wq, wk and wv. Positions and documents are whole on every rank.
            "attention": linears.prepare(
                input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
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
