"""Predict the peak of a device's memory from the job's configuration. The peak is a sum of terms. A term is either
counted from the shapes of tensors, or fitted to measurements.

The peak of a step is at one of a few moments: at the loss, when all activations are alive; in the backward of the last
or the first block; or in the update. docs/plan.md has the formulas and their errors; tests/core/train/test_tracker.py
compares the formulas with counts in the fake world.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_hydra.core.job.config.attention import call_of
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import GIB
from titan_hydra.core.job.ranks import has_ring, rotation
from titan_hydra.core.job.recomputation import ATTENTION, EXCHANGE, mode_of, saves
from titan_hydra.core.job.schedules import in_flight

from .shape import Shape, shape_of

SAVED = "saved activations"  # name of the term that activation checkpointing changes
# number of tensors that a rank with several stages is assumed to receive early; the true number is 1 to 4, depending on
# schedule and rank (pp 4 and 8)
EARLY = 2
CHUNK = 2**24  # number of elements that an update of split masters joins at a time (core/kernels/split_masters.py)
BUCKET = 2**24  # elements whose states an update brings to the device together (core/train/offloaded.py)
LOGITS = 2**24  # number of logits that QK-clip computes at a time (core/kernels/logits.py)
BAND = 0.10  # relative half-width of the error band: none of the paper's 18 rows has a larger error


@dataclass(frozen=True)
class Term:
    """One summand of the peak."""

    name: str
    bytes: float
    tag: str = "counted"  # "counted" (from shapes of tensors) or "fitted" (to measurements)


# a moment of a step: the number of parameters that already have a gradient, and the terms of temporary memory
Moment = tuple[float, list[Term]]


@dataclass(frozen=True)
class Peak:
    """The memory of the rank that needs the most, at the moment at which it needs the most."""

    rank: int  # global rank of the fullest rank; the other ranks of its pipeline stage hold as much
    pipeline_rank: int
    terms: tuple[Term, ...]
    live: float  # largest number of bytes of live tensors, perhaps at another moment than that of `terms`

    @property
    def gib(self) -> float:
        """The GiB that the allocator reserves."""
        return sum(term.bytes for term in self.terms) / GIB

    @property
    def allocated_gib(self) -> float:
        """The GiB of live tensors."""
        return self.live / GIB

    @property
    def largest(self) -> Term:
        """The largest term other than the reserve."""
        return max((term for term in self.terms if term.name != "reserve"), key=lambda term: term.bytes)


@dataclass(frozen=True)
class Constants:
    """Constants that are fitted, or that had other values in older versions of torch. Tests against the paper's tables
    use the older values.
    """

    # ratio of reserved to live bytes of temporary memory: fitted to one H200 with torch 2.11; on the paper's ranks
    # (2024) it was 1.17
    reserve: float = 1.05
    logits: float | None = None  # bytes per logit at the loss; if None, `_head` counts them
    # bytes per logit in each of the two copies of the logits of all microbatches, which older pipeline schedules kept
    kept_logits: float = 0
    # whether a stage allocates the inputs of all microbatches at once, as torch's own pipeline stage does
    all_received: bool = False


# of memory that TorchTitan holds and this trainer does not: the pools of several streams at an eager loss (docs/plan.md),
# and the inputs of torch's own pipeline stages. The first element is without tensor parallelism, the second with it.
TORCHTITAN = tuple(Constants(reserve=1.17, logits=logits, all_received=True) for logits in (12, 16))


def peak(job: Job, constants: Constants = Constants(), shape: Shape | None = None) -> Peak:
    """Predict the memory of a frozen job on the rank that needs most memory. Raises NotPredictable."""
    shape = shape or shape_of(job)
    ranks = len(shape.stages)
    # candidates for the fullest rank: the first, the last, and an inner rank with the most blocks
    likely = sorted({0, 1 % ranks, ranks // 2, max(ranks - 2, 0), ranks - 1})
    return max((_of_rank(shape, rank, constants) for rank in likely), key=lambda of_rank: of_rank.gib)


def _of_rank(shape: Shape, rank: int, constants: Constants) -> Peak:
    """Return the terms of one pipeline rank at the moment at which it needs the most memory."""
    world, parameters = shape.job.parallelism, sum(map(shape.parameters, shape.stages[rank]))
    trained, share, of_gradient = (
        shape.trained(shape.stages[rank]),
        shape.stored / shape.shards,
        shape.gradient / shape.shards,
    )
    copied = shape.job.optimizer.masters == "whole" and not shape.wrapped and shape.used != shape.stored
    copies = trained * shape.used if copied else 0
    # frozen weights are in the compute dtype, and have no gradients or optimizer state
    frozen = parameters * shape.used / shape.shards if shape.adapter else 0
    always = [
        Term("weights", trained * share + frozen),
        Term("optimizer", 0 if shape.job.optimizer.offload else state_bytes(shape, rank)),
        Term("weight copies", copies),
    ]
    moments = [
        (having * of_gradient * shape.learned, sum(term.bytes for term in moving), moving)
        for having, moving in _moments(shape, rank, parameters, constants)
    ]
    live = max(gradients + size for gradients, size, _ in moments)
    # FSDP allocates gradients on the stream that reduces them, and the allocator keeps memory of one stream apart from
    # that of another, so all gradients count at every moment. Without FSDP, gradients take the memory of activations
    # that the backward has freed.
    if shape.wrapped:
        moments = [(trained * of_gradient, size, moving) for _, size, moving in moments]
    gradients, size, moving = max(moments, key=lambda moment: moment[0] + moment[1])
    reserve = Term("reserve", (constants.reserve - 1) * size, "fitted")
    terms = [*always, Term("gradients", gradients), *moving]
    return Peak(
        rank * world.dp_replicate * world.dp_shard * world.cp * world.tp,
        rank,
        (*(term for term in terms if term.bytes), reserve),
        live + sum(term.bytes for term in always),
    )


def _moments(shape: Shape, rank: int, parameters: float, constants: Constants) -> Iterator[Moment]:
    """Yield the moments at which a rank's memory can be at its peak.

    The backward goes from the last block to the first. It frees saved activations and allocates gradients. In the
    second and later local batches, the gradients are already allocated. In a pipeline, there are two such moments: when
    the activations of all microbatches in flight are alive and, during the last microbatch, when all gradients are.
    """
    stages, pp, end = shape.stages[rank], len(shape.stages) > 1, len(shape.layers) - 1
    whole = shape.gathered_parameters(stages)
    before = parameters if shape.rounds > 1 or (pp and not shape.wrapped) else 0
    flying = in_flight(shape.job, rank, shape.layers)
    saved_of_block, others = saved(shape), _between_stages(shape, rank, constants)
    # microbatches in flight on the first stage
    started = in_flight(shape.job, rank, (1, *[0] * end)).most if 0 in stages else 0
    earlier = started * sum(stack.layers[0] * saved(stack) for stack in shape.before)
    late = PIPELINE_SCHEDULES[shape.job.pp_schedule.name].late
    if end in stages:
        for head in _head(shape, rank, constants):
            yield (
                before,
                [
                    Term(SAVED, flying.at_end * saved_of_block + earlier),
                    *others,
                    *_unsharded(shape, whole, None, not late),
                    *head,
                ],
            )
    # bytes of the gradients of the outputs and of the weights of a block's linears
    of_block = shape.used * (shape.tokens * sum(shape.outputs(shape.sequence)) + shape.whole)
    postponed = Term("postponed gradients", flying.postponed * of_block)
    for block in _block(shape):
        block += [postponed, _largest_logits(shape)]
        first = [
            Term(SAVED, (flying.most - 1) * saved_of_block + earlier),
            *others,
            *_unsharded(shape, whole, shape.head, not late),
            *block,
        ]
        last = [Term(SAVED, earlier), *others, *_unsharded(shape, whole, shape.whole, True), *block]
        yield before or (0 if pp else shape.head), first
        yield before or (0 if pp else parameters - shape.block - shape.embedding), last
    if 0 in stages:
        yield from _of_earlier_stacks(shape, before, parameters, others)
    joined = Term("update", 12 * min(CHUNK, parameters / shape.shards))
    update = [joined] if shape.job.optimizer.masters == "split" else []
    yield parameters, update + ([_updated(shape, rank)] if shape.job.optimizer.offload else [])


def state_bytes(shape: Shape, rank: int) -> float:
    """Return the bytes of a pipeline rank's states of the optimizer, on one device."""
    return shape.trained(shape.stages[rank]) * shape.stored / shape.shards * shape.moments


def _updated(shape: Shape, rank: int) -> Term:
    """Return the states that are on the device together with optimizer.offload: those of three groups of parameters. The
    largest has the embedding or the head, and each other one at most BUCKET elements and a matrix of a block.
    """
    tp = shape.job.parallelism.tp
    matrix = shape.block / 3 if shape.experts else max(one.size(tp) for one in shape.linears)
    largest = max(shape.embedding, shape.head, matrix) / shape.shards
    elements = max(largest, BUCKET) + 2 * (BUCKET + matrix / shape.shards)
    return Term("states in the update", min(elements * shape.stored * shape.moments, state_bytes(shape, rank)))


def _largest_logits(shape: Shape) -> Term:
    """Return the memory in which QK-clip computes logits: a chunk of them, and the keys of the whole sequence."""
    job = shape.job
    if job.optimizer.qk_clip is None:
        return Term("largest logits", 0)
    logits = shape.tokens * job.data.seq_len * job.model.n_heads / job.parallelism.tp
    keys = shape.used * shape.tokens * shape.keys * job.parallelism.cp if job.parallelism.cp > 1 else 0
    return Term("largest logits", 4 * min(LOGITS, logits) + 2 * keys)


def _of_earlier_stacks(shape: Shape, before: float, parameters: float, others: list[Term]) -> Iterator[Moment]:
    """Yield the moments at which memory can be at its peak in the stacks of blocks that run before `shape`: the
    backward of each stack's last block and of its first block. All parameters of a tower are gathered together, and all
    its gradients are reduced together.
    """
    done, left = parameters - shape.embedding, sum(stack.layers[0] * stack.block for stack in shape.before)
    for index, stack in reversed([*enumerate(shape.before)]):
        depth, saved_of_block = stack.layers[0], saved(stack)
        earlier = sum(earlier_stack.layers[0] * saved(earlier_stack) for earlier_stack in shape.before[:index])
        tower = stack.stack is not None and stack.stack.tower is not None
        unit = replace(stack, block=stack.block * depth) if tower else stack
        (block,) = _block(stack)
        for alive, having in ((depth - 1, done - left), (0, done - left + (depth - 1) * stack.block)):
            reduced = unit.block if tower and alive == 0 else 0 if tower else stack.block
            # in the backward of the model's very first block, no earlier block is left whose weights could be
            # prefetched
            blocks = 1 if tower or (alive == 0 and index == 0) else 2
            weights = _unsharded(unit, unit.block, reduced, True, blocks)
            yield before or having, [Term(SAVED, earlier + alive * saved_of_block), *others, *weights, *block]
        left -= depth * stack.block


def _unsharded(shape: Shape, parameters: float, reduced: float | None, summed: bool, blocks: int = 2) -> list[Term]:
    """Return the gathered parameters and the gradients that are not yet reduced, in the backward of a block or, if
    `reduced` is None, at the loss.

    ZeRO-3 holds the gathered weights of `blocks` blocks, and the gradients of `reduced` parameters until these
    gradients are reduced. A pipeline (ZeRO-2) holds all gathered weights of the rank and, if `summed`, the sum of the
    gradients of earlier microbatches.
    """
    job, of_last_block = shape.job, shape.used * shape.whole * shape.learned
    if not shape.wrapped:
        return []
    if job.parallelism.pp > 1:
        earlier = shape.reduced * parameters * shape.learned if shape.microbatches > 1 and summed else 0
        gradients = earlier if reduced is None else earlier + of_last_block
        return [Term("gathered weights", shape.gathered * parameters), Term("unsharded gradients", gradients)]
    stays_gathered = job.parallelism.reshard_after_forward == "never" or job.parallelism.backend == "simple_fsdp"
    # a tied embedding belongs to the root module, which stays gathered
    tied = 0 if shape.head else shape.used * shape.embedding
    if reduced is None:
        # the fused loss runs before the all-gather's buffer is freed
        heads = 2 if shape.fused_loss else 1
        weights = shape.used * shape.head * heads + tied
        return [Term("gathered weights", shape.gathered * parameters if stays_gathered else weights)]
    weights = shape.gathered * parameters if stays_gathered else blocks * shape.gathered * shape.whole + tied
    return [
        Term("gathered weights", weights),
        Term("unsharded gradients", shape.reduced * reduced * shape.learned + of_last_block),
    ]


def saved(shape: Shape) -> float:
    """Return the bytes that a block's forward keeps on the device for one microbatch. Their number depends on activation
    checkpointing.
    """
    job, tp, used = shape.job, shape.job.parallelism.tp, shape.used
    dim, width, mode = shape.residual, shape.ffn_width, mode_of(job)
    everything = used * (2 * dim + _norms(shape) + _heads(shape) + 3 * width) + _attention(shape)
    if shape.fused_casts:  # the backward computes the norms, the activation and the casts again
        everything -= used * (_norms(shape) + width)
    elif shape.stack:
        everything = used * (
            shape.stack.kept - shape.stack.again * shape.compiled + _mask(shape) / shape.tokens
        ) + _attention(shape)
    elif (
        shape.compiled and shape.format and shape.fast_linears and tp == 1
        # the compiler keeps the outputs of both norms and the input of w2 in the number format instead of the compute dtype
    ):
        everything -= (2 * dim + width) * (used - shape.format.bytes)
    count = family_of(job.model).kept
    counted = count(job) if count else None  # also where it is not used, as a family may refuse a model here
    if counted and tp == 1 and not shape.compiled and not shape.stack:
        everything = counted
    elif (
        not shape.compiled and not shape.stack and not shape.fused_casts
    ):  # eager code keeps the result of the activation function and the float mask; compiled code computes them again
        everything += used * (width + _mask(shape) / shape.tokens)
    everything += shape.experts.everything if shape.experts else 0
    if mode.host:
        return 0
    if not mode.contexts:
        return shape.tokens * ((1 - shape.whole_again) * everything + shape.whole_again * used * dim)
    # A row-parallel linear keeps its output after the sum over ranks and, in eager code, also its output before the
    # sum.
    both = tp > 1 and not shape.compiled
    outputs = shape.outputs(1 if both else shape.sequence)
    matmuls = sum(width for width, is_kept in zip(outputs, shape.kept, strict=True) if is_kept)
    attention = used * shape.values + 4 * job.model.n_heads / tp if saves(job, *ATTENTION) else 0
    # scores and indices, and the rows that have arrived: the experts' inputs and, in place of their outputs, their results
    routed = 12 * shape.experts.rows + shape.experts.sent * shape.received if shape.experts else 0
    if shape.in_parts and len(shape.linears) == shape.after:
        # The norm before the feed-forward is in no part, so its output is kept. Of a model with shared experts, `matmuls`
        # has their output, which is as wide and is not kept.
        routed += used * dim
    return shape.tokens * (used * (dim + (2 * dim if both else 0) + matmuls) + attention + routed)


def input_bytes(shape: Shape) -> float:
    """Return the bytes of a block's input for one microbatch."""
    return shape.tokens * shape.used * shape.residual


def on_the_host(job: Job) -> float:
    """Return the bytes of pinned host memory that a device needs: for the inputs of its blocks with ac=offload, and for
    the states of its optimizer with optimizer.offload.
    """
    if not (mode_of(job).host or job.optimizer.offload):
        return 0
    shape = shape_of(job)
    ranks = range(len(shape.stages))
    inputs = [in_flight(job, rank, shape.layers).most * input_bytes(shape) * mode_of(job).host for rank in ranks]
    return max(size + state_bytes(shape, rank) * job.optimizer.offload for rank, size in enumerate(inputs))


def _norms(shape: Shape) -> float:
    """Return the elements per token in the outputs of a block's two norms. With tensor parallelism, the gathered
    outputs are counted, which the linears read.
    """
    dim = shape.job.model.dim
    if shape.job.parallelism.tp == 1:
        return 2 * dim
    return shape.halves * dim * shape.sent / shape.used + (2 - shape.halves) * shape.residual


def _heads(shape: Shape) -> float:
    """Return the elements per token in queries, keys, values and attention's output. The count includes tensors from
    which queries and keys are computed: latents, or queries and keys before their norms.
    """
    before = 2 * shape.latents
    if shape.job.model.qk_norm:
        before += shape.queries + shape.keys
    return shape.queries + shape.keys * (1 + shape.values / shape.queries) + shape.values + before


def _attention(shape: Shape) -> float:
    """Return the bytes per token that attention keeps in addition to queries, keys, values and output: the logsumexp
    and, if context parallelism changes the output's layout, a second copy of the output.
    """
    layout = shape.job.parallelism
    second = shape.used * shape.queries if layout.cp > 1 else 0
    return 4 * shape.job.model.n_heads / layout.tp + second


def _mask(shape: Shape) -> float:
    """Return the bytes of a microbatch's attention mask, which separates documents or, in a vision tower, images. All
    attention kernels need the mask, except the flash kernel in half precision.
    """
    tower = shape.stack is not None and shape.stack.tower is not None
    return shape.samples * shape.job.data.seq_len**2 if tower or call_of(shape.job).masked else 0


def _between_stages(shape: Shape, rank: int, constants: Constants) -> list[Term]:
    """Return the terms for the masks of all microbatches in flight and, in a pipeline, for the tensors between stages:
    inputs that arrive before their turn, and outputs that a stage keeps until their backward. The inputs of
    microbatches in flight are not counted here, because they are saved activations of the first block.
    """
    job, last = shape.job, len(shape.layers) - 1
    number = in_flight(job, rank, (1,) * len(shape.layers)).most
    # in eager code without recomputation, each block has its own mask, which `saved` counts
    shared = shape.compiled or shape.recomputes
    terms = [Term("masks", _mask(shape) * number)] if shared else []  # a mask has one byte per element
    if mode_of(job).host:  # the input of the block whose backward runs, and the next one on its way
        received = in_flight(job, rank, (0,) + (1,) * last).most  # torch's pipeline stage keeps what it has received
        terms.append(Term("inputs from the host", (2 + received) * input_bytes(shape)))
    terms += [Term("masks", number * sum(map(_mask, shape.before)))] if 0 in shape.stages[rank] else []
    if last:
        message = shape.tokens * shape.used * shape.residual
        early = EARLY if job.pp_schedule.stages_per_rank > 1 else 1
        # every stage except the first receives inputs, and every stage except the last receives gradients
        if constants.all_received:
            sides = sum(1 if stage in (0, last) else 2 for stage in shape.stages[rank])
            early = sides * shape.microbatches
        terms += [Term("early receives", early * message), Term("stage outputs", number * message)]
    return terms


def _head(shape: Shape, rank: int, constants: Constants) -> Iterator[list[Term]]:
    """Yield the memory of the head and the loss: several copies of the logits. For the fused loss, yield the terms of
    two moments: when a chunk's logits exist beside the gradients of earlier chunks, and when the gradients are scaled.
    """
    job, tokens, last = shape.job, shape.tokens * shape.job.model.predictions, len(shape.layers) - 1
    tp, dim = job.parallelism.tp > 1, shape.residual
    waiting = in_flight(job, rank, (0,) * last + (1,)).most
    around = waiting * shape.used * tokens * (dim + (job.model.dim if tp else dim))
    if shape.fused_loss:
        weight = job.model.vocab_size * job.model.dim / job.parallelism.tp
        hidden = shape.used * tokens * job.model.dim
        each, weights = 4 * weight, waiting  # with several chunks, their products are summed in float32
        if job.loss.chunk_tokens >= tokens:  # with a single chunk, its product already is the weight's gradient
            each, weights = shape.used * weight, waiting - 1
        gradients = Term("head's gradient", weights * each + waiting * hidden)
        # the logits of a chunk, and the part that the chunk adds to the weight gradient of the head
        chunk = shape.used * (min(job.loss.chunk_tokens, tokens) * shape.vocabulary + weight)
        yield [Term("head and loss", chunk + around), gradients]
        yield [Term("head and loss", shape.used * weight + around), Term("head's gradient", waiting * (each + hidden))]
        return
    logits = tokens * shape.vocabulary
    split = tp and job.parallelism.loss_parallel
    each = constants.logits or (16 if split else 6 if shape.compiled else 12)
    if last and shape.compiled and not split:  # pipeline stages keep their outputs until the backward
        each += (waiting - 1) * shape.used
    elif last:  # eager code and loss parallel have one more copy of the logits: the softmax in float32
        each += shape.used + (waiting - 1) * (shape.used + 4)
    kept_logits = [Term("kept logits", 2 * constants.kept_logits * logits * shape.microbatches)] if last else []
    yield [Term("head and loss", each * logits + around), *kept_logits]


def _block(shape: Shape) -> Iterator[list[Term]]:
    """Yield the memory of one block's backward at two moments: in the feed-forward, and in ring attention. This memory
    has the block's activations (saved or recomputed) and its gradients. Ring attention sums the gradients of queries,
    keys and values in float32, and has buffers for the keys and values that it passes on.
    """
    layout, used, queries, keys = shape.job.parallelism, shape.used, shape.queries, shape.keys
    if shape.stack:
        elements = shape.stack.kept - shape.stack.again * shape.compiled + shape.stack.backward
        yield [Term("block's backward", shape.tokens * (used * elements + _attention(shape)) + used * _mask(shape))]
        return
    width = (5 if shape.compiled else 6) * shape.ffn_width
    feed_forward = used * (4 * shape.residual + _norms(shape) + _heads(shape) + width) + _attention(shape)
    if shape.experts:
        mode = mode_of(shape.job)
        again = not saves(shape.job, EXCHANGE) if mode.contexts else mode.budget is None and shape.whole_again > 0
        feed_forward += shape.experts.everything + shape.experts.backward(again)
    yield [Term("block's backward", shape.tokens * feed_forward + used * _mask(shape))]
    if has_ring(shape.job):
        attention = used * (3 * shape.residual + _norms(shape) / 2 + 5 * queries + 4 * keys) + _attention(shape)
        parts = layout.cp if rotation(shape.job).gathers else 1
        ring = (4 + used) * (queries + 2 * keys) + 2 * used * keys * parts + 24 * keys
        yield [Term("block's backward", shape.tokens * attention), Term("ring attention", shape.tokens * ring)]
