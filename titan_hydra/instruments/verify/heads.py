"""The cases of QK-clip and of multi-token prediction, against float64. Imports no torch."""

from .case import COMPILED, EXACT, HALVED, LATENT, PACKED, SIMPLE, Case, case
from .continued import COARSE

# Most heads have larger logits than these thresholds, some have not, in the first steps and in the last.
LIMITED = ("model.n_layers=2", "model.vocab_size=256", "optimizer.qk_clip=0.115")
OWN_KEYS = (*LIMITED, "model.n_kv_heads=8")
LATENTS = (*LATENT, "model.n_layers=2", "model.vocab_size=256", "optimizer.qk_clip=0.045")
TP, PP, CP = (
    ("parallelism=tp", "data.local_batch=16"),
    ("parallelism=pp", "data.local_batch=8"),
    ("parallelism=cp", "data.local_batch=16"),
)
FSDP = ("parallelism=fsdp", "data.local_batch=4")
IN_BF16 = "precision=bf16"
FURTHER = (*LATENT, "model.n_layers=2", "model.vocab_size=256", "model.mtp=2", "model.mtp_weight=0.7")

# fmt: off
HEADS: list[Case] = [
    *(case(f"qk_clip, {name}, against float64", 4 if "4" in name else 2, *overrides, slow="4" in name, **bounds | {"base": base})
      for name, overrides, base, bounds in (
          ("fsdp 2, accumulation 2", FSDP, LIMITED, EXACT),
          ("tp 2", TP, LIMITED, EXACT),
          ("tp 2, a key for each head", TP, OWN_KEYS, EXACT),
          ("simple_fsdp 2, ac full", (*FSDP, SIMPLE, "ac=full"), OWN_KEYS, EXACT),
          ("pp 2, zbv", (*PP, "pp_schedule=zbv"), (*LIMITED, "model.n_layers=4"), EXACT),
          ("cp 2, allgather", (*CP, "parallelism.cp_rotate=allgather", "ac=op"), LIMITED, EXACT),
          ("cp 2, alltoall in order", (*CP, "parallelism.cp_rotate=alltoall", "parallelism.cp_load_balance=false"), LIMITED, EXACT),
          ("cp 2, ulysses, documents", (*CP, "parallelism.cp_rotate=ulysses"),
           (*PACKED, *LIMITED, "model.vocab_size=4096"), EXACT),
          ("fsdp 2, packed documents", FSDP, (*PACKED, *LIMITED, "model.vocab_size=4096"), EXACT),
          ("fsdp 2, compile, ac lean", (*FSDP, *COMPILED, "ac=lean"), LIMITED, EXACT),
          ("fsdp 4, tp 2", ("parallelism=fsdp_tp", "data.local_batch=8"), OWN_KEYS, EXACT),
          ("bf16, fsdp 2", (*FSDP, IN_BF16), LIMITED, COARSE),
          ("bf16, tp 2", (*TP, IN_BF16), OWN_KEYS, COARSE),
          ("bf16, pp 2", (*PP, IN_BF16), LIMITED, COARSE),
          ("bf16, cp 2, alltoall", (*CP, IN_BF16), LIMITED, COARSE),
          ("split masters, fsdp 2", (*FSDP, *HALVED), OWN_KEYS, COARSE),
          ("sgd, ddp 2", ("parallelism=ddp", "data.local_batch=8"), (*LIMITED, "optimizer=sgd"), EXACT),
          ("muon, fsdp 2", FSDP, (*OWN_KEYS, "optimizer=muon"), EXACT | {"loss": 3e-4, "norm": 3e-3, "weights": 0.5}),
          ("deepseek_v3, fsdp 2, ep 2", (*FSDP, "parallelism.ep=2"), LATENTS, EXACT),
          ("deepseek_v3, tp 2, no latent of queries", TP, (*LATENTS, "model.q_lora_rank=0"), EXACT),
          ("deepseek_v3, pp 2", PP, LATENTS, EXACT),
          ("deepseek_v3, cp 2", CP, LATENTS, EXACT))),
    case("qk_clip, moving average, tp 2, then fsdp 2, against float64", 2, *TP, resumed=True, validated=True, then=FSDP,
         **EXACT | {"base": (*LIMITED, "optimizer.ema_decay=0.6", "validation=on", "validation.ema=true")}),

    *(case(f"mtp 2, {name}, against float64", 4 if "4" in name else 2, *overrides, slow="4" in name,
           **{"validated": True} | bounds | {"base": (*FURTHER, *base)})
      for name, overrides, base, bounds in (
          ("fsdp 2, ep 2, accumulation 2", (*FSDP, "parallelism.ep=2"), (), EXACT),
          ("tp 2", TP, (), EXACT),
          ("tp 2, ep 2, loss parallel off, ac full", (*TP, "parallelism.ep=2", "parallelism.loss_parallel=off", "ac=full"), (), EXACT),
          ("cp 2, allgather", (*CP, "parallelism.cp_rotate=allgather"), (), EXACT),
          ("cp 2, ulysses, documents", (*CP, "parallelism.cp_rotate=ulysses"),
           (*PACKED, "model.vocab_size=4096", "model.mtp=1"), EXACT),
          ("ddp 2, tied embeddings", ("parallelism=ddp", "data.local_batch=8"), ("model.tie_embeddings=true",), EXACT),
          ("fsdp 2, compile, ac op", (*FSDP, *COMPILED, "ac=op"), (), EXACT),
          ("fsdp 2, qk_clip, muon", FSDP, ("optimizer.qk_clip=0.045", "optimizer=muon"),
           EXACT | {"loss": 3e-4, "norm": 3e-3, "weights": 0.5, "routing": False}),
          ("fsdp 4, tp 2, never reshard", ("parallelism=fsdp_tp", "data.local_batch=8", "parallelism.reshard_after_forward=never"), (),
           EXACT),
          *((f"bf16, {layout}", (*overrides, IN_BF16), (), COARSE | {"gradients": 0.2, "weights": 0.3, "routing": False})
            for layout, overrides in (("fsdp 2", FSDP), ("tp 2", TP), ("cp 2", CP))))),
    case("mtp 2, fsdp 2, resumed", 2, *FSDP, base=FURTHER, resumed=True),
]
# fmt: on
