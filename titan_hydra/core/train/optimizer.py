"""Optimizers and the learning rate. The rate is a pure function of the step, so that a resumed run needs no state of a
scheduler.
"""

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_hydra.core.base.private import foreach_div, scales_gradients
from titan_hydra.core.job.config.parts import SGD, AdamW, Decay, MuonAndAdamW, StableDecay
from titan_hydra.core.job.config.registry import LR_SCHEDULES, OPTIMIZERS, resolve
from titan_hydra.core.job.config.schema import LrSchedule, Optimizer
from titan_hydra.core.job.parametrization import RateFactors, Rules
from titan_hydra.core.models.init import clean_name
from titan_hydra.core.parallel.mesh import Mesh, local_part

from .muon import Muon
from .split_adamw import SplitAdamW


def build_optimizers(
    model: nn.Module, config: Optimizer, mesh: Mesh, rules: Rules | None = None
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a model's parameters, as the record of the chosen `optimizer.name` defines. `rules` are
    those of the job's parametrization; without `rules`, the parametrization is standard. A group's option `built` has
    all options that training must not change; what it changes nevertheless is state (core/checkpoint/state.py).
    """
    optimizers = resolve(OPTIMIZERS[config.name].build)(model, config, mesh)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        if rules is not None:
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in groups_by_factors(group, names, rules)
            ]
        for group in optimizer.param_groups:
            group["built"] = copy.deepcopy({key: group[key] for key in group if key not in ("params", "lr")})
            group["peak_lr"] = group["lr"]
    return optimizers


SCALED_OPTIONS = ("lr", "weight_decay", "eps")  # options of a parameter group, in the order of RateFactors


def groups_by_factors(group: dict[str, Any], names: dict[nn.Parameter, str], rules: Rules) -> list[dict[str, Any]]:
    """Split a parameter group into one group for each set of factors, and multiply the options of each group by its
    factors.
    """
    orthogonal = "ns_steps" in group  # Muon's iterations
    parts: dict[RateFactors, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        factors = rules.factors(clean_name(names[parameter]), parameter.shape, orthogonal)
        parts.setdefault(factors, []).append(parameter)
    return [
        group
        | {key: group[key] * factor for key, factor in zip(SCALED_OPTIONS, factors, strict=True) if key in group}
        | {"params": parameters}
        for factors, parameters in parts.items()
    ]


def adamw(model: nn.Module, config: AdamW, mesh: Mesh) -> list[torch.optim.Optimizer]:
    """Build AdamW for all parameters."""
    return [_adamw(list(model.parameters()), config)]


def muon(model: nn.Module, config: MuonAndAdamW, mesh: Mesh) -> list[torch.optim.Optimizer]:
    """Build Muon for the matrices of the blocks (stacked ones too), and AdamW for all other parameters."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and name.startswith("layers.") else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [_adamw(others, config)]
    if matrices:
        optimizers.append(
            Muon(
                matrices, mesh.stage, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=config.weight_decay
            )
        )
    return optimizers


def sgd(model: nn.Module, config: SGD, mesh: Mesh) -> list[torch.optim.Optimizer]:
    """Build SGD for all parameters. It is not fused, as torch's fused SGD does not support DTensors."""
    return [
        torch.optim.SGD(
            _groups(list(model.parameters()), config),
            lr=config.lr,
            momentum=config.sgd_momentum,
            weight_decay=config.weight_decay,
        )
    ]


def _adamw(parameters: list[nn.Parameter], config: AdamW) -> torch.optim.AdamW:
    """Build AdamW, of which parameters without weight decay are a group of their own."""
    kind: Any = partial(SplitAdamW, offload=config.offload) if config.masters == "split" else torch.optim.AdamW
    return kind(
        _groups(parameters, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _groups(parameters: list[nn.Parameter], config: Optimizer) -> list[dict]:
    """Return the parameter groups. Norms have their own group if they are exempt from weight decay."""
    if not config.decay_matrices_only:
        return [{"params": parameters}]
    matrices, others = ([p for p in parameters if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def step(optimizers: list[torch.optim.Optimizer], divisor: torch.Tensor, finite: torch.Tensor) -> None:
    """Update the weights by the gradients / `divisor`, unless `finite` is false; both are scalars on the device.
    torch's fused optimizers, and Muon, use both scalars within the update, without a host synchronization. For other
    optimizers, the gradients are divided in place, and the host waits for `finite`.
    """
    for optimizer in optimizers:
        if scales_gradients(optimizer):
            fused: Any = optimizer  # it has the two attributes that AMP sets on fused optimizers
            fused.grad_scale, fused.found_inf = divisor, (~finite).float()
        elif finite:
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
            foreach_div([local_part(gradient) for gradient in gradients if gradient is not None], divisor)
        else:
            continue
        optimizer.step()


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> float:
    """Set every group's rate to its peak rate times `factor`. Return the rate that is logged: that of a group without
    factors of its own.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return optimizers[0].defaults["lr"] * factor


def lr_factor(step: int, steps: int, config: LrSchedule) -> float:
    """Return a step's learning rate relative to the peak: linear warm-up, then the schedule `lr_scheduler.name`.

    The last warm-up step has the full rate.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    return resolve(LR_SCHEDULES[config.name].factor)(step, steps, config)


def constant(step: int, steps: int, config: LrSchedule) -> float:
    """Return the peak rate."""
    return 1.0


def cosine(step: int, steps: int, config: Decay) -> float:
    """Return the rate of a half-period of a cosine, which lasts from the end of the warm-up to the last step."""
    return _decay(step, steps, config, steps - config.warmup_steps, "cosine")


def wsd(step: int, steps: int, config: StableDecay) -> float:
    """Return the peak rate until the last `decay_ratio` of the steps, then a decay of the shape `decay_type`."""
    return _decay(step, steps, config, round(steps * config.decay_ratio), config.decay_type)


def _decay(step: int, steps: int, config: Decay, decay_steps: int, shape: str) -> float:
    """Return the rate of a decay over the last steps, as in TorchTitan 0.2.2. It is computed as if one more step followed,
    so that the last step has a rate above 0.
    """
    decay_steps = min(decay_steps, steps - config.warmup_steps)
    if step <= steps + 1 - decay_steps:
        return 1.0
    left = (steps + 1 - step) / decay_steps  # `left` is below 1 once the decay has begun, and above 0 at the last step
    share = {"linear": left, "sqrt": 1 - math.sqrt(1 - left), "cosine": 0.5 * (1 - math.cos(math.pi * left))}[shape]
    return config.min_factor + (1 - config.min_factor) * share
