"""Print how much memory each technique saves: the live bytes that the fake world counts for one rank, and those that
`titan plan` predicts.

    python benchmarks/memory.py            # Llama 3.1 8B with 12 of its layers at batch 2, and whole at batch 1; no GPU; a few minutes
"""

from titan_hydra.core.job.dtypes import GIB
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.train.count import count_rank
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory

JOB = (
    "model=llama3_8b",
    "data=synthetic",
    "precision=bf16",
    "data.seq_len=8192",
    "gpus=1",
    "parallelism=single",
    "comm=fake",
    "compile=block",
)
SHAPES = {
    "12 layers, batch 2": ("model.n_layers=12", "data.local_batch=2"),
    "32 layers, batch 1": ("data.local_batch=1",),
}
FUSED, SPLIT = "loss=linear_cross_entropy", "optimizer.masters=split"
LEVERS = (
    (),
    ("ac=lean",),
    ("ac=lean", FUSED),
    ("ac=lean", FUSED, "loss.chunk_tokens=16384"),
    (FUSED, SPLIT),
    ("ac=lean", FUSED, SPLIT),
    ("ac=lean", FUSED, SPLIT, "loss.chunk_tokens=16384"),
    ("ac=full", FUSED),
    ("ac=full", FUSED, SPLIT),
)

if __name__ == "__main__":
    print("| model | levers | counted, GiB live | predicted, GiB reserved |\n|---|---|---|---|")
    for shape, overrides in SHAPES.items():
        for levers in LEVERS:
            job = freeze(compose_unchecked(*JOB, *overrides, *levers))
            chosen = " ".join(f"`{lever}`" for lever in levers) or "none"
            print(
                f"| {shape} | {chosen} | {count_rank(job, 0).live / GIB:.1f} | {memory.peak(job).gib:.1f} |", flush=True
            )
