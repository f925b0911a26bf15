"""The update of a rank's shards of the weights at a meeting: the average of Local SGD (Stich, 2018), or the outer step
of DiLoCo (Douillard et al., 2023).

Rank i of every replica group holds the same part of the model, so each shard is averaged separately, without gathering
the model. The update runs on the host in float32, so that the outer state takes no device memory, and bfloat16 weights
lose nothing between meetings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.job.config.family import place_in_order, places_of_blocks
from titan_hydra.core.job.config.operation import FaultTolerance
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.mesh import local_part


@dataclass
class Fragment:
    """A part of this rank's parameters that is averaged as one. DiLoCo also keeps the weights of the fragment's last
    meeting (`anchor`) and the outer momentum.
    """

    parameters: list[nn.Parameter]
    anchor: Tensor | None = None
    momentum: Tensor | None = None

    def remember(self) -> None:
        """Set the anchor to the present weights. Call this at the start of a run."""
        if self.anchor is not None:
            self.anchor.copy_(self.weights())

    def weights(self) -> Tensor:
        """Return this rank's shards as one float32 vector on the host."""
        return torch.cat(
            [torch.zeros(0), *(local(parameter).reshape(-1).float().cpu() for parameter in self.parameters)]
        )

    def set_weights(self, vector: Tensor) -> None:
        """Write a vector as returned by `weights` back to the shards."""
        shards = [local(parameter) for parameter in self.parameters]
        for shard, part in zip(shards, vector.split([shard.numel() for shard in shards]), strict=True):
            shard.copy_(part.view(shard.shape))

    def offer(self) -> Tensor:
        """Return this group's contribution to the average: its weights or, with DiLoCo, the outer gradient (anchor minus
        weights).
        """
        return self.weights() if self.anchor is None else self.anchor - self.weights()

    def take(self, mean: Tensor, config: FaultTolerance) -> None:
        """Update the weights with the average over the groups. With DiLoCo, the update is a step of SGD with Nesterov
        momentum that starts from the anchor.
        """
        if self.anchor is None:
            self.set_weights(mean)
            return
        self.momentum.mul_(config.outer_momentum).add_(mean)
        self.anchor.sub_(mean.add(self.momentum, alpha=config.outer_momentum), alpha=config.outer_lr)
        self.set_weights(self.anchor)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, gradient or state, without copying it. Do not keep a reference to the
    shard, as FSDP may move the parameter's memory in its first step.
    """
    return local_part(formats.plain(parameter.detach()))


def shards(content: dict[str, Any]) -> list[Tensor]:
    """Return this rank's shard of each tensor in a state, in the order of the tensors' names, which is the same in all
    groups.
    """
    return [local(content[name]) for name in sorted(content) if isinstance(content[name], Tensor)]


def fragments_of(model: nn.Module, modules: list[str], config: FaultTolerance) -> list[Fragment]:
    """Divide this rank's parameters into fragments. `modules` are the model's modules in the order in which they run."""
    fragments = [Fragment([]) for _ in range(config.fragments)]
    for name, parameter in model.named_parameters():
        fragments[fragment_of(name, modules, config.fragments)].parameters.append(parameter)
    for fragment in fragments if config.name == "diloco" else []:
        size = sum(local(parameter).numel() for parameter in fragment.parameters)
        fragment.anchor, fragment.momentum = torch.zeros(size), torch.zeros(size)
    return fragments


def fragment_of(name: str, modules: list[str], fragments: int) -> int:
    """Return a parameter's fragment, which depends only on its name and so is the same on every layout. Fragments are
    equal parts of the blocks. Modules before the blocks (the embedding) belong to the first fragment, modules after
    them to the last.
    """
    blocks = places_of_blocks(modules)
    index = place_in_order(name, modules)
    if index is None or index > blocks[-1]:
        return fragments - 1
    return max(index - blocks[0], 0) * fragments // len(blocks)


def due(step: int, last_step: int, config: FaultTolerance) -> list[int]:
    """Return the fragments to average after a step. The fragments take turns, so that each is averaged every sync_every
    steps. After the last step of the run, all are averaged.
    """
    apart = config.sync_every // config.fragments
    if step == last_step:
        return list(range(config.fragments))
    return [] if step % apart else [(step // apart - 1) % config.fragments]
