"""An exponential moving average (EMA) of the trained weights. It is a state of each parameter in its optimizer, in float32,
so that it is sharded, saved, resumed and resharded like the optimizer's other states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.core.parallel.split_masters import master_of, set_master

STATE = "ema"  # name of the average in a parameter's state
COUNT = "ema_steps"  # option of a parameter group: number of steps in the averages

Optimizers = Sequence[torch.optim.Optimizer]


def follow_weights(optimizers: Optimizers, decay: float) -> None:
    """Keep an average of the weights of these optimizers from now on: after step s,
    average = d * average + (1 - d) * weights, with d = min(decay, (s - 1) / s). So the average begins as the mean of all
    steps, and does not depend on the initial weights. A step whose gradients are not finite leaves it as it is.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group[COUNT] = 0
            for parameter in group["params"]:
                if parameter in optimizer.state:  # an optimizer that has its states at once makes no step to load them
                    optimizer.state[parameter][STATE] = torch.zeros_like(master_of(parameter))
        optimizer.register_step_post_hook(partial(_follow, decay=decay))


@torch.no_grad()
def _follow(optimizer: Any, args: Any, options: Any, decay: float) -> None:
    """Move each weight's average towards the weight, after a step. During the first steps it is a plain mean, as 1 /
    count is the larger share; an update that the optimizer skipped does not count.
    """
    # `optimizer.step` of core/train sets it for an optimizer that skips a step itself
    skipped = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        group[COUNT] += 1
        share: Any = max(1 - decay, 1 / group[COUNT]) * (1 if skipped is None else 1 - skipped)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            weight, state = master_of(parameter), optimizer.state[parameter]
            if STATE not in state:
                state[STATE] = torch.zeros_like(weight)
            local_part(state[STATE]).lerp_(local_part(weight), share)


@contextmanager
def averaged_weights(model: nn.Module, optimizers: Optimizers) -> Iterator[None]:
    """Within the context, the weights of the optimizers are the averages, and the averages are the weights. No memory is
    allocated but that of one parameter's shard.
    """
    _swap(model, optimizers)
    try:
        yield
    finally:
        _swap(model, optimizers)


@torch.no_grad()
def _swap(model: nn.Module, optimizers: Optimizers) -> None:
    """Exchange each weight with its average."""
    for optimizer in optimizers:
        states: dict[Any, Any] = optimizer.state
        for parameter, state in states.items():
            if STATE in state:
                average, weight = local_part(state[STATE]), local_part(master_of(parameter)).clone()
                set_master(parameter, average.to(weight.device))  # with optimizer.offload it is on the host
                average.copy_(weight)
    # FSDP may have kept whole parameters after the last forward
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
