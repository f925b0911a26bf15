"""Functions that number formats share: which linears are converted, the report, and the hardware that a format needs."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.registry import FORMATS
from titan_hydra.core.job.config.schema import Precision


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings while torchao is imported: every rank would print warnings about libraries for other hardware."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def needs_hardware(
    precision: Precision,
    device: torch.device,
    first: tuple[int, int],
    layers: str,
    cards: str,
    nearest: str,
    before: tuple[int, int] | None = None,
) -> None:
    """Raise ConfigError unless this rank's device computes in the format: a GPU whose capability is at least `first`
    and, if `before` is given, less than `before`.
    """
    here = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if here is None or here < first or (before and here >= before):
        runs_on = "the CPU" if here is None else f"a GPU of capability {here[0]}.{here[1]}"
        end = f" and before {before[0]}.{before[1]}" if before else ""
        raise ConfigError(
            f"precision={precision.name}: {layers} matmuls need a GPU of capability {first[0]}.{first[1]} or later{end} "
            f"({cards}), and this rank runs on {runs_on}; nearest legal: {nearest}"
        )


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes exactly what nn.Linear does. Replacing any other module would change its result without
    an error.
    """
    return type(module).forward is nn.Linear.forward


def select_linears(model: nn.Module, precision: Precision) -> tuple[list[str], dict[str, str]]:
    """Return the names of the linears and of the stacked experts to convert, and the names of the others with the reason.
    Raises ConfigError if none has a name to skip.

    A linear is left out if its name contains one of `precision.skip` (`wk`: those of every block; `layers.0.`: a whole
    block), if its dimensions are not multiples of the format's step, if it is the head, or if its class has its own
    forward. It is also left out in a module with `per_sample`, which gets one row for each sample: the matmul for the
    weight's gradient sums over these rows, and kernels need a multiple of the step there too.
    """
    format = FORMATS[precision.converter]
    step, parts = format.step, format.parts(precision)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    experts = {name for name, module in model.named_modules() if any(p.dim() == 3 for p in module.parameters(False))}
    for part in precision.skip:
        if not any(part in name for name in (*names, *experts)):
            raise ConfigError(f"precision.skip={part}: no linear's name contains it; one of {', '.join(kinds(names))}")
    per_sample = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "per_sample", False))
    reasons = {}
    for name in names:
        module = model.get_submodule(name)
        if "linears" not in parts:
            reasons[name] = f"linears, computed in {precision.compute_dtype}"
        elif module is model.output:
            reasons[name] = "the head"
        elif any(part in name for part in precision.skip):
            reasons[name] = "precision.skip"
        elif not is_plain(module):
            reasons[name] = f"a {type(module).__name__}, with a forward of its own"
        elif module.in_features % step or module.out_features % step:
            reasons[name] = f"{module.in_features} x {module.out_features} is not in steps of {step}"
        elif name.startswith(per_sample):
            reasons[name] = "one row a sample"
    for name in sorted(experts):
        if "experts" not in parts:
            reasons[name] = f"grouped matmuls, computed in {precision.compute_dtype}"
        elif any(part in name for part in precision.skip):
            reasons[name] = "precision.skip"
        elif "format" not in vars(type(model.get_submodule(name))):
            reasons[name] = f"a {type(model.get_submodule(name)).__name__}, with a forward of its own"
    chosen = [name for name in (*names, *sorted(experts)) if name not in reasons]
    if not chosen:
        raise ConfigError(
            f"precision={precision.name}: converts nothing ({'; '.join(grouped(reasons))}); nearest legal: bf16"
        )
    return chosen, reasons


def report_linears(format: str, chosen: list[str], left: dict[str, str], what: str = "linears") -> list[str]:
    """Return lines for the log: how many modules were converted, which, and why the others were not."""
    return [
        f"{format}: {len(chosen)} {what} converted: {', '.join(kinds(chosen))}; {len(left)} not: {', '.join(grouped(left))}"
    ]


def grouped(left: dict[str, str]) -> list[str]:
    """Return one text for each reason, with the names to which the reason applies."""
    return [
        f"{', '.join(kinds(name for name in left if left[name] == reason))} ({reason})"
        for reason in dict.fromkeys(left.values())
    ]


def kinds(names: Iterable[str]) -> list[str]:
    """Return the names with `*` in place of the block's number, and how often each occurs."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
