"""AdamW of split masters: its state, checkpoints and steps are bitwise equal to those of torch's fused AdamW with
float32 weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_hydra.core.kernels.split_masters import update_split
from titan_hydra.core.parallel.mesh import local_part


class SplitAdamW(torch.optim.AdamW):
    """Takes parameters with a `lower_half` (core/parallel/split_masters.py), and gradients of any dtype.

    The constructor creates the state. torch would create it in the dtype of the bfloat16 parameter, and would make an
    optimizer step to create it when a checkpoint is loaded.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, *args: Any, offload: bool = False, **options: Any) -> None:
        """Create the state of every parameter in float32, with `offload` in the host\'s memory."""
        super().__init__(*args, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                place: dict[str, Any] = {"device": "cpu", "pin_memory": parameter.is_cuda} if offload else {}
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.float32, **place),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32, **place),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # our optimizers take no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            tensors = []
            for weight, state in zip(parameters, states, strict=True):
                tensors.append((weight, weight.lower_half, gradient_of(weight), state["exp_avg"], state["exp_avg_sq"]))
            local_tensors = [tuple(map(local_part, of_weight)) for of_weight in tensors]
            beta1, beta2 = group["betas"]
            update_split(
                local_tensors,
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but leave the moments in float32, which torch would cast to the dtype of the
        parameter.
        """
        values = state_dict["state"]
        super().load_state_dict(state_dict | {"state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            self.state[parameter] = dict(values[number])


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, sharded like the parameter. (Tensor parallelism leaves an embedding's gradient
    unsharded.)
    """
    gradient: Any = parameter.grad
    return (
        gradient.redistribute(placements=parameter.placements) if isinstance(parameter, DTensor) else gradient
    ).contiguous()
