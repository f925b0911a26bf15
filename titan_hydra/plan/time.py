"""Predict the seconds of a step from a job and its hardware. These are the computation and the messages of blocks, the
idle time of the pipeline, and the part of FSDP's communication that overlaps with no computation.

Rates come from conf/hardware; `Factors` do not depend on the device. docs/plan.md explains how rates and factors were
fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from titan_hydra.config.attention import KERNELS, call_of, refusal, takes_offsets
from titan_hydra.config.family import Linear
from titan_hydra.config.operation import Hardware
from titan_hydra.config.schema import Job
from titan_hydra.job.pipeline import splits_backward, written_schedule
from titan_hydra.job.ranks import all_ranks, rotation
from titan_hydra.job.recomputation import mode_of
from titan_hydra.job.schedules import actions_of, idle_time, known, play

from . import messages
from .shape import NotPredictable, Shape, shape_of

# relative half-widths of the error band: for a hardware preset that was fitted to runs, and for any other preset
BAND, UNMEASURED = 0.15, 0.20
# bytes of memory traffic per parameter in an update: 28 for AdamW, 8 for the norm (H200: 7.95 and 3.5 ms for 10^9)
TOKEN_BYTES = 36
# bytes per element of a cast to Float8 with one scale: bf16 is read twice (for the maximum, to cast), a byte is written
CAST_BYTES = 5
LATENCY = 0.01  # seconds of a step that no other term includes
OPTIONAL = ("float8_tflops", "flash_tflops", "passes_per_second")  # keys of `hardware` whose values may be null


@dataclass(frozen=True)
class Factors:
    """Factors of the formulas. They were fitted to the paper's tables, unless a comment says otherwise."""

    eager: float = 4.0  # element-wise memory traffic of a block, as a multiple of the count in `_element_wise`
    # the same multiple for compiled code: the lower bound of the fit, as the fitted matmul rates include all other time
    compiled: float = 0.5
    # memory traffic of Float8 casts as a multiple of the count in `_casts` (not fitted; measured on an H200: 2.1)
    cast: float = 2.0
    # ratio of the time of rowwise casts to that of tensorwise casts (measured on an H200: 120 and 56 ms)
    rowwise: float = 2.1
    ring: float = 0.84  # ratio of the rate of ring attention (context parallelism) to the rate of attention on one rank
    memory: float = 0.85  # fraction of the device's memory bandwidth that kernels reach
    # The following were fitted to published rows (`titan plan --score`).
    async_tp: float = 0.8  # fraction of tensor-parallel communication that async TP does not overlap
    # seconds by which a collective delays computation that overlaps with it, for each second that it takes at NVLink's
    # rate
    contention: float = 0.35
    # seconds per node for which a collective waits for its last rank; this time never overlaps with computation
    straggler: float = 23e-6
    message: float = 40e6  # a collective of this size, in bytes, reaches half of its link's rate
    launch: float = 2e-3  # seconds that the host needs to start the kernels of a block's forward in eager mode
    launch_tp: float = 2.0  # factor on `launch` under tensor parallelism, where every operator goes through DTensor
    imbalance: float = 1.6  # largest number of rows that the experts of a rank get, divided by the mean over ranks
    dispatch: float = 0.3  # fraction of a link's rate that the all-to-alls to experts reach


class Pair(NamedTuple):
    """The seconds of a forward and of a backward."""

    forward: float
    backward: float


Passes = dict[str, Pair]  # the passes of a block by kind of work


@dataclass(frozen=True)
class Speed:
    """The speed of a job. `parts` has the seconds that a step spends on each kind of work, averaged over ranks."""

    step_seconds: float
    tokens_per_second: float  # per device
    parts: dict[str, float]

    @property
    def limit(self) -> str:
        """The kind of work, other than matmuls and attention, that takes the most time."""
        others = {name: seconds for name, seconds in self.parts.items() if name not in ("matmuls", "attention")}
        return max(others, key=others.__getitem__)


def speed(job: Job, factors: Factors = Factors(), shape: Shape | None = None, exact: bool = True) -> Speed:
    """Predict the speed of a frozen job. Raises NotPredictable.

    With `exact`, the pipeline's schedule is simulated with the time of each stage; otherwise the idle time is computed
    as if all stages took equally long.
    """
    shape, hardware = shape or shape_of(job), job.hardware
    needed = [spec.name for spec in fields(Hardware) if spec.default is None and spec.name not in OPTIONAL]
    if missing := [name for name in needed if getattr(hardware, name) is None]:
        raise NotPredictable(f"hardware={hardware.name}: has no {missing[0]}, so no time can be predicted")
    if shape.format and hardware.float8_tflops is None:
        raise NotPredictable(f"precision={job.precision.name}: hardware={hardware.name} has no matmuls in this format")
    kinds, head = [(one, block_passes(one, factors)) for one in (*shape.before, shape)], head_passes(shape, factors)
    times, block = shape.microbatches * shape.rounds / len(shape.stages), kinds[-1][1]
    parts = {name: sum(sum(passes[name]) * sum(one.layers) for one, passes in kinds) * times for name in block}
    parts["head and loss"] = sum(head) * shape.microbatches * shape.rounds / len(shape.stages)
    parts["optimizer"] = update = _optimizer(shape, factors)
    if len(shape.stages) > 1:
        parts["pipeline calls"] = _pipeline_calls(shape)
        earlier = [_sum(passes) for one, passes in kinds[:-1] for _ in range(one.layers[0])]
        first = Pair(*map(sum, zip(*earlier, strict=True))) if earlier else Pair(0, 0)
        parts["pipeline idle"] = _span(shape, _sum(block), first, head, exact) * shape.rounds - (
            sum(parts.values()) - update
        )
    parts["FSDP"] = sum(_fsdp(one, factors, _sum(passes)) for one, passes in kinds)
    step = sum(parts.values())
    return Speed(step, job.data.global_batch * job.data.seq_len / all_ranks(job) / step, parts)


def block_passes(shape: Shape, factors: Factors) -> Passes:
    """Return the seconds of one block for one microbatch, by kind of work (docs/plan.md explains the kinds)."""
    matmuls, attention = _matmuls(shape, factors), _attention(shape, factors)
    elements, casts = _element_wise(shape, factors), _float8_casts(shape, factors)
    return {
        "matmuls": matmuls,
        "attention": attention,
        "element-wise": elements,
        "Float8 casts": casts,
        "TP communication": _tensor_parallel(shape, factors),
        "CP communication": _context_parallel(shape, factors, attention),
        "EP communication": _exchange(shape, factors),
        "host": _host(shape, factors, sum(part.forward for part in (matmuls, attention, elements, casts))),
    }


def _sum(passes: Passes) -> Pair:
    return Pair(*map(sum, zip(*passes.values(), strict=True)))


def _matmuls(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of a block's linears and experts. The backward has two matmuls for each matmul of the forward."""
    tp = shape.job.parallelism.tp
    linears = sum(2 * shape.tokens * one.size(tp) / _rate(shape, one) for one in shape.linears)
    once = linears + _experts(shape, factors)
    return Pair(once, (2 + recomputed(shape).matmuls) * once)


def _attention(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of attention's own matmuls: two in the forward, five in the backward."""
    job = shape.job
    pairs = shape.tokens * job.data.seq_len * (1 if shape.causal else 2)
    once = pairs * (shape.queries + shape.values) / _attention_rate(shape, factors)
    return Pair(once, (2.5 + recomputed(shape).attention) * once)


def _element_wise(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of norms, activation functions and sums, computed from their memory traffic."""
    traffic = 2 * shape.tokens * (4 * shape.residual + shape.queries + shape.keys + 2 * shape.ffn_width)
    traffic *= factors.compiled if shape.compiled else factors.eager
    traffic += shape.tokens * shape.experts.traffic if shape.experts else 0
    once = traffic / _bandwidth(shape, factors)
    return Pair(once, (2 + recomputed(shape).rest) * once)


def _float8_casts(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of casts of activations and weights, computed from their memory traffic."""
    weights = _weight_casts(shape, factors)
    inputs, outputs = (
        (casts * shape.tokens + weights) / _bandwidth(shape, factors) for casts in _casts(shape, factors)
    )
    return Pair(inputs, outputs + recomputed(shape).matmuls * inputs)


def _host(shape: Shape, factors: Factors, kernels: float) -> Pair:
    """Return how much longer the host takes to start a forward's kernels than the kernels run (`kernels`), or 0."""
    late = max(_launch(shape, factors) - kernels, 0)
    return Pair(late, (1 + (shape.whole_again or shape.recomputes / 2)) * late)


def _optimizer(shape: Shape, factors: Factors) -> float:
    """Return the seconds of the update, computed from the memory traffic of the rank with the most parameters."""
    parameters = max(map(shape.parameters, range(len(shape.layers)))) * len(shape.stages[0]) / shape.shards
    return parameters * TOKEN_BYTES * (1 + shape.moments) / 3 / _bandwidth(shape, factors) + LATENCY


def _pipeline_calls(shape: Shape) -> float:
    """Return the seconds that a rank spends on starting the passes of a step: two or three for each stage and
    microbatch.
    """
    passes = 3 if splits_backward(shape.job) else 2
    return _call(shape.job) * passes * len(shape.stages[0]) * shape.microbatches * shape.rounds


def _fsdp(shape: Shape, factors: Factors, block: Pair) -> float:
    """Return the seconds by which FSDP's messages delay a step. The computation of a block (`block`) overlaps with the
    messages of the next block. In a pipeline, no computation overlaps with messages.
    """
    job = shape.job
    gather, reduce, replicas = _sharding(shape, factors)
    if len(shape.stages) > 1:
        blocks = max(shape.layers) * len(shape.stages[0])
        return blocks * ((gather + reduce).seconds * shape.rounds + replicas.seconds)
    again = Sent() if job.parallelism.reshard_after_forward == "never" else gather
    shown = gather.behind(block.forward) * shape.rounds + (again + reduce).behind(block.backward) * (shape.rounds - 1)
    shown += (again + reduce + replicas).behind(block.backward)
    return shown * sum(shape.layers) + (gather + again + reduce).seconds * shape.rounds


def _launch(shape: Shape, factors: Factors) -> float:
    """Return the seconds that the host needs to start the kernels of a block's forward. Starting the kernels of a
    backward is not slower, as autograd needs no Python.
    """
    if shape.compiled or shape.job.hardware.passes_per_second:  # a CPU has no kernels to start
        return 0.0
    return factors.launch * (factors.launch_tp if shape.job.parallelism.tp > 1 else 1)


@dataclass(frozen=True)
class Sent:
    """Messages of a rank. `seconds` is how long the link needs for them if nothing else runs. `taken` is how long they
    delay computation that overlaps with them: by waits for other ranks, by occupying multiprocessors, and by copies
    into and out of buffers.
    """

    seconds: float = 0.0
    taken: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.seconds + other.seconds, self.taken + other.taken)

    def __mul__(self, times: float) -> Sent:
        return Sent(self.seconds * times, self.taken * times)

    def behind(self, seconds: float) -> float:
        """Return the seconds by which the messages delay a step if they overlap with `seconds` of computation."""
        return max(self.seconds - seconds, 0) + self.taken


class Again(NamedTuple):
    """The fractions of a block's forward that its backward recomputes."""

    matmuls: float
    attention: float
    rest: float


def recomputed(shape: Shape) -> Again:
    """Return what a block's backward recomputes in the job's mode of activation checkpointing."""
    sizes, mode = shape.sizes, mode_of(shape.job)
    if mode.contexts:
        return Again(1 - sum(sizes[:: mode.matmuls]) / sum(sizes), 0, 1)
    return Again(shape.whole_again, shape.whole_again, shape.whole_again)


def head_passes(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of the head and the loss for one microbatch: (forward, backward). Both passes are counted as
    eager code. The forward has 16 bytes of memory traffic per logit, the backward 20.
    """
    model, tokens = shape.job.model, shape.tokens
    matmul = (
        2 * tokens * model.vocab_size * model.dim / shape.job.parallelism.tp / (shape.job.hardware.bf16_tflops * 1e12)
    )
    logits = tokens * shape.vocabulary * 4 / _bandwidth(shape, factors)
    return Pair(matmul + 4 * logits, 2 * matmul + 5 * logits)


def _experts(shape: Shape, factors: Factors) -> float:
    """Return the seconds of the experts' matmuls in one forward of a microbatch. They reach low FLOP/s, as an expert
    has few rows.
    """
    if not shape.experts:
        return 0.0
    hardware, rows = shape.job.hardware, shape.tokens * shape.experts.rows
    smallest = min(rows * shape.experts.ep / shape.experts.number, shape.experts.dim, shape.experts.width)
    rate = hardware.bf16_tflops * 1e12 * smallest / (smallest + hardware.small_matmul) / (shape.used / 2)
    return _imbalance(shape, factors) * 6 * rows * shape.experts.dim * shape.experts.width / rate


def _imbalance(shape: Shape, factors: Factors) -> float:
    """Return the largest number of rows that the experts of a rank get, divided by the mean over all ranks."""
    return 1.0 if shape.job.debug.balance_experts else factors.imbalance


def _exchange(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of the all-to-alls to the experts and back. It is assumed that each device has its own NIC."""
    if not shape.experts or shape.experts.ep == 1:
        return Pair(0.0, 0.0)
    hardware, ep = shape.job.hardware, shape.experts.ep
    near = min(ep, hardware.gpus_per_node)
    share = max((near - 1) / ep / (hardware.nvlink_gbs * 1e9), (ep - near) / ep / (hardware.nic_gbs * 0.9e9))
    share *= _imbalance(shape, factors) / factors.dispatch
    return Pair(*(shape.tokens * shape.experts.sent * times * share for times in messages.exchanges(shape)))


def _bandwidth(shape: Shape, factors: Factors) -> float:
    return shape.job.hardware.memory_tbs * 1e12 * factors.memory


def _rate(shape: Shape, linear: Linear) -> float:
    """Return the FLOP/s of a linear on one rank. They are lower for small matrices, such as those that tensor
    parallelism splits.
    """
    tp, hardware, precision = shape.job.parallelism.tp, shape.job.hardware, shape.job.precision
    smallest = min(shape.tokens, linear.share("inputs", tp), linear.share("outputs", tp))
    fast = shape.format and linear.name not in precision.skip
    top, half = (
        (hardware.float8_tflops, hardware.small_float8) if fast else (hardware.bf16_tflops, hardware.small_matmul)
    )
    return top * 1e12 * smallest / (smallest + half) * (1 if precision.compute_dtype == "bfloat16" else 0.5)


def _attention_rate(shape: Shape, factors: Factors) -> float:
    """Return the FLOP/s of attention. torch's flash kernel has its own rate. Ring attention has a fraction (`ring`) of
    the kernel's rate. Because of its mask, a tower needs torch's memory-efficient kernel, which is assumed to be as
    fast as flash.
    """
    job = shape.job
    call, asked, hardware = call_of(job), job.model.attention, job.hardware
    first = next((kernel for kernel in KERNELS if refusal(kernel, call) is None), None) if asked == "auto" else asked
    flash = (
        first == "flash"
        or (shape.stack is not None and shape.stack.tower is not None)
        or (job.data.document_mask and takes_offsets(asked, call))
    )
    rate = (flash and hardware.flash_tflops) or hardware.attention_tflops
    return 1e12 * rate * (factors.ring if call.ring else 1)


def _casts(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the bytes of memory traffic per token for casts to Float8: (forward, backward).

    Tensorwise scaling reads each bf16 element twice (to find the tensor's largest value, then to cast it) and writes
    one byte. The matmul of a weight's gradient needs both operands transposed: for each element one byte is read and
    one written. Under tensor parallelism the operands are gathered before they are transposed, so whole operands are
    counted.
    """
    dim = shape.job.model.dim
    if not shape.format:
        return 0, 0
    rows = sum(one.inputs for one in shape.linears if not one.column) / shape.job.parallelism.tp
    inputs = rows + 2 * dim / shape.sequence  # attention's linears share one input, and so do those of the feed-forward
    columns = sum(one.outputs for one in shape.linears if one.column) / shape.job.parallelism.tp
    transposed = 2 * (rows + columns + 4 * dim)
    scale = factors.cast * (1 if shape.one_scale else factors.rowwise)
    return scale * CAST_BYTES * inputs, scale * (CAST_BYTES * (columns + 2 * dim / shape.sequence) + transposed)


def _weight_casts(shape: Shape, factors: Factors) -> float:
    """Return the bytes of memory traffic of one cast of a block's weights to Float8. The forward makes one such cast,
    and the backward makes another. If FSDP gathers weights in Float8, each rank casts only its shards.
    """
    if not shape.format:
        return 0.0
    weights = sum(one.size(shape.job.parallelism.tp) for one in shape.linears)
    return (
        CAST_BYTES
        * weights
        * (1 if shape.one_scale else factors.rowwise)
        / (shape.shards if shape.gathered < shape.used else 1)
    )


def _collective(shape: Shape, factors: Factors, size: float, inside: int, ranks: int) -> Sent:
    """Return the time of an all-gather or reduce-scatter of `size` bytes over `ranks` ranks, whose rank numbers are
    `inside` apart. The time is that of a ring at the rate of the slowest link, plus a fixed time, which matters for
    short messages.
    """
    if ranks == 1 or not size:
        return Sent()
    hardware = shape.job.hardware
    # how many of the collective's devices are in one node; each has its own NIC
    lanes = max(hardware.gpus_per_node // inside, 1)
    nodes, size = -(-ranks // lanes), size * (ranks - 1) / ranks
    taken = factors.contention * size / (hardware.nvlink_gbs * 1e9)
    rate = hardware.nvlink_gbs
    if nodes > 1:
        rate, taken = min(hardware.nic_gbs * lanes * 0.9, rate), taken + factors.straggler * nodes
    return Sent((size + factors.message) / (rate * 1e9), taken)


def _tensor_parallel(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of gathers and reduce-scatters of a block, recomputation included."""
    layout = shape.job.parallelism
    seen = factors.async_tp if layout.async_tp else 1
    return Pair(*(seen * _collective(shape, factors, sent, 1, layout.tp).seconds for sent in messages.tensor(shape)))


def _context_parallel(shape: Shape, factors: Factors, attention: Pair) -> Pair:
    """Return the seconds by which the communication of context parallelism delays a block. In a ring, attention
    computes while ranks pass keys and values on.
    """
    again = recomputed(shape).attention
    job, cp, tp = shape.job, shape.job.parallelism.cp, shape.job.parallelism.tp
    ring = rotation(job).ring
    sent = 2 * shape.keys if ring else (2 * shape.queries + 2 * shape.keys) / cp
    once = _collective(shape, factors, shape.tokens * shape.used * sent * cp, tp, cp)
    if not ring:
        return Pair(once.seconds, (2 + again) * once.seconds)
    return Pair(once.behind(attention.forward), (once * (2 + again)).behind(attention.backward))


def _sharding(shape: Shape, factors: Factors) -> tuple[Sent, Sent, Sent]:
    """Return three kinds of messages: those that gather a block's weights, those that reduce its gradients over shards,
    and those that sum the gradients over replicas once in a step. The times include FSDP's copies of gathered weights
    out of its buffer, and of gradients into it.
    """
    layout = shape.job.parallelism
    if not shape.wrapped:
        return Sent(), Sent(), Sent()
    experts = shape.experts.parameters if shape.experts else 0
    gather = _collective(shape, factors, shape.gathered * (shape.whole - experts), layout.tp, shape.shards)
    reduce = _collective(shape, factors, shape.reduced * (shape.whole - experts), layout.tp, shape.shards)
    if shape.experts:
        apart = shape.experts.ep, shape.experts.shards
        gather += _collective(shape, factors, shape.gathered * experts, *apart)
        reduce += _collective(shape, factors, shape.reduced * experts, *apart)
    if shape.shards > 1:
        gather += Sent(taken=2 * shape.gathered * shape.whole / _bandwidth(shape, factors))
        reduce += Sent(taken=(shape.used + shape.reduced) * shape.whole / _bandwidth(shape, factors))
    size = 2 * shape.block * shape.reduced / shape.shards
    return gather, reduce, _collective(shape, factors, size, layout.tp * shape.shards, layout.dp_replicate)


def _call(job: Job) -> float:
    """Return the fixed overhead, in seconds, of one forward or one backward of a stage."""
    return 1 / job.hardware.passes_per_second if job.hardware.passes_per_second else 0.0


def _span(shape: Shape, block: Pair, first: Pair, head: Pair, exact: bool) -> float:
    """Return the seconds of the pipeline for one local batch. Its first stage also has the work of the towers, `first`."""
    job, last, pp, call = shape.job, len(shape.layers) - 1, len(shape.stages), _call(shape.job)
    forward, backward = ([layers * one + call for layers in shape.layers] for one in block)
    forward[0] += first.forward
    backward[0] += first.backward
    forward[last] += head.forward
    backward[last] += head.backward
    # seconds of half a backward, for schedules that split it in two
    half = [(seconds + call) / 2 for seconds in backward]
    hop = shape.tokens * shape.used * shape.residual / (job.hardware.nic_gbs * 0.8e9)
    second = call if splits_backward(job) else 0
    most = max(sum(forward[stage] + backward[stage] + second for stage in stages) for stages in shape.stages)
    # Further microbatches add no idle time: each adds only the work of the slowest rank.
    number = min(shape.microbatches, (4 if exact else 2) * pp)
    if written_schedule(job):
        number = shape.microbatches
    elif not exact:
        chunks = job.pp_schedule.stages_per_rank
        return most * (shape.microbatches + idle_time(known(job.pp_schedule.name), pp, chunks, number) / (3 * chunks))
    seconds = {"F": forward, "B": backward, "I": half, "W": half}
    played = play(actions_of(job, number), last + 1, lambda action: seconds[action[1]][action[0]], hop)
    ends = (start + seconds[action[1]][action[0]] for rank in played for start, action in rank[-1:])
    return max(ends) + (shape.microbatches - number) * most
