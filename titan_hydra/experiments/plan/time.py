"""Predict the seconds of a step from a job and its hardware. These are the computation and the messages of blocks, the
idle time of the pipeline, and the part of FSDP's communication that overlaps with no computation.

Rates come from conf/hardware; `Factors` do not depend on the device. docs/plan.md explains how rates and factors were
fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from titan_hydra.core.job.config.attention import KERNELS, call_of, refusal, takes_offsets
from titan_hydra.core.job.config.family import Linear, causal_keys, family_of
from titan_hydra.core.job.config.operation import Hardware
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import splits_backward, written_schedule
from titan_hydra.core.job.ranks import all_ranks
from titan_hydra.core.job.recomputation import mode_of
from titan_hydra.core.job.schedules import actions_of, idle_time, known, play

from .casts import float8_casts
from .factors import FITTED, Factors, Pair, bandwidth, recomputed
from .links import context_parallel_passes, exchange_passes, fsdp_delay, imbalance, tensor_parallel_passes
from .memory import input_bytes
from .shape import NotPredictable, Shape, shape_of

# bytes of memory traffic per parameter in an update: 28 for AdamW, 8 for the norm (H200: 7.95 and 3.5 ms for 10^9)
TOKEN_BYTES = 36
# the same for split masters: the gradient, in bf16, is read for the norm and for the update, and is not written
SPLIT_BYTES = 28
SIMULATED = 4  # microbatches of a pipeline that are simulated, per pipeline rank
LATENCY = 0.01  # seconds of a step that no other term includes
OPTIONAL = (
    "float8_tflops",
    "flash_tflops",
    "passes_per_second",
    "host_gbs",
)  # keys of `hardware` whose values may be null


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


def speed(job: Job, factors: Factors = FITTED, shape: Shape | None = None, exact: bool = True) -> Speed:
    """Predict the speed of a frozen job. Raises NotPredictable.

    With `exact`, the pipeline's schedule is simulated with the time of each stage; otherwise the idle time is computed
    as if all stages took equally long.
    """
    shape, hardware = shape or shape_of(job), job.hardware
    needed = [spec.name for spec in fields(Hardware) if spec.default is None and spec.name not in OPTIONAL]
    if missing := [name for name in needed if getattr(hardware, name) is None]:
        raise NotPredictable(f"hardware={hardware.name}: has no {missing[0]}, so no time can be predicted")
    if shape.format and not shape.format.timed:
        raise NotPredictable(f"precision={job.precision.name}: nobody has measured the rate of its matmuls")
    if hardware.host_gbs is None and (mode_of(job).host or job.optimizer.offload):
        raise NotPredictable(
            f"hardware={hardware.name}: has no host_gbs, so the time of copies to the host is not known"
        )
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
    parts["FSDP"] = sum(fsdp_delay(one, factors, _sum(passes)) for one, passes in kinds)
    step = sum(parts.values())
    return Speed(step, job.data.global_batch * job.data.seq_len / all_ranks(job) / step, parts)


def block_passes(shape: Shape, factors: Factors) -> Passes:
    """Return the seconds of one block for one microbatch, by kind of work (docs/plan.md explains the kinds)."""
    matmuls, attention = _matmuls(shape, factors), _attention(shape, factors)
    elements, casts = _element_wise(shape, factors), float8_casts(shape, factors)
    exchange = exchange_passes(shape, factors)
    kernels = Pair(*map(sum, zip(matmuls, attention, elements, casts, strict=True)))
    busy = kernels
    if shape.hidden_exchange:
        # while rows are exchanged, another microbatch is computed, and the host starts its kernels
        busy = Pair(*map(max, zip(kernels, exchange, strict=True)))
        exchange = Pair(*(most - spent for most, spent in zip(busy, kernels, strict=True)))
    return {
        "matmuls": matmuls,
        "attention": attention,
        "element-wise": elements,
        "Float8 casts": casts,
        "TP communication": tensor_parallel_passes(shape, factors),
        "CP communication": context_parallel_passes(shape, factors, attention),
        "EP communication": exchange,
        "gradient sums": Pair(0.0, _gradient_sums(shape, factors)),
        "host": _host(shape, factors, busy.forward),
        "offload": _offload(shape, kernels),
    } | ({} if shape.job.optimizer.qk_clip is None else {"QK-clip": _largest_logits(shape, factors)})


def _sum(passes: Passes) -> Pair:
    return Pair(*map(sum, zip(*passes.values(), strict=True)))


def _matmuls(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of a block's linears and experts. The backward has two matmuls for each matmul of the forward."""
    tp = shape.job.parallelism.tp
    linears = sum(2 * shape.tokens * linear.size(tp) / _rate(shape, linear) for linear in shape.linears)
    experts, of_weights = (_experts(shape, factors, kind) for kind in (shape.fast_experts, False))
    once = linears + experts
    return Pair(once, (2 + recomputed(shape).matmuls) * once + of_weights - experts)


def _attention(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of attention's own matmuls: two in the forward, five in the backward."""
    job = shape.job
    keys = (family_of(job.model).attended or causal_keys)(job.model, job.data.seq_len)
    pairs = shape.tokens * 2 * (keys if shape.causal else job.data.seq_len)
    once = pairs * (shape.queries + shape.values) / _attention_rate(shape, factors)
    return Pair(once, (2.5 + recomputed(shape).attention) * once)


def _largest_logits(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds in which QK-clip finds each head's largest logit: the matmul of queries and keys, whose float32
    results are written and read.
    """
    job = shape.job
    logits = shape.tokens * (family_of(job.model).attended or causal_keys)(job.model, job.data.seq_len)
    rate = job.hardware.bf16_tflops * 1e12 * (1 if job.precision.compute_dtype == "bfloat16" else 0.5)
    heads = job.model.n_heads / job.parallelism.tp
    once = logits * (2 * shape.queries / rate + 8 * heads / bandwidth(shape, factors))
    return Pair(once, recomputed(shape).attention * once)


def _element_wise(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of norms, activation functions and sums, computed from their memory traffic. Kernels that cast
    to Float8 may include norms and activation functions.
    """
    norms_and_activation = 0 if shape.fused_casts else 2 * shape.residual + 2 * shape.ffn_width
    traffic = 2 * shape.tokens * (2 * shape.residual + shape.queries + shape.keys + norms_and_activation)
    traffic *= factors.compiled if shape.compiled else factors.eager
    traffic += shape.tokens * shape.experts.traffic if shape.experts else 0
    once = traffic / bandwidth(shape, factors)
    return Pair(once, (2 + recomputed(shape).rest) * once)


def _gradient_sums(shape: Shape, factors: Factors) -> float:
    """Return the seconds in which a microbatch's gradients are added to those of earlier ones, computed from their memory
    traffic: each gradient is read, and each sum is read and written. A pipeline adds up gradients before ranks reduce
    them, and so the gradients of all weights that a rank has gathered; FSDP otherwise adds up shards.
    """
    if shape.adds_in_matmuls or shape.microbatches * shape.rounds == 1:
        return 0.0
    added = shape.whole if len(shape.stages) > 1 or not shape.wrapped else shape.block / shape.shards
    return added * shape.learned * (shape.used + 2 * shape.reduced) / bandwidth(shape, factors)


def _offload(shape: Shape, kernels: Pair) -> Pair:
    """Return how much longer a block's input takes to the host, and back from it, than the block's kernels run, or 0."""
    if not mode_of(shape.job).host:
        return Pair(0.0, 0.0)
    copy = input_bytes(shape) / (shape.job.hardware.host_gbs * 1e9)
    return Pair(*(max(copy - spent, 0) for spent in kernels))


def _host(shape: Shape, factors: Factors, kernels: float) -> Pair:
    """Return how much longer the host takes to start a forward's kernels than the kernels run (`kernels`), or 0."""
    late = max(_launch(shape, factors) - kernels, 0)
    return Pair(late, (1 + (shape.whole_again or shape.recomputes / 2)) * late)


def _optimizer(shape: Shape, factors: Factors) -> float:
    """Return the seconds of the update, computed from the memory traffic of the rank with the most parameters. With
    optimizer.offload, states come and go at the same time, while others are updated.
    """
    parameters = max(map(shape.parameters, range(len(shape.layers)))) * len(shape.stages[0]) / shape.shards
    traffic = SPLIT_BYTES if shape.job.optimizer.masters == "split" else TOKEN_BYTES
    update = parameters * traffic * (1 + shape.moments) / 3 / bandwidth(shape, factors)
    if shape.job.optimizer.offload:
        update = max(update, parameters * shape.stored * shape.moments / (shape.job.hardware.host_gbs * 1e9))
    return update + LATENCY


def _pipeline_calls(shape: Shape) -> float:
    """Return the seconds that a rank spends on starting the passes of a step: two or three for each stage and
    microbatch.
    """
    passes = 3 if splits_backward(shape.job) else 2
    return _call(shape.job) * passes * len(shape.stages[0]) * shape.microbatches * shape.rounds


def _launch(shape: Shape, factors: Factors) -> float:
    """Return the seconds that the host needs to start the kernels of a block's forward. Starting the kernels of a
    backward is not slower, as autograd needs no Python.

    Nobody compiles Megatron's blocks. Without experts, they have a few fused kernels, which start in no time that
    matters; with experts, they have as many small kernels as eager code.
    """
    if shape.job.hardware.passes_per_second or shape.captured:  # a CPU has no kernels to start
        return 0.0
    eager = not shape.compiled or (shape.experts is not None and shape.transformer_engine)
    blocks = factors.launch * (factors.launch_tp if shape.job.parallelism.tp > 1 else 1) if eager else 0.0
    return blocks + (factors.launch_experts if shape.experts else 0.0)


def head_passes(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of the head and the loss for one microbatch: (forward, backward). A loss of its own is counted
    as eager code: the forward has 16 bytes of memory traffic per logit, the backward 20. Fused with the head, it reads
    bf16 logits twice and writes their gradients in place: 8 bytes (an H200 took 4 ms for 2.1 * 10^9 logits).
    """
    model, tokens = shape.job.model, shape.tokens * shape.job.model.predictions
    matmul = (
        2 * tokens * model.vocab_size * model.dim / shape.job.parallelism.tp / (shape.job.hardware.bf16_tflops * 1e12)
    )
    logits = tokens * shape.vocabulary * 4 / bandwidth(shape, factors)
    forward, backward = (1, 1) if shape.fused_loss else (4, 5)
    return Pair(matmul + forward * logits, 2 * matmul + backward * logits)


def _experts(shape: Shape, factors: Factors, fast: bool) -> float:
    """Return the seconds of the experts' matmuls in one forward of a microbatch, `fast` in the number format. They reach
    low FLOP/s, as an expert has few rows.
    """
    if not shape.experts:
        return 0.0
    hardware, rows = shape.job.hardware, shape.tokens * shape.experts.rows
    smallest = min(rows * shape.experts.ep / shape.experts.number, shape.experts.dim, shape.experts.width)
    fast = fast or (shape.transformer_engine and shape.format is not None)
    top, half = (
        (hardware.float8_tflops, hardware.small_float8) if fast else (hardware.bf16_tflops, hardware.small_matmul)
    )
    top *= 1 if shape.transformer_engine else factors.grouped
    rate = top * 1e12 * smallest / (smallest + half) / (shape.used / 2)
    return imbalance(shape, factors) * 6 * rows * shape.experts.dim * shape.experts.width / rate


def _rate(shape: Shape, linear: Linear) -> float:
    """Return the FLOP/s of a linear on one rank. They are lower for small matrices, such as those that tensor
    parallelism splits.
    """
    tp, hardware, precision = shape.job.parallelism.tp, shape.job.hardware, shape.job.precision
    smallest = min(shape.tokens, linear.share("inputs", tp), linear.share("outputs", tp))
    fast = shape.fast_linears and linear.name not in precision.skip
    top, half = (
        (hardware.float8_tflops, hardware.small_float8) if fast else (hardware.bf16_tflops, hardware.small_matmul)
    )
    return top * 1e12 * smallest / (smallest + half) * (1 if precision.compute_dtype == "bfloat16" else 0.5)


def _attention_rate(shape: Shape, factors: Factors) -> float:
    """Return the FLOP/s of attention. torch's flash kernel has its own rate. torch's ring attention has a fraction
    (`ring`) of the kernel's rate; Transformer Engine's ring computes its parts on two streams. Because of its mask, a
    tower needs torch's memory-efficient kernel, which is assumed to be as fast as flash.
    """
    job = shape.job
    call, asked, hardware = call_of(job), job.model.attention, job.hardware
    first = next((kernel for kernel in KERNELS if refusal(kernel, call) is None), None) if asked == "auto" else asked
    flash = (
        first == "flash"
        or (shape.stack is not None and shape.stack.tower is not None)
        or (job.data.document_mask and takes_offsets(asked, call))
    )
    top, half = hardware.attention_tflops, hardware.short_attention
    if flash and hardware.flash_tflops:
        top, half = hardware.flash_tflops, hardware.short_flash
    ring = factors.ring if call.ring and not shape.transformer_engine else 1
    return 1e12 * top * ring * job.data.seq_len / (job.data.seq_len + half)


def _call(job: Job) -> float:
    """Return the fixed overhead, in seconds, of one forward or one backward of a stage."""
    return 1 / job.hardware.passes_per_second if job.hardware.passes_per_second else 0.0


def _span(shape: Shape, block: Pair, first: Pair, head: Pair, exact: bool) -> float:
    """Return the seconds of the pipeline for one local batch. Its first stage also has the work of the towers, `first`."""
    job, last, pp, call = shape.job, len(shape.layers) - 1, len(shape.stages), _call(shape.job)
    forward, backward = ([layers * of_block + call for layers in shape.layers] for of_block in block)
    forward[0] += first.forward
    backward[0] += first.backward
    forward[last] += head.forward
    backward[last] += head.backward
    # seconds of half a backward, for schedules that split it in two
    half = [(seconds + call) / 2 for seconds in backward]
    near = all_ranks(job) <= job.hardware.gpus_per_node
    link = job.hardware.nvlink_gbs if near else job.hardware.nic_gbs
    hop = shape.tokens * shape.used * shape.residual / (link * 0.8e9)
    second = call if splits_backward(job) else 0
    most = max(sum(forward[stage] + backward[stage] + second for stage in stages) for stages in shape.stages)
    if not exact and not written_schedule(job):
        number, chunks = min(shape.microbatches, 2 * pp), job.pp_schedule.stages_per_rank
        return most * (shape.microbatches + idle_time(known(job.pp_schedule.name), pp, chunks, number) / (3 * chunks))
    seconds = {"F": forward, "B": backward, "I": half, "W": half}

    def played(number: int) -> float:
        ranks = play(actions_of(job, number), last + 1, lambda action: seconds[action[1]][action[0]], hop)
        return max(start + seconds[action[1]][action[0]] for rank in ranks for start, action in rank[-1:])

    number = shape.microbatches if written_schedule(job) else min(shape.microbatches, SIMULATED * pp)
    if number == shape.microbatches:
        return played(number)
    # Each further microbatch takes as long as the last of those that are simulated: the work of the slowest rank and, in
    # some schedules, the waits for the outputs of other stages.
    span, before = played(number), played(number - pp)
    return span + (shape.microbatches - number) * (span - before) / pp
