"""Predict the seconds that messages between ranks take, and by how much they delay a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from titan_hydra.core.job.ranks import rotation

from . import messages
from .factors import Factors, Pair, bandwidth, recomputed
from .shape import Shape


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
    return Sent(size / (rate * 1e9) + factors.latency, taken)


def tensor_parallel_passes(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of gathers and reduce-scatters of a block, recomputation included.

    Ranks split the sequence, which is the second dimension. If a microbatch has several samples, eager torch therefore
    copies each gathered tensor, and each tensor before it is scattered (torch._utils._maybe_view_chunk_cat).
    """
    layout = shape.job.parallelism
    seen = factors.async_tp if layout.async_tp else 1
    copied = layout.sequence_parallel and shape.samples > 1 and not shape.compiled
    copy = 2 * copied / bandwidth(shape, factors)  # seconds for each byte, which is read and written
    return Pair(
        *(
            seen * _collective(shape, factors, sent, 1, layout.tp).seconds + copy * sent * (layout.tp > 1)
            for sent in messages.tensor(shape)
        )
    )


def context_parallel_passes(shape: Shape, factors: Factors, attention: Pair) -> Pair:
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
        gather += Sent(taken=2 * shape.gathered * shape.whole / bandwidth(shape, factors))
        reduce += Sent(taken=(shape.used + shape.reduced) * shape.whole / bandwidth(shape, factors))
    size = 2 * shape.block * shape.reduced / shape.shards
    return gather, reduce, _collective(shape, factors, size, layout.tp * shape.shards, layout.dp_replicate)


def imbalance(shape: Shape, factors: Factors) -> float:
    """Return the largest number of rows that the experts of a rank get, divided by the mean over all ranks."""
    return 1.0 if shape.job.debug.balance_experts else factors.imbalance


class Exchange(NamedTuple):
    """The seconds of one exchange of rows with the experts' ranks: on NVLink, on the NIC, and in kernels on the device."""

    nvlink: float = 0.0
    nic: float = 0.0
    device: float = 0.0


def _exchange(shape: Shape, factors: Factors) -> Exchange:
    """Return the seconds of one exchange. Each device has its own NIC, and messages inside a node and between nodes are
    sent at the same time.

    torch's all-to-all sends each row by itself, and kernels sort and copy the rows before and after. DeepEP and HybridEP
    send a token once to each node of its experts, where it is passed on to the ranks of its experts.
    """
    experts, hardware = shape.experts, shape.job.hardware
    if not experts or experts.ep == 1:
        return Exchange()
    ep, near = experts.ep, min(experts.ep, hardware.gpus_per_node)
    nodes, token = -(-ep // near), shape.tokens * experts.sent / experts.chosen_experts
    handling = 0.0
    if hardware.dispatcher == "all_to_all":
        copies = experts.chosen_experts
        inside, between = copies * (near - 1) / ep, copies * (ep - near) / ep
        handling = factors.copy * copies * token / bandwidth(shape, factors)
    else:
        inside = experts.reached(ep) * (near - 1) / near
        between = experts.reached(nodes) * (nodes - 1) / nodes
    fullest = imbalance(shape, factors)
    nvlink = fullest * token * inside / (hardware.nvlink_gbs * 1e9 * factors.dispatch) + factors.latency
    nic = fullest * token * between / (hardware.nic_gbs * 1e9) + factors.latency
    return Exchange(nvlink, nic, fullest * handling)


def exchange_passes(shape: Shape, factors: Factors) -> Pair:
    """Return the seconds of a block's exchanges of rows with the experts' ranks."""
    once = _exchange(shape, factors)
    return Pair(*(times * (max(once.nvlink, once.nic) + once.device) for times in messages.exchanges(shape)))


def _apart(shape: Shape, factors: Factors, block: Pair) -> Pair:
    """Return the seconds of a block with which FSDP's messages can overlap: those in which exchanges of rows with experts
    do not occupy the same link.
    """
    once, node = _exchange(shape, factors), shape.job.hardware.gpus_per_node
    busy = once.nic if shape.shards * shape.job.parallelism.tp > node else once.nvlink
    return Pair(*(max(spent - times * busy, 0) for spent, times in zip(block, messages.exchanges(shape), strict=True)))


def fsdp_delay(shape: Shape, factors: Factors, block: Pair) -> float:
    """Return the seconds by which FSDP's messages delay a step. The computation of a block (`block`) overlaps with the
    messages of the next block, except while exchanges with experts occupy the same link. In a pipeline, no computation
    overlaps with messages.
    """
    job = shape.job
    gather, reduce, replicas = _sharding(shape, factors)
    if len(shape.stages) > 1:
        blocks = max(shape.layers) * len(shape.stages[0])
        return blocks * ((gather + reduce).seconds * shape.rounds + replicas.seconds)
    block = _apart(shape, factors, block) if shape.experts else block
    again = Sent() if job.parallelism.reshard_after_forward == "never" else gather
    shown = gather.behind(block.forward) * shape.rounds + (again + reduce).behind(block.backward) * (shape.rounds - 1)
    shown += (again + reduce + replicas).behind(block.backward)
    return shown * sum(shape.layers) + (gather + again + reduce).seconds * shape.rounds
