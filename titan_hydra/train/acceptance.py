"""The acceptance matrix: every layout that must learn what one process learns, one line each. Imports no torch."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A layout to be proven on `ranks` gloo ranks. `overrides` make it; `base` goes to the one-process reference as well.

    `uneven_mask`: a quarter r of the global batch has r * 17 % of its labels ignored. Tolerances are relative; `gradients` is that
    of the worst parameter at the first step.
    """

    name: str
    ranks: int
    overrides: tuple[str, ...]
    base: tuple[str, ...] = ()
    uneven_mask: bool = False
    loss: float = 1e-5
    norm: float = 1e-5
    gradients: float = 1e-5


def case(name: str, ranks: int, *overrides: str, **options) -> Case:
    """A case on as many ranks as the layout takes."""
    return Case(name, ranks, (f"gpus={ranks}", *overrides), **options)


EVEN = {"uneven_mask": True, "loss": 1e-6, "norm": 1e-6, "gradients": 1e-5}
ODD = {"base": ("model.vocab_size=2047",)}

MATRIX = [
    *(case(f"{layout} {ranks}", ranks, f"parallelism={layout}", f"data.local_batch={16 // ranks}")
      for layout in ("ddp", "fsdp", "hsdp") for ranks in (2, 4)),
    case("fsdp 4, always reshard", 4, "parallelism=fsdp", "data.local_batch=4", "parallelism.reshard_after_forward=always"),
    case("fsdp 4, never reshard", 4, "parallelism=fsdp", "data.local_batch=4", "parallelism.reshard_after_forward=never"),
    *(case(f"{layout} 4, accumulation {steps}", 4, f"parallelism={layout}", f"data.local_batch={4 // steps}")
      for layout in ("ddp", "fsdp", "hsdp") for steps in (2, 4)),
    case("single, accumulation 4", 1, "parallelism=single", "data.local_batch=4"),
    *(case(f"{layout} 4, vocabulary 2047", 4, f"parallelism={layout}", "data.local_batch=4", **ODD) for layout in ("ddp", "fsdp", "hsdp")),
    *(case(f"{layout} 4, uneven mask", 4, f"parallelism={layout}", "data.local_batch=4", **EVEN) for layout in ("ddp", "fsdp", "hsdp")),
    case("fsdp 4, uneven mask, accumulation 4", 4, "parallelism=fsdp", "data.local_batch=1", **EVEN),
    case("fsdp 2, tied embeddings", 2, "parallelism=fsdp", "data.local_batch=8", base=("model.tie_embeddings=true",)),
    case("hsdp 4, muon", 4, "parallelism=hsdp", "data.local_batch=4", base=("optimizer=muon",), loss=1e-4, norm=1e-3),
]
