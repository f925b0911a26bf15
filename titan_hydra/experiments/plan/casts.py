"""Predict the seconds of casts to Float8, from their memory traffic."""

from __future__ import annotations

from .factors import Factors, Pair, bandwidth, recomputed
from .shape import Shape

# bytes per element of a cast to Float8 with one scale: bf16 is read twice (for the maximum, to cast), a byte is written
CAST_BYTES = 5
# the same with a scale for each block of 32 elements: bf16 is read once, a byte is written. torchao's kernels reach 85 % of a
# B200's bandwidth (its issue #3379)
BLOCK_CAST_BYTES = 3


def float8_casts(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of casts of activations and weights, computed from their memory traffic."""
    if shape.fused_casts:
        once, gradients = (factors.fused * traffic / bandwidth(shape, factors) for traffic in fused_traffic(shape))
        return Pair(once, gradients + recomputed(shape).rest * once)
    weights = _weight_casts(shape, factors)
    each = zip(_casts(shape, factors), _expert_casts(shape, factors), strict=True)
    inputs, outputs = ((one * shape.tokens + weights + more) / bandwidth(shape, factors) for one, more in each)
    return Pair(inputs, outputs + recomputed(shape).matmuls * inputs)


def _casts(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the bytes of memory traffic per token for casts to Float8: (forward, backward).

    Tensorwise scaling reads each bf16 element twice (to find the tensor's largest value, then to cast it) and writes
    one byte. The matmul of a weight's gradient needs both operands transposed: for each element one byte is read and
    one written. Under tensor parallelism the operands are gathered before they are transposed, so whole operands are
    counted.
    """
    dim = shape.job.model.dim
    if not shape.fast_linears:
        return 0, 0
    rows = sum(linear.inputs for linear in shape.linears if not linear.column) / shape.job.parallelism.tp
    inputs = rows + 2 * dim / shape.sequence  # attention's linears share one input, and so do those of the feed-forward
    columns = sum(linear.outputs for linear in shape.linears if linear.column) / shape.job.parallelism.tp
    if shape.format.block_scales:  # what is read by columns is cast again
        gradients = columns + 2 * dim / shape.sequence
        return BLOCK_CAST_BYTES * inputs, BLOCK_CAST_BYTES * (2 * gradients + inputs)
    transposed = 2 * (rows + columns + 4 * dim)
    scale = factors.cast * (1 if shape.one_scale else factors.rowwise)
    return scale * CAST_BYTES * inputs, scale * (CAST_BYTES * (columns + 2 * dim / shape.sequence) + transposed)


def _weight_casts(shape: Shape, factors: Factors) -> float:
    """Return the bytes of memory traffic of one cast of a block's weights to Float8. The forward makes one such cast,
    and the backward makes another. If FSDP gathers weights in Float8, each rank casts only its shards.
    """
    if not shape.fast_linears:
        return 0.0
    weights = sum(linear.size(shape.job.parallelism.tp) for linear in shape.linears)
    once = CAST_BYTES * (1 if shape.one_scale else factors.rowwise)
    return (
        (BLOCK_CAST_BYTES if shape.format.block_scales else once)
        * weights
        / (shape.shards if shape.gathered < shape.used else 1)
        / (shape.microbatches * shape.rounds if shape.transformer_engine else 1)  # which casts weights once in a step
    )


def _expert_casts(shape: Shape, factors: Factors) -> tuple[float, float]:
    """Return the bytes of memory traffic for casts of experts: (forward, backward). Each of the three products casts its
    rows and its weights by itself. The backward casts the outputs' gradients, and copies the weights before it casts them,
    because the kernels read another order in memory.
    """
    if not shape.fast_experts or shape.experts is None:
        return 0.0, 0.0
    experts = shape.experts
    scale = BLOCK_CAST_BYTES if shape.format.block_scales else CAST_BYTES * factors.cast * factors.rowwise
    rows = shape.tokens * experts.rows
    weights = scale * experts.parameters
    return (
        scale * rows * (2 * experts.dim + experts.width) + weights,
        scale * rows * (experts.dim + 2 * experts.width) + weights + 2 * shape.used * experts.parameters,
    )


def fused_traffic(shape: Shape) -> tuple[float, float]:
    """Return the bytes of memory traffic of the package's own cast kernels in a block (core/kernels/float8_units.py), which
    include norms and SwiGLU: (forward, backward).

    A cast reads bf16 and writes a byte. The forward casts by rows what its linears read. The backward casts the outputs'
    gradients by rows and by columns, and the inputs again by columns; the gradient of SwiGLU is computed from three
    tensors, which are read twice, into three casts.
    """
    cast, dim, width = shape.used + 1, shape.job.model.dim, shape.ffn_width
    weights = cast * sum(linear.size(1) for linear in shape.linears)
    columns = sum(
        linear.outputs for linear in shape.linears[: shape.after - 1]
    )  # attention's outputs: queries, keys, values
    halves = 2 if width else 1  # a block's feed-forward may be experts alone, which are not cast
    forward = cast * (halves * dim + shape.values) + (2 * shape.used + 1) * width
    norms = 3 * shape.used * halves * dim
    gated = (2 * 3 * shape.used + 5) * width
    backward = cast * (2 * columns + 3 * halves * dim + shape.values) + norms + gated
    return shape.tokens * forward + weights, shape.tokens * backward + weights
