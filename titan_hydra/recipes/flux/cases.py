"""The cases of `titan verify` for FLUX."""

from titan_hydra.instruments.verify.case import EXACT, case, in_bf16

BASE = (
    "model=flux_debug",
    "data=synthetic_images",
    "data.caption_dropout=0.4",
    "data.seq_len=24",
    "model.n_kv_heads=8",
    "model.rope_first=0",
)
CASES = [
    *(
        case(f"flux, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", base=BASE)
        for name, ranks, layout, batch in (
            ("accumulation 2", 1, "single", 8),
            ("fsdp 2", 2, "fsdp", 8),
            ("cp 2", 2, "cp", 16),
        )
    ),
    case("flux, against float64", 1, "parallelism=single", "data.local_batch=8", **EXACT | {"base": BASE}),
    *in_bf16("flux", *BASE, "model.double_layers=1", layouts=(("fsdp 2", 2, "fsdp"), ("cp 2", 2, "cp"))),
]
