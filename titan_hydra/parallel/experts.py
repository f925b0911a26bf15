"""Expert parallelism: each rank of an `ep` group holds some of the experts; tokens travel to theirs and back.

Experts are split over their first dimension, and what a rank has is sharded by FSDP over the ranks that hold the same experts. Their
gradient is a plain sum: every token that reached an expert is in it. Under tensor parallelism the tokens are split over the sequence.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_hydra.base.private import all_to_all_single, wait_tensor
from titan_hydra.config.schema import Job

from .mesh import Mesh


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Split the experts of a meta-device stage over the ep ranks, in place, and let its tokens travel."""
    for layer in sparse_layers(module):
        layer.router.balanced = job.debug.balance_experts
        if (sequence := [mesh.world.get_group(name) for name in ("cp", "tp") if getattr(mesh.degrees, name) > 1]):
            layer.router.over_sequence = Summed(sequence)
        if mesh.degrees.ep == 1:
            continue
        ep = mesh.experts["ep"]
        for name, weight in list(layer.experts.named_parameters()):
            layer.experts.register_parameter(name, nn.Parameter(distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None)))
        layer.experts.read = DTensor.to_local
        layer.exchange = AllToAll(ep.get_group(), job.debug.balance_experts)


def sparse_layers(module: nn.Module) -> list[Any]:
    """Return the feed-forwards of experts in a model, a stage or a block, in running order."""
    return [part for part in module.modules() if hasattr(part, "router")]


def weigh(module: nn.Module, count: Tensor) -> None:
    """Tell the routers the weight of an element in the mean loss, for the balance loss within sequences."""
    for layer in sparse_layers(module):
        layer.router.scale.copy_(1 / count)


@dataclass(frozen=True)
class Balance:
    """How evenly a step's tokens went to the experts of this rank's stages: on the device, as tensors."""

    loads: Tensor  # [layers, experts]: tokens
    worst: Tensor  # [2]: the largest number of tokens over the mean, of an expert and of an ep rank, in any layer
    entropy: Tensor  # [2]: summed over tokens and layers, and their number

    def read(self) -> dict[str, float]:
        """Return the numbers of all stages for a row of metrics. This is a collective over all ranks."""
        dist.all_reduce(self.worst, dist.ReduceOp.MAX)
        dist.all_reduce(self.entropy)
        (expert, rank), (entropy, tokens) = self.worst.tolist(), self.entropy.tolist()
        return {"moe_imbalance": expert, "moe_imbalance_ranks": rank, "moe_entropy": entropy / max(tokens, 1), "moe_dropped": 0}


@torch.no_grad()
def after_step(module: nn.Module, mesh: Mesh, model: Any) -> Balance | None:
    """Move the biases of all routers against the loads of the step, summed over all ranks of the stage. Returns how even they were."""
    if not model.sparse:
        return None
    routers = [layer.router for layer in sparse_layers(module)]
    if not routers:  # a stage of dense blocks
        nothing = torch.zeros(2, dtype=torch.float64, device=next(module.parameters()).device)
        return Balance(nothing[:0], nothing, nothing.clone())
    sums = torch.stack([torch.cat([router.load.double(), router.entropy.double().reshape(1)]) for router in routers])
    if mesh.stage is not None:
        dist.all_reduce(sums, group=mesh.stage)
    loads = sums[:, :-1]
    mean = loads.mean(1, keepdim=True)
    for router, load, even in zip(routers, loads, mean, strict=True):
        if router.bias is not None:
            router.bias += model.balance_rate * (even - load).sign().float()
    ranks = loads.unflatten(1, (mesh.degrees.ep, -1)).sum(2)
    worst = torch.stack([(part / part.mean(1, keepdim=True)).max() for part in (loads, ranks)])
    return Balance(loads, worst, torch.stack([sums[:, -1].sum(), loads.sum() / model.experts_per_token]))


def forget(module: nn.Module) -> None:
    """Start to count the tokens of a new step."""
    for layer in sparse_layers(module):
        layer.router.load.zero_()
        layer.router.entropy.zero_()


class Summed(nn.Module):
    """Adds up a tensor over process groups, one after the other."""

    def __init__(self, groups: list[dist.ProcessGroup]):
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            dist.all_reduce(x, group=group)
        return x


@dataclass(frozen=True)
class Route:
    """The way of a rank's rows to their experts' ranks and back: how many each rank is sent and sends, and the order in which those that
    arrive from all ranks are next to each other by expert.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """Send rows, which are in the order of their experts, and return those that arrive, in the order of this rank's experts."""
        return wait_tensor(all_to_all_single(rows, self.received, self.sent, self.group)).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Undo `there`."""
        return wait_tensor(all_to_all_single(rows.index_select(0, self.inverse), self.sent, self.received, self.group))


class Travel(torch.autograd.Function):
    """Sends rows one way of a route, and their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Callable[[Tensor], Tensor], opposite: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.opposite = opposite
        return way(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.opposite(gradient), None, None


class AllToAll(nn.Module):
    """Computes rows that are in the order of their experts, counts[e] of them for expert e, on the ranks that hold the experts.

    The host waits once for the device, for the numbers of rows; if experts are balanced by force, it knows them.
    """

    def __init__(self, group: dist.ProcessGroup, balanced: bool):
        super().__init__()
        self.group, self.balanced = group, balanced

    def forward(self, rows: Tensor, counts: Tensor, experts: nn.Module) -> Tensor:
        rank, ranks = self.group.rank(), self.group.size()
        if self.balanced:  # every rank has the same counts
            (share, more), each = divmod(len(rows), len(counts)), len(counts) // ranks
            parts = [[share + (expert < more) for expert in range(start, start + each)] for start in range(0, len(counts), each)]
            sent, received = [sum(part) for part in parts], [sum(parts[rank])] * ranks
            arriving = torch.tensor(parts[rank], device=rows.device).repeat(ranks, 1)
        else:
            arriving = wait_tensor(all_to_all_single(counts, None, None, self.group)).view(ranks, -1)  # [source, own expert]
            sent, received = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)]).tolist()
        route = Route(self.group, sent, received, *by_expert(arriving, sum(received)))
        computed = experts(Travel.apply(rows, route.there, route.back), arriving.sum(0))
        return Travel.apply(computed, route.back, route.there)


def by_expert(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the order that puts rows from [source, expert] into [expert, source], and the order that undoes it."""
    ranks, experts = counts.shape
    owner = torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten(), output_size=total)
    order = owner.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device))
