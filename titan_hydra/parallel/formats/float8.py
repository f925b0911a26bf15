"""Float8 linears (torchao): which are converted, how tensor parallelism splits them, and how FSDP gathers them."""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_hydra.base.errors import ConfigError
from titan_hydra.base.private import without_wrapper
from titan_hydra.config.schema import Job, Precision
from titan_hydra.parallel.mesh import Mesh
from titan_hydra.parallel.plans import Linears

STEP = 16  # Float8 matmuls take dimensions in steps of 16


def convert(model: nn.Module, job: Job, mesh: Mesh, device: torch.device) -> list[str]:
    """Convert the linears of a meta-device model to torchao's Float8Linear, in place; parameters keep names, dtype and values.

    Returns a report of what was and was not converted. Raises ConfigError if this device has no Float8 matmuls, or the dimensions of a
    rank's shard do not suit them.
    """
    precision = job.precision
    if not precision.emulate:
        needs_hardware(precision, device, (8, 9), "Float8", "H100, H200 or L40", "precision=float8_emulate")
    chosen, left = select(model, precision, STEP)
    if not precision.emulate:
        parts_suit(model, chosen, mesh.degrees.tp)
    with quietly():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    recipe = Float8LinearConfig.from_recipe_name(precision.recipe)
    gather = precision.float8_all_gather and mesh.degrees.dp_shard * mesh.degrees.cp > 1  # without shards nothing is gathered
    config = dataclasses.replace(recipe, emulate=precision.emulate, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
    return report(f"float8 {precision.recipe}{' (emulated)' * precision.emulate}", chosen, left)


def after_step(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP gathers as Float8, with one reduction over ranks instead of one for each weight."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain(weight: Tensor) -> Tensor:
    """Return a weight without the wrapper for FSDP's Float8 gather, in the same memory: checkpoints are independent of the number format.
    """
    inner = without_wrapper(weight.to_local()) if isinstance(weight, DTensor) else None
    if inner is None:
        return weight
    return DTensor.from_local(inner, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride())


def linears(job: Job) -> Linears:
    """Return the styles with which tensor parallelism splits linears. Tensorwise scaling casts before the ranks gather, which halves the
    bytes.

    The scale of a row needs the whole row, so the rowwise recipes gather in the compute dtype, as plain linears do. So does emulation: it
    is for gloo, which cannot gather Float8.
    """
    precision = job.precision
    if precision.converter != "float8" or precision.recipe != "tensorwise" or precision.emulate:
        return Linears()
    return float8_linears()


def float8_linears() -> Linears:
    """Return torchao's styles, which gather Float8."""
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

    return Linears(Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings while torchao is imported: every rank would print those about libraries for other hardware."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def needs_hardware(precision: Precision, device: torch.device, capability: tuple[int, int], what: str, cards: str, nearest: str) -> None:
    """Raise ConfigError unless this rank's device computes in the format."""
    here = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if here is None or here < capability:
        runs_on = "the CPU" if here is None else f"a GPU of capability {here[0]}.{here[1]}"
        raise ConfigError(f"precision={precision.name}: {what} matmuls need a GPU of capability {capability[0]}.{capability[1]} or later "
                          f"({cards}), and this rank runs on {runs_on}; nearest legal: {nearest}")


def select(model: nn.Module, precision: Precision, step: int) -> tuple[list[str], dict[str, str]]:
    """Return the names of the linears to convert, and the others with the reason. Raises ConfigError if no linear matches a name to skip.

    A linear is left out if its name contains one of `precision.skip` (`wk`: every block's; `layers.0.`: a whole block), if its dimensions
    are not multiples of `step`, or if it is the head, whose logits decide the loss.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for part in precision.skip:
        if not any(part in name for name in names):
            raise ConfigError(f"precision.skip={part}: no linear's name contains it; nearest legal: {', '.join(kinds(names))}")
    left = {}
    for name in names:
        module = model.get_submodule(name)
        if module is model.output:
            left[name] = "the head"
        elif any(part in name for part in precision.skip):
            left[name] = "precision.skip"
        elif module.in_features % step or module.out_features % step:
            left[name] = f"{module.in_features} x {module.out_features} is not in steps of {step}"
    chosen = [name for name in names if name not in left]
    if not chosen:
        raise ConfigError(f"precision={precision.name}: converts no linear ({'; '.join(grouped(left))}); nearest legal: bf16")
    return chosen, left


def parts_suit(model: nn.Module, chosen: list[str], ranks: int) -> None:
    """Raise ConfigError if a tensor-parallel rank's shard of a converted linear is not in steps of 16."""
    for name in chosen:
        module = model.get_submodule(name)
        for width in (module.in_features, module.out_features):
            if width % (STEP * ranks):
                raise ConfigError(f"parallelism.tp={ranks}: a rank's part of {name} ({module.in_features} x {module.out_features}) would "
                                  f"not be in steps of {STEP}, which Float8 matmuls need; nearest legal: {width // STEP} or its divisors")


def report(format: str, chosen: list[str], left: dict[str, str]) -> list[str]:
    """Return lines for the log: how many linears were converted and which, and the others with the reason."""
    return [f"{format}: {len(chosen)} linears converted: {', '.join(kinds(chosen))}; {len(left)} not: {', '.join(grouped(left))}"]


def grouped(left: dict[str, str]) -> list[str]:
    """Return one text for each reason, with the names that share it."""
    return [f"{', '.join(kinds(name for name in left if left[name] == reason))} ({reason})" for reason in dict.fromkeys(left.values())]


def kinds(names: Iterable[str]) -> list[str]:
    """Return the names with `*` in place of the block's number, and how often each occurs."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
