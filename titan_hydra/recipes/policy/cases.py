"""The cases of `titan verify` for preferences and policies. Imports no torch."""

from pathlib import Path

from titan_hydra.instruments.verify.case import EXACT, Case, case, in_bf16

ASSETS = Path(__file__).parent / "assets"
LAYOUTS = (
    ("fsdp 2", 2, 4, "parallelism=fsdp"),
    ("cp 2", 2, 16, "parallelism=cp", "parallelism.cp_rotate=ulysses"),
    ("tp 2", 2, 16, "parallelism=tp"),
    ("pp 2", 2, 16, "parallelism=pp"),
)
QUICK = ("dpo, fsdp 2", "policy, fsdp 2", "policy, cp 2")


def data_of(source: str, seq_len: int) -> tuple[str, ...]:
    """Return the overrides for a file of the package."""
    return (f"data={source}", f"data.path={ASSETS / source}.jsonl", f"data.seq_len={seq_len}", "model.vocab_size=4096")


def of(name: str, source: str, seq_len: int, layouts: tuple = LAYOUTS) -> list[Case]:
    """Return the cases of an objective on a file of the package: against one process, also in bf16, and
    against float64."""
    base = data_of(source, seq_len)
    against_one_process = [
        case(
            f"{name}, {layout}",
            ranks,
            *overrides,
            f"data.local_batch={batch}",
            base=base,
            gradients=2e-5,
            slow=f"{name}, {layout}" not in QUICK,
        )
        for layout, ranks, batch, *overrides in layouts
    ]
    return [
        *against_one_process,
        case(f"{name}, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | {"base": base}),
        # the rate is small, as rounding decides to which bfloat16 number a large update moves the weight of a norm
        *in_bf16(name, *base, "optimizer.lr=0.01", layouts=(("fsdp 2", 2, "fsdp"), ("tp 2", 2, "tp")), loss=2e-3),
    ]


# The objective of pairs needs whole documents, so it has no case with context parallelism. Samples have room for two
# pairs, so that their numbers of pairs differ.
# One pass has fewer samples than a step takes: rank 1 of two has several that do not count.
ONE_PASS = {"base": (*data_of("preference", 128), "steps=epoch")}
OF_PAIRS = [
    *of("dpo", "preference", 128, tuple(layout for layout in LAYOUTS if layout[0] != "cp 2")),
    case("dpo, one pass, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", **ONE_PASS, gradients=2e-5, slow=True),
    case("dpo, one pass, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | ONE_PASS),
]
STEERED = {"base": (*data_of("rollouts", 32), "objective.kl=0.3", "objective.clip_high=0.28")}
OF_ROLLOUTS = [
    *of("policy", "rollouts", 32),
    case("policy with a reference, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | STEERED),
    case(
        "policy with a reference, tp 2",
        2,
        "parallelism=tp",
        "data.local_batch=16",
        **STEERED,
        gradients=2e-5,
        slow=True,
    ),
]
