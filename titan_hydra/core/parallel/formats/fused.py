"""Float8 linears whose casts are our own kernels (precision.kernels=fused). The kernels also compute the norm and SwiGLU
around the linears, if the model's layers declare these: `normed`, `projections`, `gated` (core/models/layers.py).

A declaration holds for the class that makes it, and not for subclasses, which may compute something else. Each linear of
a subclass is cast by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.kernels.float8_units import Float8Linears, Float8SwiGLU

from .select import kinds


class Normed(NamedTuple):
    """The input, weight and epsilon of an RMSNorm that the module after it is to compute."""

    x: Tensor
    weight: Tensor | None = None
    eps: float = 0.0


class DeferredNorm(nn.RMSNorm):
    """An RMSNorm that computes nothing and returns its arguments; the module after it computes the norm."""

    def forward(self, x: Tensor) -> Normed:  # type: ignore[override]
        return Normed(x, self.weight, self.eps)


class FusedLinear(nn.Linear):
    """A linear that casts its own input, which no other linear shares."""

    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        y = Float8Linears.apply(x, None, 0.0, self.emulate, self.weight)
        return y if self.bias is None else y + self.bias


@cache
def projecting(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose `project` computes all of the class's `projections`, and casts their common input only
    once. The subclass has the name of its class.
    """

    def project(self: Any, x: Tensor | Normed) -> tuple[Tensor, ...]:
        weights = [getattr(self, name).weight for name in kind.projections]
        y = Float8Linears.apply(*pending(x), self.emulate, *weights)
        return y.split([len(weight) for weight in weights], -1)

    return type(kind.__name__, (kind,), {"project": project, "__module__": kind.__module__})


@cache
def gating(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward computes the whole SwiGLU."""

    def forward(self: Any, x: Tensor | Normed) -> Tensor:
        return Float8SwiGLU.apply(*pending(x), self.emulate, *(getattr(self, name).weight for name in kind.gated))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


JOINED: tuple[tuple[str, Callable[..., type]], ...] = (("projections", projecting), ("gated", gating))


def pending(x: Tensor | Normed) -> Normed:
    """Return an input, and the norm that the module must still compute for it, if any."""
    return x if isinstance(x, Normed) else Normed(x)


def fuse(model: nn.Module, chosen: list[str], emulate: bool) -> list[str]:
    """Make the chosen linears of a meta-device model cast with our kernels, in place; the parameters do not change.
    Return lines for the log. Raises ConfigError if the compiler of the kernels is not installed and `emulate` is false.
    """
    if not emulate and find_spec("triton") is None:
        raise ConfigError(
            "precision.kernels=fused: the package triton, which compiles them, is not installed; nearest legal: torchao"
        )
    modules: dict[str, Any] = dict(model.named_modules())
    names = {modules[name]: name for name in chosen}
    joined: dict[nn.Module, str] = {}
    for name, module in modules.items():
        for attribute, change in JOINED:
            parts = declared(module, attribute)
            linears = [getattr(module, part) for part in parts]
            if parts and all(linear in names and linear.bias is None for linear in linears):
                module.__class__, module.emulate = change(type(module)), emulate
                joined[module] = f"{name}.{'+'.join(parts)}"
                for linear in linears:
                    del names[linear]
    for linear in names:
        linear.__class__, linear.emulate = FusedLinear, emulate
    for module in modules.values():
        for norm, reader in declared(module, "normed").items():
            if getattr(module, reader) in joined and type(getattr(module, norm)) is nn.RMSNorm:
                getattr(module, norm).__class__ = DeferredNorm
                joined[getattr(module, reader)] += f" after {norm}"
    return [
        f"cast together: {', '.join(kinds(joined.values())) or 'none'}; each by itself: {', '.join(kinds(names.values())) or 'none'}"
    ]


def declared(module: nn.Module, attribute: str) -> Any:
    """Return an attribute that a module's own class declares, not a base class; () or {} if the class does not declare
    it.
    """
    return vars(type(module)).get(attribute, {} if attribute == "normed" else ())
