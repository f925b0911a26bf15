"""What a meeting does to the weights: Local SGD's average (Stich, 2018), DiLoCo's outer step (Douillard et al., 2023), on a rank's shards.

Rank i of every replica group holds the same part of the model, so averages go shard by shard, and nothing is ever gathered. All of it is
done on the host in float32: the outer state takes no memory of the device, and weights kept in bfloat16 lose nothing between meetings.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_hydra.config.schema import FaultTolerance
from titan_hydra.parallel import float8


@dataclass
class Fragment:
    """Some of this rank's parameters. DiLoCo also has the weights at their last meeting (`anchor`) and the outer momentum."""

    parameters: list[nn.Parameter]
    anchor: Tensor | None = None
    momentum: Tensor | None = None

    def remember(self) -> None:
        """Take the present weights for those of the last meeting: at the start of a run."""
        if self.anchor is not None:
            self.anchor.copy_(self.weights())

    def weights(self) -> Tensor:
        """This rank's shards, as one vector on the host."""
        return torch.cat([torch.zeros(0), *(local(parameter).reshape(-1).float().cpu() for parameter in self.parameters)])

    def set_weights(self, vector: Tensor) -> None:
        """Write such a vector back."""
        shards = [local(parameter) for parameter in self.parameters]
        for shard, part in zip(shards, vector.split([shard.numel() for shard in shards]), strict=True):
            shard.copy_(part.view(shard.shape))

    def offer(self) -> Tensor:
        """What this group brings to the average: its weights; under DiLoCo how far they have come, which is the outer gradient."""
        return self.weights() if self.anchor is None else self.anchor - self.weights()

    def take(self, mean: Tensor, config: FaultTolerance) -> None:
        """Change the weights by the average over the groups; under DiLoCo by a step of SGD with Nesterov momentum from the anchor."""
        if self.anchor is None:
            self.set_weights(mean)
            return
        self.momentum.mul_(config.outer_momentum).add_(mean)
        self.anchor.sub_(mean.add(self.momentum, alpha=config.outer_momentum), alpha=config.outer_lr)
        self.set_weights(self.anchor)


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, gradient or state, in its own memory. Asked for anew: FSDP may move one in its first step."""
    weight = float8.plain(parameter.detach())
    return weight.to_local() if isinstance(weight, DTensor) else weight


def shards(content: dict[str, Any]) -> list[Tensor]:
    """This rank's part of each tensor in a state, in the order of their names: the same in every group."""
    return [local(content[name]) for name in sorted(content) if isinstance(content[name], Tensor)]


def cut(model: nn.Module, layers: int, config: FaultTolerance) -> list[Fragment]:
    """The fragments of what this rank holds of a model with so many layers in all."""
    fragments = [Fragment([]) for _ in range(config.fragments)]
    for name, parameter in model.named_parameters():
        fragments[fragment_of(name, layers, config.fragments)].parameters.append(parameter)
    for fragment in fragments if config.name == "diloco" else []:
        size = sum(local(parameter).numel() for parameter in fragment.parameters)
        fragment.anchor, fragment.momentum = torch.zeros(size), torch.zeros(size)
    return fragments


def fragment_of(name: str, layers: int, fragments: int) -> int:
    """A parameter's fragment, by its name alone, so the same on every layout: equal parts of the blocks, each end with its neighbours."""
    block = re.search(r"layers\.(\d+)\.", name)
    if block:
        return int(block[1]) * fragments // layers
    return 0 if "embed" in name else fragments - 1


def due(step: int, last_step: int, config: FaultTolerance) -> list[int]:
    """The fragments that meet after a step: each every sync_every steps, in turn, and all after the last step of the run."""
    apart = config.sync_every // config.fragments
    if step == last_step:
        return list(range(config.fragments))
    return [] if step % apart else [(step // apart - 1) % config.fragments]
