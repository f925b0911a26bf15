"""The cases of parametrization=mup: factors by parameter, and scales in the forward, on every layout. Imports no torch."""

from typing import Any

from .case import (
    BF16,
    COMPILED,
    EXACT,
    HALVED,
    LATENT,
    LINEAR,
    MOE,
    MUON,
    QWEN,
    SAME,
    SIMPLE,
    SPARSE,
    SPLIT,
    Case,
    case,
)

# With these bases, the models are wider and deeper and have wider heads, so that all factors and scales differ from 1.
MUP = (
    "parametrization=mup",
    "parametrization.base_dim=24",
    "parametrization.base_head_dim=3",
    "parametrization.base_layers=3",
)

MUON_IN_BF16: dict[str, Any] = {
    "loss": 3e-4,
    "norm": 3e-3,
    "weights": 0.5,
}  # Muon's iterations are in bfloat16, whose rounding sends a few tokens to other experts

# fmt: off
SCALED: list[Case] = [
    *(case(f"mup, {name}, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | {"base": (*base, *MUP)} | more)
      for name, base, more in (
          ("llama3", ("optimizer.max_norm=0.1", "optimizer.weight_decay=0.5", "optimizer.eps=1e-4"), {}),
          ("llama3, tied", ("model.tie_embeddings=true", "optimizer.eps=1e-4"), {"uneven_mask": True, "documents": True}),
          ("qwen3", QWEN, {"slow": True}), ("qwen3_moe", (*MOE, "optimizer.eps=1e-4"), {}),
          ("deepseek_v3", (*LATENT, "optimizer.eps=1e-4"), {}),
          ("llama3, muon", ("optimizer=muon", "lr_scheduler.warmup_steps=1"), MUON_IN_BF16),
          ("qwen3_moe, muon", (*MOE, "optimizer=muon"), MUON_IN_BF16 | {"weights": 0.8, "routing": False, "slow": True}))),
    case("mup, linear_cross_entropy, against float64", 1, "parallelism=single", "data.local_batch=4", *LINEAR, **EXACT | {"base": MUP}),
    *(case(f"mup, {layout} 2", 2, f"parallelism={layout}", f"data.local_batch={batch}", *more, base=MUP)
      for layout, batch, *more in (("fsdp", 8), ("tp", 16), ("pp", 16), ("cp", 16, "parallelism.cp_rotate=ulysses"))),
    case("mup, fsdp 2, against float64", 2, "parallelism=fsdp", "data.local_batch=4", **EXACT | {"base": (*MUP, "optimizer.eps=1e-4")}),
    case("mup, cp 2, allgather", 2, "parallelism=cp", "data.local_batch=16", slow=True, base=MUP),
    case("mup, fsdp 4, tp 2, tied embeddings, compile", 4, "parallelism=fsdp_tp", *COMPILED, "data.local_batch=8",
         base=(*MUP, "model.tie_embeddings=true")),
    case("mup, tp 2, linear_cross_entropy", 2, "parallelism=tp", *LINEAR, "data.local_batch=16", **SAME, slow=True, base=MUP),
    case("mup, simple_fsdp 2", 2, "parallelism=fsdp", SIMPLE, "data.local_batch=8", slow=True, base=MUP),
    case("mup, qwen3, fsdp 4, pp 2, zbv", 4, "parallelism=fsdp_pp", "pp_schedule=zbv", "data.local_batch=8", base=(*QWEN, *MUP)),
    *(case(f"mup, {family}, fsdp 2, ep 2", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=8", base=(*base, *MUP),
           slow=family == "qwen3_moe") for family, base in SPARSE),
    case("mup, fsdp 2, muon", 2, "parallelism=fsdp", "data.local_batch=8", **MUON | {"base": (*MUP, "optimizer=muon")}),
    case("mup, fsdp 2, resumed", 2, "parallelism=fsdp", "data.local_batch=4", resumed=True, base=MUP),
    *(case(f"mup, bf16, {layout} 2", 2, f"parallelism={layout}", f"data.local_batch={batch}", slow=layout != "fsdp",
           **BF16 | {"base": (*MUP, "precision=bf16")}) for layout, batch in (("fsdp", 8), ("tp", 16), ("pp", 16))),
    case("mup, split masters, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", slow=True, **SPLIT | {"base": (*MUP, *HALVED)}),
]
# fmt: on
