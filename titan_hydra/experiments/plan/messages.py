"""The bytes that a rank communicates in a step, by dimension of the mesh. For a collective, the bytes of the whole
tensor are counted.
"""

from __future__ import annotations

from titan_hydra.core.job.ranks import rotation
from titan_hydra.core.job.recomputation import EXCHANGE, mode_of, saves

from .shape import Shape


def of_step(shape: Shape, rank: int) -> dict[str, float]:
    """Return the bytes of a pipeline rank's collectives and messages along each dimension that has several ranks."""
    layout, stages, last = shape.job.parallelism, shape.stages[rank], len(shape.layers) - 1
    times = shape.microbatches * shape.rounds
    blocks, parameters = sum(shape.layers[stage] for stage in stages), sum(map(shape.parameters, stages))
    sparse = blocks - sum(shape.dense[stage] for stage in stages)
    ends = (0 in stages) + (last in stages)
    # a tower's samples are not split by context parallelism
    split = [stack for stack in shape.before if stack.job.parallelism.cp > 1]
    earlier = sum(stack.layers[0] * _context(stack) for stack in split) if 0 in stages else 0
    neighbours = sum(
        other in range(last + 1) and other not in stages for stage in stages for other in (stage - 1, stage + 1)
    )
    sent = {
        "tp": times
        * (
            blocks * sum(tensor(shape)) / (1 if layout.sequence_parallel else 2)
            + ends * _ends(shape)
            + _logits(shape) * (last in stages)
        ),
        "cp": times * (blocks * _context(shape) + earlier),
        "pp": times * 2 * neighbours * shape.tokens * shape.used * shape.residual,
        "ep": times * sparse * _experts(shape),
        "fsdp": shape.rounds * _shards(shape, shape.gathered_parameters(stages) - sparse * shape.alone) * shape.wrapped,
        "dp_replicate": parameters / shape.shards * shape.reduced,
    }
    degrees = {name: getattr(layout, name, shape.shards) for name in sent}
    return {name: size for name, size in sent.items() if degrees[name] > 1}


def tensor(shape: Shape) -> tuple[float, float]:
    """Return the bytes that tensor-parallel ranks gather and reduce-scatter in a block, forward and backward. An
    all-reduce counts as a gather and a reduce-scatter.
    """
    scatter = shape.tokens * shape.job.model.dim * shape.used
    gather = scatter * shape.sent / shape.used
    # how many gathers and reduce-scatters the recomputation in the backward repeats
    gathers, scatters = (
        2 * shape.recomputes,
        int(shape.whole_again == 1),
    )
    once, again = shape.halves * (gather + scatter), shape.halves / 2
    return once, once + again * (gathers * gather + scatters * scatter)


def _ends(shape: Shape) -> float:
    """Return the bytes of the tensor-parallel collectives at the embedding, or at the head."""
    return shape.tokens * shape.job.model.dim * shape.used * (2 if shape.job.parallelism.sequence_parallel else 1)


def _logits(shape: Shape) -> float:
    """Return the bytes of the gathered logits if the loss needs the logits of the whole vocabulary, else 0."""
    whole = not (shape.job.parallelism.loss_parallel or shape.fused_loss)
    return shape.tokens * shape.job.model.vocab_size * shape.used * whole


def _context(shape: Shape) -> float:
    """Return the bytes that context-parallel ranks exchange in a block. A ring exchanges keys and values, and their
    gradients in float32. Ulysses exchanges queries, keys, values and outputs of all heads.
    """
    job, cp = shape.job, shape.job.parallelism.cp
    if not rotation(job).ring:
        return shape.tokens * shape.used * 2 * (shape.queries + shape.keys) * (2 + shape.recomputes)
    rounds = cp if rotation(job).gathers else cp - 1
    return shape.tokens * 2 * shape.keys * (shape.used * rounds * (2 + (shape.whole_again == 1)) + 4 * cp)


def _experts(shape: Shape) -> float:
    """Return the bytes that the ranks of an ep group exchange in a block: tokens that go to their experts, results that
    come back, and the gradients of both.
    """
    return shape.tokens * shape.experts.sent * sum(exchanges(shape)) if shape.experts else 0.0


def exchanges(shape: Shape) -> tuple[int, int]:
    """Return how often a block's experts exchange their rows in the forward, and how often in the backward.
    Recomputation under selective checkpointing exchanges nothing if the received rows were kept.
    """
    again = not saves(shape.job, EXCHANGE) if mode_of(shape.job).contexts else shape.whole_again == 1
    return 2, 2 + 2 * again


def _shards(shape: Shape, parameters: float) -> float:
    """Return the bytes of a local batch's all-gathers of weights and reduce-scatters of gradients. ZeRO-3 gathers all
    weights twice, except the head's weights: the backward begins with the head, whose weights are then still gathered.
    """
    reshard, pp = shape.job.parallelism.reshard_after_forward, len(shape.stages) > 1
    if reshard == "always":
        gathers = 2 * parameters * shape.microbatches
    elif reshard == "never" or pp:
        gathers = parameters
    else:
        gathers = 2 * parameters - (shape.head or shape.embedding)
    return shape.gathered * gathers + shape.reduced * parameters
