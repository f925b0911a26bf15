"""The peak of a device's memory, from a job alone: a table of terms, each counted from shapes or fitted to measurements.

A step has two moments that can be its peak: the loss of the last stage, with all activations alive, and the backward of one block. The
formulas and the runs that they were fitted to are in docs/plan.md.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from titan_hydra.config.rules.memory import GIB
from titan_hydra.config.schema import Job

from .schedules import in_flight
from .shape import Shape, shape_of

BAND = 0.10  # half-width of the error band, relative: of the paper's 18 rows none is further off


@dataclass(frozen=True)
class Term:
    """A part of the peak."""

    name: str
    bytes: float
    tag: str = "counted"  # or fitted


@dataclass(frozen=True)
class Peak:
    """The memory of the fullest rank at its fullest moment."""

    rank: int  # of the world; others with the same pipeline rank hold as much
    pipeline_rank: int
    terms: tuple[Term, ...]

    @property
    def gib(self) -> float:
        """What the allocator reserves, GiB."""
        return sum(term.bytes for term in self.terms) / GIB

    @property
    def allocated_gib(self) -> float:
        """What live tensors take, GiB."""
        return self.gib - next(term.bytes for term in self.terms if term.name == "reserve") / GIB

    @property
    def largest(self) -> Term:
        """The term that limits the job, beside the reserve."""
        return max((term for term in self.terms if term.name != "reserve"), key=lambda term: term.bytes)


@dataclass(frozen=True)
class Constants:
    """What is fitted, or was otherwise in older versions of torch. The tests of the paper's tables change the latter."""

    reserve: float = 1.10  # of what comes and goes: 1.14 on the paper's ranks of 2024, 1.0 to 1.05 on one H200 with torch 2.11
    eager: float = 24  # bytes of a token and width of the residual stream that eager blocks hold beside what is counted
    logits: float | None = None  # bytes of a logit at the loss; None: as counted here
    kept_logits: float = 0  # bytes of a logit that older pipeline schedules kept of all microbatches, twice


def peak(job: Job, constants: Constants = Constants(), shape: Shape | None = None) -> Peak:
    """Predict the memory of a frozen job's fullest rank. Raises NotPredictable."""
    shape = shape or shape_of(job)
    ranks = len(shape.stages)
    likely = sorted({0, 1 % ranks, ranks // 2, max(ranks - 2, 0), ranks - 1})  # ends, and inner ranks, which have the most blocks
    return max((_of_rank(shape, rank, constants) for rank in likely), key=lambda found: found.gib)


def _of_rank(shape: Shape, rank: int, constants: Constants) -> Peak:
    """Return the terms of one pipeline rank at the larger of its two moments."""
    stages, job = shape.stages[rank], shape.job
    parameters = sum(map(shape.parameters, stages))
    last = len(shape.layers) - 1 in stages
    trained = shape.trained(stages)
    always = _states(shape, parameters, trained)
    kept = _kept(shape, rank)
    at_loss = [*kept, *_unsharded(shape, parameters, trained, at_loss=True), *(_head(shape, rank, constants) if last else ())]
    in_backward = [*kept, *_unsharded(shape, parameters, trained, at_loss=False), *_block(shape)]
    moving = max(at_loss, in_backward, key=lambda terms: sum(term.bytes for term in terms))
    if not shape.compiled:
        moving.append(Term("eager temporaries", constants.eager * shape.tokens * job.model.dim / shape.sequence, "fitted"))
    reserve = Term("reserve", (constants.reserve - 1) * sum(term.bytes for term in moving), "fitted")
    world = job.parallelism
    return Peak(rank * world.dp_replicate * world.dp_shard * world.cp * world.tp, rank,
                tuple(term for term in (*always, *moving, reserve) if term.bytes or term.name == "reserve"))


def _states(shape: Shape, parameters: float, trained: float) -> list[Term]:
    """Return what lives from step to step: weights, gradients, the optimizer's moments, copies in the compute dtype without FSDP. Under
    adapters the model's own weights are in the compute dtype, and have no more than that.
    """
    share, frozen = trained * shape.stored / shape.shards, parameters * shape.used / shape.shards if shape.adapter else 0
    copies = 0 if shape.wrapped or shape.used == shape.stored else trained * shape.used
    return [Term("weights", share + frozen), Term("gradients", share), Term("optimizer", share * shape.moments),
            Term("weight copies", copies)]


def _unsharded(shape: Shape, parameters: float, trained: float, at_loss: bool) -> list[Term]:
    """Return gathered parameters and gradients that are not reduced yet.

    ZeRO-3 holds two blocks; a pipeline (ZeRO-2) holds all weights, and gradients of all microbatches in float32.
    """
    job, sums = shape.job, shape.used + shape.reduced
    if not shape.wrapped:
        return []
    edge = max(shape.embedding, shape.head) * shape.used
    block = sums * (shape.adapter or shape.block)
    if job.parallelism.pp > 1:
        gradients = shape.reduced * trained * (shape.microbatches > 1) + block
        return [Term("gathered weights", shape.gathered * parameters), Term("unsharded gradients", gradients)]
    kept = job.parallelism.reshard_after_forward == "never" or job.parallelism.backend == "simple_fsdp"
    weights = shape.gathered * parameters if kept else 2 * shape.gathered * shape.block + edge
    if at_loss:
        return [Term("gathered weights", weights + edge)]
    return [Term("gathered weights", weights), Term("unsharded gradients", block + (0 if shape.adapter else edge))]


def saved(shape: Shape) -> float:
    """Return the bytes that the forward of one block keeps for one microbatch, by the mode of activation checkpointing."""
    job, tp, tokens = shape.job, shape.job.parallelism.tp, shape.tokens * shape.used
    dim, ac = job.model.dim / shape.sequence, job.ac
    queries = job.model.n_heads * job.model.head_width / tp
    # The output of a row linear is kept as it is after the sum over ranks.
    outputs = [one.outputs / (tp if one.column else shape.sequence) for one in shape.linears]
    inputs = dim * 3 if tp == 1 else dim + 2 * job.model.dim * shape.sent / shape.used
    everything = inputs + queries + sum(outputs) - dim + job.model.ffn_width / tp  # of w2's input, not of its output
    if shape.compiled and shape.format:  # the compiler keeps the casts of both norms and of w2's input
        everything -= (2 * dim + job.model.ffn_width / tp) * (1 - shape.format.bytes / shape.used) * (tp == 1)
    everything *= 1 if shape.compiled else 1.6  # eager keeps float32 copies of norms and rotary positions: 49.1 against 31.1 bytes
    chosen = {
        "full": dim, "none": everything, "lean": dim + queries + sum(outputs), "op": dim + queries + sum(outputs[::2]),
        "layer": (dim + (ac.every - 1) * everything) / ac.every, "memory_budget": ac.budget * everything + (1 - ac.budget) * dim,
    }
    return tokens * chosen[ac.name]


def _kept(shape: Shape, rank: int) -> list[Term]:
    """Return saved activations of all microbatches in flight and, in a pipeline, the buffers between stages.

    torch allocates receive buffers for all microbatches, forward and backward, and keeps a stage's outputs until their backward.
    """
    terms = [Term("saved activations", in_flight(shape.job, rank, shape.layers) * saved(shape))]
    if shape.job.parallelism.pp > 1:
        message = shape.tokens * shape.used * shape.job.model.dim / shape.sequence
        terms += [Term("receive buffers", 2 * shape.microbatches * len(shape.stages[rank]) * message),
                  Term("stage outputs", in_flight(shape.job, rank, (1,) * len(shape.layers)) * message)]
    return terms


def _head(shape: Shape, rank: int, constants: Constants) -> list[Term]:
    """Return what the head and the loss hold: logits in several forms, or a chunk of them and the gradients computed with it."""
    job, tokens, dim = shape.job, shape.tokens, shape.job.model.dim
    tp, last = job.parallelism.tp > 1, len(shape.layers) - 1
    around = 8 * tokens * dim / shape.sequence + 2 * tokens * dim * tp
    if shape.fused_loss:
        chunk = min(job.loss.chunk_tokens, tokens) * shape.vocabulary * 12
        weight = shape.job.model.vocab_size * dim / job.parallelism.tp
        waiting = in_flight(job, rank, (0,) * last + (1,))
        return [Term("head and loss", chunk + 2 * weight + around), Term("head's gradient", waiting * (4 * weight + 2 * tokens * dim))]
    logits = tokens * shape.vocabulary
    each = constants.logits or (16 if tp and job.parallelism.loss_parallel else 6 if shape.compiled else 12)
    return [Term("head and loss", each * logits + around),
            Term("kept logits", 2 * constants.kept_logits * logits * shape.microbatches * (job.parallelism.pp > 1))]


def _block(shape: Shape) -> list[Term]:
    """Return the temporaries of one block's backward: residual stream, gathered inputs, attention, feed-forward; and the keys and values
    that a ring of context-parallel ranks gathers.
    """
    job, tp, model = shape.job, shape.job.parallelism.tp, shape.job.model
    queries, keys = (heads * model.head_width / tp for heads in (model.n_heads, model.n_kv_heads))
    gathered = 2 * shape.sent * model.dim if tp > 1 else 4 * model.dim
    width = 8 * model.dim / shape.sequence + gathered + 4 * queries + 4 * keys + 10 * model.ffn_width / tp
    if not shape.compiled:
        width += 24 * model.dim / shape.sequence + 4 * model.ffn_width / tp
    ring = job.parallelism.cp * 12 * keys if job.parallelism.cp > 1 and job.parallelism.cp_rotate == "allgather" else 0
    part = partial(Term, "block's backward")
    return [part(shape.tokens * width), Term("gathered keys and values", shape.tokens * ring)]
