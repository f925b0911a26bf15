"""The cases in which a run is saved in the middle and continued by a new trainer. Imports no torch."""

from typing import Any

from .case import EXACT, HALVED, MIXTURE, MOE, MUON, PACKED, SIMPLE, SPLIT, Case, case
from .scaled import MUP

# A bfloat16 layout against float64. The keys in CHANGED_KEYS make a larger difference than its rounding.
COARSE: dict[str, Any] = EXACT | {"loss": 3e-3, "norm": 2e-2, "gradients": 5e-2, "weights": 0.25}
# Whoever loads another run's optimizer trains with keys of his own; that run's moments are all that is loaded. Each of
# these keys changes the weights by more than the bound of any case.
DECAY = "optimizer.weight_decay=40"
CHANGED_KEYS = (
    DECAY,
    "optimizer.beta1=0.5",
    "optimizer.beta2=0.6",
    "optimizer.eps=1e-3",
    "optimizer.max_norm=0.3",
    "optimizer.decay_matrices_only=true",
    "lr_scheduler=cosine",
)
AVERAGED = ("optimizer.ema_decay=0.6", "validation=on", "validation.ema=true")
SHALLOW = ("model.n_layers=2", "model.vocab_size=256")

# fmt: off
CONTINUED: list[Case] = [
    # it learns what an uninterrupted run learns
    *(case(f"{name}, resumed", 2, "parallelism=fsdp", "data.local_batch=4", *more, resumed=True, **options)
      for name, more, options in (
          ("fsdp 2", (), {}), ("fsdp 2, muon", (), MUON), ("split masters, fsdp 2", (), SPLIT),
          ("states offloaded, fsdp 2, muon", ("optimizer.offload=true",), MUON),
          ("states offloaded, fsdp 2, then on the device, tp 2", ("optimizer.offload=true",),
           {"then": ("optimizer.offload=false", "parallelism=tp", "data.local_batch=8")}),
          ("states offloaded, simple_fsdp 2", (SIMPLE, "optimizer.offload=true"), {}),
          ("states offloaded, qwen3_moe, fsdp 2, ep 2", ("parallelism.ep=2", "optimizer.offload=true"), {"base": MOE}),
          ("fsdp 2, documents", (), {"base": (*PACKED, "data.shuffle_buffer=3")}),
          ("fsdp 2, a mixture", (), {"base": MIXTURE}),
          ("whole masters, fsdp 2, then split masters, tp 2", ("optimizer.masters=whole",),
           SPLIT | {"then": ("optimizer.masters=split", "parallelism=tp", "data.local_batch=8")}),
          ("qwen3_moe, fsdp 2, ep 2", ("parallelism.ep=2",), {"base": MOE}))),

    # it learns with its own keys of the optimizer
    *(case(f"{name}, other keys then, against float64", 2, f"parallelism={layout}", f"data.local_batch={16 if layout == 'tp' else 8}",
           *more, resumed=True, **bounds | {"base": (*SHALLOW, *base), "then": then})
      for name, layout, more, base, then, bounds in (
          *((f"{name}{layout} 2", layout, more, (), CHANGED_KEYS, bounds) for name, more, bounds in (
              ("", (), EXACT), ("bf16, ", ("precision=bf16",), COARSE), ("split masters, ", HALVED, COARSE))
            for layout in ("fsdp", "tp")),
          ("sgd, fsdp 2", "fsdp", (), ("optimizer=sgd", "optimizer.sgd_momentum=0.9"), (DECAY, "optimizer.sgd_momentum=0.5"), EXACT),
          ("muon, fsdp 2", "fsdp", (), ("optimizer=muon",), (DECAY, "optimizer.muon_momentum=0.5", "optimizer.muon_lr=0.01"),
           EXACT | {"loss": 3e-4, "norm": 3e-3, "weights": 0.5}),
          ("mup, fsdp 2", "fsdp", (), MUP, CHANGED_KEYS, EXACT))),

    # its average of the weights goes on, and the held-out loss is that of the average
    *(case(f"moving average, {name}, against float64", 2, *overrides, resumed=True, validated=True,
           **bounds | {"base": (*AVERAGED, *SHALLOW, *base), "then": then})
      for name, overrides, base, then, bounds in (
          ("tp 2, then fsdp 2", ("parallelism=tp", "data.local_batch=16"), (), ("parallelism=fsdp", "data.local_batch=4"), EXACT),
          ("fsdp 2, then pp 2", ("parallelism=fsdp", "data.local_batch=8"), (), ("parallelism=pp", "data.local_batch=16"), EXACT),
          ("cp 2", ("parallelism=cp", "data.local_batch=16"), (), (), EXACT),
          ("states offloaded, pp 2, then fsdp 2", ("parallelism=pp", "data.local_batch=16", "optimizer.offload=true"), (),
           ("parallelism=fsdp", "data.local_batch=8"), EXACT),
          ("sgd, ddp 2", ("parallelism=ddp", "data.local_batch=8"), ("optimizer=sgd",), (), EXACT),
          ("bf16, ddp 2", ("parallelism=ddp", "data.local_batch=8", "precision=bf16"), (), (), COARSE),
          ("split masters, fsdp 2", ("parallelism=fsdp", "data.local_batch=8", *HALVED), (), (), COARSE))),
]
# fmt: on
