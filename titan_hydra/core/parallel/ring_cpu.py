"""Make torch's ring attention run on CPUs. Its code works with any attention kernel, but torch registers it only for
CUDA's kernels.

So tests on gloo ranks execute the same code as GPUs: the dispatch, the rotation, and the merging of partial results.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from titan_hydra.core.base import private
from titan_hydra.core.base.private import (
    OpOverload,
    OpSchema,
    OpStrategy,
    RuntimeSchemaInfo,
    expand_to_full_mesh_op_strategy,
)
from titan_hydra.core.base.private import flash_on_cpu as FORWARD
from titan_hydra.core.base.private import flash_on_cpu_backward as BACKWARD

SEQ_DIM = 2
# Either all tensors are replicated, or all are split along the same dimension: batch, heads or sequence. The dimensions
# of each tensor begin with [batch, heads, seq].
PLACEMENTS = (Replicate(), Shard(1), Shard(0), Shard(SEQ_DIM))


def register_ring() -> None:
    """Add the CPU's flash kernel to the kernels that torch's ring dispatcher handles when it is enabled. Repeated calls
    are harmless.
    """
    private.ring_kernels[FORWARD] = private.ring_kernels[BACKWARD] = _dispatch
    # The number is the index of the first argument on whose value (not only its placement) a cached strategy depends.
    private.register_op_strategy(FORWARD, schema_info=RuntimeSchemaInfo(4))(_forward_strategy)
    private.register_op_strategy(BACKWARD, schema_info=RuntimeSchemaInfo(6))(_backward_strategy)


def _forward_strategy(schema: OpSchema) -> OpStrategy:
    tensors = 5  # the outputs out, logsumexp; the inputs q, k, v
    return expand_to_full_mesh_op_strategy(
        schema.get_mesh_from_args(), schema, [[placement] * tensors for placement in PLACEMENTS], input_index=2
    )


def _backward_strategy(schema: OpSchema) -> OpStrategy:
    tensors = 9  # the outputs: gradients of q, k, v; the inputs: gradient of out, q, k, v, out, logsumexp
    mesh = schema.get_mesh_from_args(validate=False)
    return expand_to_full_mesh_op_strategy(
        mesh, schema, [[placement] * tensors for placement in PLACEMENTS], input_index=3
    )


def _dispatch(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the ring on the local tensors of a call and wrap what it returns, as torch's own handler does for CUDA's
    kernels.
    """
    dispatcher = private.op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    run = _forward if op is FORWARD else _backward
    return dispatcher.wrap(
        run(info.compute_mesh, *info.local_args, **info.local_kwargs), info.output_sharding.output_spec
    )


def _forward(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute ring attention on CPUs by torch's template, which calls FORWARD for each part of the keys."""
    return private.ring_forward(
        mesh.get_group(),
        SEQ_DIM,
        FORWARD,
        query=query,
        key=key,
        value=value,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )


def _backward(
    mesh: DeviceMesh,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute the gradients of ring attention on CPUs by torch's template, which calls BACKWARD for each part."""
    return private.ring_backward(
        mesh.get_group(),
        SEQ_DIM,
        BACKWARD,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
