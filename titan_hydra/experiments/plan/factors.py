"""Factors of the formulas of time that do not depend on the device, and what these formulas share. docs/plan.md explains
how the factors were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from titan_hydra.core.job.recomputation import ATTENTION, mode_of, saves

from .shape import Shape


@dataclass(frozen=True)
class Factors:
    """Factors of the formulas. They were fitted to the paper's tables, unless a comment says otherwise."""

    eager: float = 4.0  # element-wise memory traffic of a block, as a multiple of the count in `_element_wise`
    # the same multiple for compiled code (not fitted): what fused kernels read and write in Llama 3's block, 172 KB for a
    # token in the forward and 253 in the backward, over three times the count of 100 KB
    compiled: float = 1.4
    # memory traffic of Float8 casts as a multiple of the count in `_casts` (not fitted; measured on an H200: 2.1)
    cast: float = 2.0
    # ratio of the time of rowwise casts to that of tensorwise casts (measured on an H200: 120 and 56 ms)
    rowwise: float = 2.1
    # memory traffic of the package's own cast kernels, as a multiple of the count in `casts.fused_traffic` (measured on an
    # H200 with a prototype of these kernels: 51 ms, where the count takes 32)
    fused: float = 1.6
    ring: float = 0.84  # ratio of the rate of ring attention (context parallelism) to the rate of attention on one rank
    memory: float = 0.85  # fraction of the device's memory bandwidth that kernels reach
    # The following were fitted to published rows (benchmarks/planner).
    async_tp: float = 0.8  # fraction of tensor-parallel communication that async TP does not overlap
    # seconds by which a collective delays computation that overlaps with it, for each second that it takes at NVLink's
    # rate
    contention: float = 0.35
    # seconds per node for which a collective waits for its last rank; this time never overlaps with computation
    straggler: float = 23e-6
    latency: float = 1e-4  # seconds that a collective takes in addition to the time of its bytes
    launch: float = 2e-3  # seconds that the host needs to start the kernels of a block's forward in eager mode
    launch_tp: float = 2.0  # factor on `launch` under tensor parallelism, where every operator goes through DTensor
    imbalance: float = 1.05  # largest number of rows that the experts of a rank get, divided by the mean over ranks
    # passes over an exchange's rows by kernels that sort and copy rows for torch's all-to-all, beyond those that
    # `ExpertShape.traffic` counts
    copy: float = 18.0
    # seconds that the host needs to start the kernels of a forward's experts; an eager block takes `launch` besides
    launch_experts: float = 1e-3
    # fraction of NVLink's rate that exchanges with experts reach (not fitted; DeepEP's README has 153 of 160 GB/s on an
    # H800, UCCL-EP's has 320 of 400 on an H200). Between nodes they reach a NIC's rate (43 to 58 GB/s with 400 Gb/s).
    dispatch: float = 0.8
    grouped: float = 0.55  # ratio of the rate of a grouped matmul to that of a matmul of the same dimensions


FITTED = Factors()


class Pair(NamedTuple):
    """The seconds of a forward and of a backward."""

    forward: float
    backward: float


def bandwidth(shape: Shape, factors: Factors) -> float:
    return shape.job.hardware.memory_tbs * 1e12 * factors.memory


class Again(NamedTuple):
    """The fractions of a block's forward that its backward recomputes."""

    matmuls: float
    attention: float
    rest: float


def recomputed(shape: Shape) -> Again:
    """Return what a block's backward recomputes in the job's mode of activation checkpointing."""
    sizes, mode = shape.sizes, mode_of(shape.job)
    if mode.contexts:
        kept = sum(size for size, is_kept in zip(sizes, shape.kept, strict=True) if is_kept)
        return Again(1 - kept / sum(sizes), not saves(shape.job, *ATTENTION), 1)
    return Again(shape.whole_again, shape.whole_again, shape.whole_again)
