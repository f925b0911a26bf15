"""Expert parallelism: each rank of an `ep` group holds some of the experts; tokens are sent to them and back.

The experts' weights are split along their first dimension, and FSDP shards a rank's experts over the ranks that hold
the same experts. An expert's gradient is a plain sum over all tokens that were sent to the expert. Under tensor
parallelism the tokens are split over the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Shard, distribute_tensor

from titan_hydra.core.base.private import all_to_all_single, wait_tensor
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.recomputation import keep

from .mesh import Mesh, local_part


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Split the experts of a meta-device stage over the ep ranks, in place, and exchange their tokens."""
    for layer in sparse_layers(module):
        layer.router.balanced = job.debug.balance_experts
        layer.router.scale = 1 / (job.data.global_batch * job.data.seq_len)
        if sequence := [mesh.world.get_group(name) for name in ("cp", "tp") if getattr(mesh.degrees, name) > 1]:
            layer.router.over_sequence = Summed(sequence)
    if mesh.experts is None or mesh.degrees.ep == 1:
        return
    ep = mesh.experts["ep"]
    for layer, experts in exchanging_layers(module):
        for name, weight in list(experts.named_parameters()):
            experts.register_parameter(
                name, nn.Parameter(distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None))
            )
        experts.read, experts.sends = local_part, True
        experts.dynamic = True  # tells the compiler that the number of rows differs in each step
        layer.exchange = AllToAll(ep.get_group(), job.debug.balance_experts)


def sparse_layers(module: nn.Module) -> list[Any]:
    """Return the feed-forwards with this package's experts, of a model, a stage or a block, in running order."""
    return [part for part in module.modules() if hasattr(part, "router") and hasattr(part, "exchange")]


def exchanging_layers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return each module whose `exchange` can send tokens to other ranks, with the module that has the weights of its
    experts, which is the same one for experts of other libraries.
    """
    return [(part, getattr(part, "experts", part)) for part in module.modules() if hasattr(part, "exchange")]


@dataclass(frozen=True)
class Balance:
    """How evenly a step's tokens were distributed over the experts of this rank's stages, as tensors on the device."""

    loads: Tensor  # [layers, experts]: numbers of tokens
    # [2]: for experts, and for ep ranks: the largest ratio in any layer of the number of tokens to the mean
    worst: Tensor
    # [2]: the sum of the router's entropies over tokens and layers, and the number of entropies in the sum
    entropy: Tensor

    def read(self) -> dict[str, float]:
        """Return the numbers of all stages for a row of metrics. This is a collective over all ranks."""
        dist.all_reduce(self.worst, dist.ReduceOp.MAX)
        dist.all_reduce(self.entropy)
        (expert, rank), (entropy, tokens) = self.worst.tolist(), self.entropy.tolist()
        return {"moe_imbalance": expert, "moe_imbalance_ranks": rank, "moe_entropy": entropy / max(tokens, 1)}


@torch.no_grad()
def after_step(module: nn.Module, mesh: Mesh, model: Any, finite: Tensor) -> Balance | None:
    """Update the biases of all routers, so that experts with high loads in this step get fewer tokens. The loads are
    summed over all ranks of the stage. If the step's loss or norm is not `finite`, the biases do not change. Return the
    step's Balance.
    """
    if not model.sparse:
        return None
    routers = [layer.router for layer in sparse_layers(module)]
    if not routers:  # the stage has only dense blocks
        nothing = torch.zeros(2, dtype=torch.float64, device=next(module.parameters()).device)
        return Balance(nothing[:0], nothing, nothing.clone())
    sums = torch.stack([torch.cat([router.load.double(), router.entropy.double().reshape(1)]) for router in routers])
    if mesh.stage is not None:
        dist.all_reduce(sums, group=mesh.stage)
    loads = sums[:, :-1]
    mean = loads.mean(1, keepdim=True)
    for router, load, even in zip(routers, loads, mean, strict=True):
        if router.bias is not None:
            router.bias += model.router_bias_update_rate * finite * (even - load).sign().float()
    ranks = loads.unflatten(1, (mesh.degrees.ep, -1)).sum(2)
    worst = torch.stack([(part / part.mean(1, keepdim=True)).max() for part in (loads, ranks)])
    return Balance(loads, worst, torch.stack([sums[:, -1].sum(), loads.sum() / model.experts_per_token]))


def forget(module: nn.Module) -> None:
    """Reset the counts of tokens for a new step."""
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
    """The all-to-all of rows to the ranks of their experts and back, with the numbers of rows for each rank."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def there(self, rows: Tensor) -> Tensor:
        """Send rows, which are sorted by expert, and return the rows that arrive, sorted by the ranks that sent them."""
        return wait_tensor(all_to_all_single(rows, self.received, self.sent, self.group))

    def back(self, rows: Tensor) -> Tensor:
        """Send rows back to the ranks from which they came: the inverse of `there`."""
        return wait_tensor(all_to_all_single(rows, self.sent, self.received, self.group))


class Travel(torch.autograd.Function):
    """Sends rows in one direction of a route, and their gradients in the other."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, way: Callable[[Tensor], Tensor], opposite: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.opposite = opposite
        return way(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.opposite(gradient), None, None


class AllToAll(nn.Module):
    """Sends a rank's rows [tokens, dim] to the ranks that hold their experts, which compute them and send the results
    back: [tokens * k, dim], k rows for each token.

    The host waits once for the device, to read the numbers of rows. It does not wait in a recomputation, nor with
    debug.balance_experts, which fixes these numbers.
    """

    def __init__(self, group: dist.ProcessGroup, balanced: bool):
        super().__init__()
        self.group, self.balanced = group, balanced

    def forward(self, rows: Tensor, plan: Any, experts: Callable[..., Tensor]) -> Tensor:
        arriving, sent, received = keep(self.sizes, plan)
        route = Route(self.group, sent, received)
        rows = Travel.apply(plan.spread(rows), route.there, route.back)
        rows = experts(rows, *by_expert(arriving, len(rows)), arriving.sum(0, dtype=torch.int32))
        return plan.restore(Travel.apply(rows, route.back, route.there))

    def sizes(self, plan: Any) -> tuple[Tensor, list[int], list[int]]:
        """Return numbers of rows: those that arrive, by source and expert [rank, own expert]; those sent to each rank;
        those received from each rank.
        """
        rank, ranks, experts = self.group.rank(), self.group.size(), len(plan.counts)
        if self.balanced:  # every rank sends the same numbers of rows: the first `more` experts get one more
            (share, more), each = divmod(len(plan.order), experts), experts // ranks
            sent = [each * share + min(max(more - first, 0), each) for first in range(0, experts, each)]
            per_expert = share + (torch.arange(each, device=plan.counts.device) < more - rank * each).int()
            return per_expert.repeat(ranks, 1), sent, [sent[rank]] * ranks
        arriving = torch.empty_like(plan.counts)
        dist.all_to_all_single(arriving, plan.counts, group=self.group)
        arriving = arriving.view(ranks, -1)
        sent, received = torch.stack([plan.counts.view(ranks, -1).sum(1), arriving.sum(1)]).tolist()
        return arriving, sent, received


def by_expert(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the permutation (int32) of `total` rows from the order [source, expert] to the order [expert, source], and
    the inverse permutation.

    Rows of one source for one expert stay together: all move by the same distance.
    """
    positions = torch.arange(total, device=counts.device, dtype=torch.int32)
    ends, ends_by_expert = (part.flatten().cumsum(0, dtype=torch.int32) for part in (counts, counts.t()))
    moves = ends.view_as(counts) - ends_by_expert.view(counts.shape[::-1]).t()
    order = positions + moves.t().flatten()[torch.searchsorted(ends_by_expert, positions, right=True, out_int32=True)]
    return order, positions - moves.flatten()[torch.searchsorted(ends, positions, right=True, out_int32=True)]
