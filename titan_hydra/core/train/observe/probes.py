"""Examine the inputs and outputs of every module in the forward and in the backward, and the gradients of parameters
(debug=nan_hunt and debug.trace_activations).

    forward   in, out      a module's inputs and outputs
    backward  out, in      gradients of its outputs and inputs, before autograd adds the contributions of other consumers
    gradient               a parameter's gradient, as this rank holds it after the backward and before clipping

Nothing is read back from the device before the step's end. Both options examine only this rank's shard of a tensor, so
that they work in any layout.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_hydra.core.base.private import current_graph_task
from titan_hydra.core.job.config.family import family_of, place_in_order
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.parallel.mesh import local_part

PASSES = ("parameter", "forward", "backward", "gradient")  # passes, in the order in which they occur in a step
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by element size in bytes
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd factor of the checksum, as a signed 64-bit number
LAST = 1 << 30  # the sort position of a module that the family does not list


class Observation(NamedTuple):
    """Identifies an examined tensor: its pass, whether it is an input or an output, its module or parameter, and the
    number of the module's call in this step (with pipeline parallelism, the microbatch).
    """

    when: str
    what: str
    name: str
    call: int


class Probes:
    """Observes the tensors of a step on this rank, if debug.nan_hunt or debug.trace_activations is set."""

    def __init__(self, job: Job, run: Run, model: nn.Module, weights: nn.Module) -> None:
        """Hook the modules of `model`; `weights` holds the parameters of the optimizers."""
        self.config = config = job.debug
        self.run, self.weights = run, weights
        self.modules = family_of(job.model).modules(job.model)
        self.calls: Counter[tuple[str, str, str]] = Counter()  # of (when, what, name) in this step
        self.seen: dict[Observation, Tensor] = {}  # what was measured of each tensor in this step
        if config.nan_hunt or config.trace_activations:
            hook(model, self.observe)
        self.file = layout.ACTIVATIONS.of(run.attempt, run.rank).open("a") if config.trace_activations else None

    @torch.no_grad()
    def observe(self, when: str, what: str, name: str, tensor: Tensor) -> None:
        """Compute a tensor's norm and checksum on the device; with only nan_hunt, compute whether the tensor is finite."""
        local = local_part(tensor)
        call = self.calls[when, what, name]
        self.calls[when, what, name] += 1
        self.seen[Observation(when, what, name, call)] = (
            marks(local) if self.config.trace_activations else finite(local)
        )

    def after_backward(self, step: int) -> None:
        """Examine the gradients. Then write the step's rows to activations_<rank>.jsonl, and keep for `culprit` the
        observations of tensors that are not finite.
        """
        if not (self.config.nan_hunt or self.config.trace_activations):
            return
        for name, parameter in self.weights.named_parameters():
            if parameter.grad is not None:
                self.observe("gradient", "", name, parameter.grad)
        observations, marks_seen = list(self.seen), torch.stack(list(self.seen.values())).tolist()
        if self.file:
            for index, (seen, (norm, high, low)) in enumerate(zip(observations, marks_seen, strict=True)):
                row = {"step": step, "pass": seen.when, "what": seen.what, "module": seen.name, "call": seen.call}
                row |= {"norm": norm if math.isfinite(norm) else str(norm), "hash": f"{int(high):08x}{int(low):08x}"}
                self.file.write(json.dumps(row | {"order": place_in_time(seen, index, self.modules)}) + "\n")
            self.file.flush()
        # The gradients are examined before clipping, because clipping makes all of them NaN if their norm is NaN.
        gradients = {name: parameter.grad for name, parameter in self.weights.named_parameters()}
        self.bad = {
            seen: not_finite_part(gradients.get(seen.name))
            for seen, values in zip(observations, marks_seen, strict=True)
            if not math.isfinite(values[0])
        }
        self.seen.clear()
        self.calls.clear()

    def culprit(self) -> str:
        """Return a phrase that begins with a semicolon and names the first tensor that was not finite; "" unless
        debug=nan_hunt. All ranks must call this together.
        """
        if not self.config.nan_hunt:
            return ""
        bad = {
            Observation("parameter", "", name, 0): not_finite_part(value)
            for name, value in self.weights.named_parameters()
        } | self.bad
        timed = []
        for index, (seen, note) in enumerate(bad.items()):
            if note is not None:
                timed.append((place_in_time(seen, index, self.modules), seen, note))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, min(timed, key=lambda first_of_rank: first_of_rank[0], default=None))
        first_by_rank = {
            rank: first_of_rank for rank, first_of_rank in enumerate(everyone) if first_of_rank is not None
        }
        if not first_by_rank:
            return "; nan_hunt: every module, gradient and parameter is finite, so the loss itself is not"
        when, what, name, _ = min(first_by_rank.values(), key=lambda first_of_rank: first_of_rank[0])[1]
        ranks = [f"{rank}{note}" for rank, (_, seen, note) in first_by_rank.items() if seen[:3] == (when, what, name)]
        where = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
        return f"; nan_hunt: first not finite is {described(when, what, name)}, on {where}"


def not_finite_part(value: Tensor | None) -> str | None:
    """Return in words how many values of a parameter or gradient are not finite on this rank; None if all are finite."""
    if value is None:
        return ""
    local = local_part(value.detach())
    bad = int((~torch.isfinite(local)).sum())
    return f" ({bad:,} of {local.numel():,} values there)" if bad else None


def hook(model: nn.Module, observe: Callable[[str, str, str, Tensor], None]) -> None:
    """Make every module of a model call `observe(pass, what, module, tensor)` in training. A module that is used in
    several places (rotary embeddings) has no unique name and is skipped; a fault in its output is found in the input of
    the next module.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        if name and uses[id(module)] == 1:
            module.register_forward_pre_hook(partial(_entering, name, observe))
            module.register_forward_hook(partial(_leaving, name, observe))


def _entering(name: str, observe: Callable[..., Any], module: nn.Module, args: tuple) -> tuple | None:
    """Observe what enters a module and, in the backward, the gradient that leaves it. Returns the arguments to use
    instead.
    """
    if not _counts(module):
        return None
    passed = []
    for value in args:
        if _floating(value):
            observe("forward", "in", name, value)
            if value.requires_grad:
                # the hook needs a separate view: the view's gradient comes only from this module, and not from other
                # modules that read the tensor
                value = value.view_as(value)
                value.register_hook(partial(observe, "backward", "in", name))
        passed.append(value)
    return tuple(passed)


def _leaving(name: str, observe: Callable[..., Any], module: nn.Module, args: tuple, output: Any) -> None:
    if _counts(module) and _floating(output):
        observe("forward", "out", name, output)
        if output.requires_grad:
            output.register_hook(partial(observe, "backward", "out", name))


def _counts(module: nn.Module) -> bool:
    """Whether a module is called in the forward of a training step, and not in a validation or a recomputation."""
    return module.training and current_graph_task() == -1


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def finite(local: Tensor) -> Tensor:
    """Return [0] if all of a tensor is finite, else [nan]."""
    return torch.where(torch.isfinite(local).all(), 0.0, torch.nan).double().reshape(1)


def marks(local: Tensor) -> Tensor:
    """Return [norm, upper half, lower half]. The halves are those of a 64-bit checksum, which changes if any single bit
    changes.
    """
    norm = (
        torch.linalg.vector_norm(local, dtype=torch.float64) if local.numel() else torch.zeros((), dtype=torch.float64)
    )
    bits = local.contiguous().view(INTEGERS[local.element_size()]).flatten().to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) * 2 + 1
    sums = (bits * (weights * ODD)).sum()  # integer sums wrap around, so the order of the additions makes no difference
    halves = torch.stack([sums >> 32 & 0xFFFFFFFF, sums & 0xFFFFFFFF]).double()
    return torch.cat([norm.reshape(1).to(halves), halves])


def place_in_time(seen: Observation, index: int, modules: list[str]) -> tuple:
    """Return a key that sorts the observations of all ranks by time: (pass, call, position of the module in the model,
    position among this rank's observations). In the backward, the module's position is negative.
    """
    index_of_module = place_in_order(seen.name, modules)
    index_of_module = LAST if index_of_module is None else index_of_module
    backwards = seen.when in ("backward", "gradient")
    return (
        PASSES.index(seen.when),
        seen.call,
        -index_of_module if backwards else index_of_module,
        -index if seen.when == "gradient" else index,
    )


def described(when: str, what: str, name: str) -> str:
    """Return in words which tensor an observation is about, for a message."""
    if when in ("parameter", "gradient"):
        module, _, leaf = name.rpartition(".")
        return f"{'the gradient of ' if when == 'gradient' else ''}parameter {leaf} of module {module} ({name})"
    way = {
        ("forward", "in"): "what enters",
        ("forward", "out"): "what comes out of",
        ("backward", "out"): "the gradient that enters the backward of",
        ("backward", "in"): "what comes out of the backward of",
    }
    return f"{way[when, what]} module {name}"
