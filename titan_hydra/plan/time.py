"""The seconds of a step, from a job and its hardware: what a block computes and sends, how long the pipeline waits, and
the part of FSDP's communication that nothing overlaps.

Rates come from conf/hardware; `Factors` do not depend on the device. docs/plan.md tells how both were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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

Passes = dict[str, tuple[float, float]]  # (seconds of the forward, seconds of the backward) by kind of work
# half-widths of the error band, relative: for a hardware preset that was fitted to runs, and for another
BAND, UNMEASURED = 0.15, 0.20
# bytes of the update's memory traffic per parameter: 28 for AdamW in float32, 8 for the norm (H200: 7.95, 3.5 ms for 10^9)
TOKEN_BYTES = 36
LATENCY = 0.01  # seconds of a step that no other term counts
OPTIONAL = ("float8_tflops", "flash_tflops", "passes_per_second")  # rates that a device need not have


@dataclass(frozen=True)
class Factors:
    """Factors fitted to the paper's tables, unless a comment says otherwise."""

    eager: float = 4.0  # element-wise traffic of a block, in passes over its activations
    compiled: float = 0.5  # the same for compiled code; the lower bound of the fit, as the fitted matmul rates include the rest
    # memory traffic of Float8 casts as a multiple of the count for tensorwise scaling (H200: 2.1; not fitted)
    cast: float = 2.0
    rowwise: float = 2.1  # ratio of the time of rowwise casts to that of tensorwise casts (H200: 120 against 56 ms)
    ring: float = 0.84  # ratio of the rate of ring attention (context parallelism) to the rate of attention on one rank
    memory: float = 0.85  # fraction of the memory bandwidth that kernels reach
    # The following were fitted to published rows (`titan plan --score`).
    async_tp: float = 0.8  # fraction of tensor-parallel communication that async TP does not overlap
    contention: float = 0.35  # seconds that computation loses to a second of a collective at NVLink's rate, if both overlap
    straggler: float = 23e-6  # seconds that a collective waits for its last rank, for each node; nothing hides them
    message: float = 40e6  # bytes of a collective that reaches half of its link's rate
    launch: float = 2e-3  # seconds in which the host starts the kernels of a block's forward, in eager mode
    launch_tp: float = 2.0  # the same under tensor parallelism, as a multiple: every operator goes through DTensor
    imbalance: float = 1.6  # rows of the rank whose experts have most, over the mean
    dispatch: float = 0.3  # fraction of a link's rate that all-to-alls of rows reach


@dataclass(frozen=True)
class Speed:
    """The speed of a job. `parts` has the average rank's seconds of a step by kind of work."""

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

    `exact` simulates the pipeline's schedule with the times of its own stages; otherwise its idle time is computed for
    equal stages.
    """
    shape, hardware = shape or shape_of(job), job.hardware
    needed = [spec.name for spec in fields(Hardware) if spec.default is None and spec.name not in OPTIONAL]
    if missing := [name for name in needed if getattr(hardware, name) is None]:
        raise NotPredictable(f"hardware={hardware.name}: has no {missing[0]}, so no time can be predicted")
    if shape.format and hardware.float8_tflops is None:
        raise NotPredictable(f"precision={job.precision.name}: hardware={hardware.name} has no matmuls in this format")
    block, head = block_passes(shape, factors), head_passes(shape, factors)
    parts = {name: sum(block[name]) * job.model.n_layers * shape.microbatches * shape.rounds / len(shape.stages) for name in block}
    parts["head and loss"] = sum(head) * shape.microbatches * shape.rounds / len(shape.stages)
    parts["optimizer"] = (
        max(map(shape.parameters, range(len(shape.layers))))
        * len(shape.stages[0])
        / shape.shards
        * TOKEN_BYTES
        * (1 + shape.moments)
        / 3
        / _bandwidth(shape, factors)
        + LATENCY
    )
    forward, backward = (sum(passes[side] for passes in block.values()) for side in (0, 1))
    if len(shape.stages) > 1:
        passes = (2 + splits_backward(job)) * len(shape.stages[0]) * shape.microbatches
        parts["pipeline calls"] = _call(job) * passes * shape.rounds
        span = _span(shape, (forward, backward), head, exact)
        parts["pipeline idle"] = (span - (sum(parts.values()) - parts["optimizer"]) / shape.rounds) * shape.rounds
    gather, reduce, replicas = _sharding(shape, factors)
    blocks = max(shape.layers) * len(shape.stages[0])
    if len(shape.stages) > 1:
        parts["FSDP"] = blocks * ((gather + reduce).seconds * shape.rounds + replicas.seconds)
    else:
        again = gather * (job.parallelism.reshard_after_forward != "never")
        sides = [(gather, forward, shape.rounds), (again + reduce, backward, shape.rounds - 1), (again + reduce + replicas, backward, 1)]
        shown = sum(sent.behind(seconds) * times for sent, seconds, times in sides)
        parts["FSDP"] = shown * job.model.n_layers + (gather + again + reduce).seconds * shape.rounds
    step = sum(parts.values())
    return Speed(step, job.data.global_batch * job.data.seq_len / all_ranks(job) / step, parts)


def block_passes(shape: Shape, factors: Factors) -> Passes:
    """Return the seconds of one block for one microbatch."""
    job, tokens, tp = shape.job, shape.tokens, shape.job.parallelism.tp
    again, attention_again, rest_again = recomputed(shape)
    matmuls = sum(2 * tokens * one.size(tp) / _rate(shape, one) for one in shape.linears) + _experts(shape, factors)
    attention = tokens * job.data.seq_len * (shape.queries + shape.values) / _attention_rate(job, factors)
    traffic = 2 * tokens * (4 * shape.residual + shape.queries + shape.keys + 2 * shape.ffn_width)
    traffic *= factors.compiled if shape.compiled else factors.eager
    elements = (traffic + (tokens * shape.experts.traffic if shape.experts else 0)) / _bandwidth(shape, factors)
    inputs, outputs = ((casts * tokens + _weight_casts(shape, factors)) / _bandwidth(shape, factors) for casts in _casts(shape, factors))
    sends = _tensor_parallel(shape, factors)
    ring, ring_back = _context_parallel(shape, factors, attention, (2.5 + attention_again) * attention, attention_again)
    kernels = matmuls + attention + elements + inputs
    late = max(_launch(shape, factors) - kernels, 0)
    return {
        "matmuls": (matmuls, (2 + again) * matmuls),
        "attention": (attention, (2.5 + attention_again) * attention),
        "element-wise": (elements, (2 + rest_again) * elements),
        "Float8 casts": (inputs, outputs + again * inputs),
        "TP communication": sends,
        "CP communication": (ring, ring_back),
        "EP communication": _exchange(shape, factors),
        "host": (late, (1 + (shape.whole_again or shape.recomputes / 2)) * late),
    }


def _launch(shape: Shape, factors: Factors) -> float:
    """Return the seconds in which the host starts the kernels of a block's forward. Those of a backward take no longer,
    as autograd starts them without Python.
    """
    if shape.compiled or shape.job.hardware.passes_per_second:  # a CPU has no kernels that run behind the host
        return 0.0
    return factors.launch * (factors.launch_tp if shape.job.parallelism.tp > 1 else 1)


@dataclass(frozen=True)
class Sent:
    """Messages of a rank: `seconds` on their link if nothing else runs, and the seconds that they take from computation
    with which they overlap: waits for other ranks, multiprocessors, copies into and out of buffers.
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


def recomputed(shape: Shape) -> tuple[float, float, float]:
    """Return the fractions of a block's forward that its backward recomputes: of matmuls, of attention, of the rest."""
    sizes, mode = shape.sizes, mode_of(shape.job)
    if mode.contexts:
        return 1 - sum(sizes[:: mode.matmuls]) / sum(sizes), 0, 1
    return (shape.whole_again,) * 3


def head_passes(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the seconds of the head and the loss for one microbatch, (forward, backward). Both count as eager code, with
    16 and 20 bytes of memory traffic per logit.
    """
    model, tokens = shape.job.model, shape.tokens
    matmul = 2 * tokens * model.vocab_size * model.dim / shape.job.parallelism.tp / (shape.job.hardware.bf16_tflops * 1e12)
    logits = tokens * shape.vocabulary * 4 / _bandwidth(shape, factors)
    return matmul + 4 * logits, 2 * matmul + 5 * logits


def _experts(shape: Shape, factors: Factors) -> float:
    """Return the seconds of the experts' matmuls in one forward of a microbatch. An expert has few rows, so its rate is
    low.
    """
    if not shape.experts:
        return 0.0
    hardware, rows = shape.job.hardware, shape.tokens * shape.experts.rows
    smallest = min(rows * shape.experts.ep / shape.experts.number, shape.experts.dim, shape.experts.width)
    rate = hardware.bf16_tflops * 1e12 * smallest / (smallest + hardware.small_matmul) / (shape.used / 2)
    return _imbalance(shape, factors) * 6 * rows * shape.experts.dim * shape.experts.width / rate


def _imbalance(shape: Shape, factors: Factors) -> float:
    """Return the rows of the rank whose experts have most, over the mean of all ranks."""
    return 1.0 if shape.job.debug.balance_experts else factors.imbalance


def _exchange(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the seconds of the all-to-alls to experts and back, (forward, backward); each device has its own NIC."""
    if not shape.experts or shape.experts.ep == 1:
        return 0.0, 0.0
    hardware, ep = shape.job.hardware, shape.experts.ep
    near = min(ep, hardware.gpus_per_node)
    share = max((near - 1) / ep / (hardware.nvlink_gbs * 1e9), (ep - near) / ep / (hardware.nic_gbs * 0.9e9))
    share *= _imbalance(shape, factors) / factors.dispatch
    forward, backward = (shape.tokens * shape.experts.sent * times * share for times in messages.exchanges(shape))
    return forward, backward


def _bandwidth(shape: Shape, factors: Factors) -> float:
    return shape.job.hardware.memory_tbs * 1e12 * factors.memory


def _rate(shape: Shape, linear: Linear) -> float:
    """Return the FLOP/s of a linear on one rank: lower for small dimensions, such as those of a shard."""
    tp, hardware, precision = shape.job.parallelism.tp, shape.job.hardware, shape.job.precision
    smallest = min(shape.tokens, linear.share("inputs", tp), linear.share("outputs", tp))
    fast = shape.format and linear.name not in precision.skip
    top, half = (hardware.float8_tflops, hardware.small_float8) if fast else (hardware.bf16_tflops, hardware.small_matmul)
    return top * 1e12 * smallest / (smallest + half) * (1 if precision.compute_dtype == "bfloat16" else 0.5)


def _attention_rate(job: Job, factors: Factors) -> float:
    """Return the FLOP/s of attention: torch's flash kernel has its own rate, and ring attention a fraction (`ring`) of
    the rate.
    """
    call, asked, hardware = call_of(job), job.model.attention, job.hardware
    first = next((kernel for kernel in KERNELS if refusal(kernel, call) is None), None) if asked == "auto" else asked
    flash = first == "flash" or (job.data.document_mask and takes_offsets(asked, call))
    rate = (flash and hardware.flash_tflops) or hardware.attention_tflops
    return 1e12 * rate * (factors.ring if call.ring else 1)


def _casts(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the bytes of memory traffic per token of casts to Float8, (forward, backward).

    Tensorwise scaling reads a bf16 tensor twice (for its largest value, then to cast it) and writes a byte. The matmul
    of a weight's gradient needs both operands transposed: a byte read and one written per element; under tensor
    parallelism the operands are gathered, so they count whole.
    """
    dim = shape.job.model.dim
    if not shape.format:
        return 0, 0
    rows = sum(one.inputs for one in shape.linears if not one.column) / shape.job.parallelism.tp
    inputs = rows + 2 * dim / shape.sequence  # the linears of attention share one input, those of the feed-forward too
    columns = sum(one.outputs for one in shape.linears if one.column) / shape.job.parallelism.tp
    transposed = 2 * (rows + columns + 4 * dim)
    scale = factors.cast * (1 if shape.one_scale else factors.rowwise)
    return scale * 5 * inputs, scale * (5 * (columns + 2 * dim / shape.sequence) + transposed)


def _weight_casts(shape: Shape, factors: Factors) -> float:
    """Return the bytes of memory traffic of a block's weights as they are cast to Float8, in its forward as in its
    backward. Weights that FSDP gathers in Float8 are cast as shards.
    """
    if not shape.format:
        return 0.0
    weights = sum(one.size(shape.job.parallelism.tp) for one in shape.linears)
    return 5 * weights * (1 if shape.one_scale else factors.rowwise) / (shape.shards if shape.gathered < shape.used else 1)


def _collective(shape: Shape, factors: Factors, size: float, inside: int, ranks: int) -> Sent:
    """Return an all-gather or reduce-scatter of `size` bytes over `ranks` ranks that are `inside` ranks apart: a ring's
    bytes at the rate of its slowest link, and more for a short message.
    """
    if ranks == 1 or not size:
        return Sent()
    hardware = shape.job.hardware
    lanes = max(hardware.gpus_per_node // inside, 1)  # the collective's devices in a node; each has its own NIC
    nodes, size = -(-ranks // lanes), size * (ranks - 1) / ranks
    taken = factors.contention * size / (hardware.nvlink_gbs * 1e9)
    rate = hardware.nvlink_gbs
    if nodes > 1:
        rate, taken = min(hardware.nic_gbs * lanes * 0.9, rate), taken + factors.straggler * nodes
    return Sent((size + factors.message) / (rate * 1e9), taken)


def _tensor_parallel(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the seconds of gathers and reduce-scatters of a block, forward and backward, recomputation included."""
    layout = shape.job.parallelism
    seen = factors.async_tp if layout.async_tp else 1
    forward, backward = (seen * _collective(shape, factors, sent, 1, layout.tp).seconds for sent in messages.tensor(shape))
    return forward, backward


def _context_parallel(shape: Shape, factors: Factors, forward: float, backward: float, again: float) -> tuple[float, float]:
    """Return the seconds by which context parallelism's communication delays a block, (forward, backward). A ring
    passes keys and values on while attention computes for `forward` and `backward` seconds.
    """
    job, cp, tp = shape.job, shape.job.parallelism.cp, shape.job.parallelism.tp
    ring = rotation(job).ring
    sent = 2 * shape.keys if ring else (2 * shape.queries + 2 * shape.keys) / cp
    once = _collective(shape, factors, shape.tokens * shape.used * sent * cp, tp, cp)
    if not ring:
        return once.seconds, (2 + again) * once.seconds
    return once.behind(forward), (once * (2 + again)).behind(backward)


def _sharding(shape: Shape, factors: Factors) -> tuple[Sent, Sent, Sent]:
    """Return the messages that gather a block's weights, that reduce its gradients over shards, and that, once in a
    step, sum them over replicas. FSDP copies gathered weights out of its buffer, and gradients into it.
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
    """Return the fixed overhead in seconds of a forward or backward of a stage."""
    return 1 / job.hardware.passes_per_second if job.hardware.passes_per_second else 0.0


def _span(shape: Shape, block: tuple[float, float], head: tuple[float, float], exact: bool) -> float:
    """Return the seconds in which the pipeline works through one local batch."""
    job, last, pp, call = shape.job, len(shape.layers) - 1, len(shape.stages), _call(shape.job)
    forward, backward = (
        [layers * block[side] + head[side] * (stage == last) + call for stage, layers in enumerate(shape.layers)] for side in (0, 1)
    )
    half = [(seconds + call) / 2 for seconds in backward]  # if a schedule splits the backward in two passes: seconds of each
    hop = shape.tokens * shape.used * shape.residual / (job.hardware.nic_gbs * 0.8e9)
    most = max(sum(forward[stage] + backward[stage] + call * splits_backward(job) for stage in stages) for stages in shape.stages)
    # Further microbatches do not add idle time: each adds the work of the slowest rank.
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
