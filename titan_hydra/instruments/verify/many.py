"""The cases of 4 to 128 ranks; the ranks are threads of one process (threads.py). Most degrees are 4, 8 and 32, because
a degree of 2 can hide a group with a wrong stride or a chunk from a wrong rank. The case of 4 ranks is short enough for
the default suite. Imports no torch.
"""

from math import prod
from typing import Any

from .case import BF16, LATENT, LINEAR, MOE, ODD, QWEN, SIMPLE, Case, case

SMALL = ("model.n_layers=2", "model.n_kv_heads=8", "steps=2")
LATENT_WIDE = (*LATENT, "model.n_heads=8", "model.n_kv_heads=8")
SPREAD = ("model.n_experts=32", "model.experts_per_token=4")
RING, ULYSSES = "parallelism.cp_rotate=alltoall", "parallelism.cp_rotate=ulysses"
BY_TWO = "data.local_batch=2"
COARSE: dict[str, Any] = {**BF16}


def many(
    title: str, degrees: dict[str, int], *more: str, base: tuple[str, ...] = (), samples: int = 16, **options: Any
) -> Case:
    """Return a case whose ranks are threads. Each data-parallel rank has its part of `samples` as one local batch,
    unless `more` sets another size. The job is configured for a cluster, as the rules forbid so many processes on one
    machine.
    """
    ranks = prod(degree for name, degree in degrees.items() if name != "ep")
    layout = [f"parallelism.{name}={degree}" for name, degree in degrees.items()]
    local = samples // (degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1))
    name = ", ".join(
        [f"{ranks} ranks", *([title] if title else []), *(f"{name} {degree}" for name, degree in degrees.items())]
    )
    overrides = ("cluster=slurm", "parallelism=single", *layout, f"data.local_batch={local}", *more)
    return case(
        name,
        ranks,
        *overrides,
        base=(*base, *SMALL, f"data.global_batch={samples}"),
        threads=True,
        **{"slow": True} | options,
    )


# fmt: off
MANY = [
    many("", {"dp_shard": 4, "tp": 8}, slow=False),
    many("chunked loss", {"dp_shard": 2, "tp": 2}, *LINEAR, slow=False),
    many("accumulation 2, uneven mask, vocabulary 2047", {"dp_shard": 4, "tp": 8}, BY_TWO, base=ODD["base"], uneven_mask=True),
    many("", {"dp_replicate": 4, "dp_shard": 8, "tp": 2}, samples=32),
    many("", {"dp_shard": 4, "cp": 4, "tp": 8}, RING),
    many("", {"cp": 8, "tp": 2}),
    many("simple_fsdp", {"dp_replicate": 4, "dp_shard": 4, "tp": 2}, SIMPLE),
    many("bf16", {"dp_replicate": 2, "dp_shard": 4, "tp": 4}, **COARSE),
    many("qwen3", {"dp_shard": 4, "tp": 8}, *LINEAR, base=QWEN),
    many("qwen3, ulysses", {"dp_shard": 4, "cp": 4, "tp": 2}, ULYSSES, base=QWEN),
    many("qwen3_moe", {"dp_shard": 32, "ep": 32}, base=(*MOE, *SPREAD), samples=32),
    many("qwen3_moe", {"dp_shard": 4, "cp": 2, "tp": 4, "ep": 8}, base=MOE, uneven_mask=True),
    many("deepseek_v3", {"dp_replicate": 4, "dp_shard": 4, "tp": 2, "ep": 4}, base=LATENT_WIDE),
    many("deepseek_v3", {"dp_shard": 4, "tp": 8, "ep": 16}, base=(*LATENT_WIDE, "model.n_experts=16")),
]
# fmt: on
