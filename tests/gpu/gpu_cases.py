"""What is tested on one GPU, one line a case: its name, the check that runs it, on how many ranks. Imports no torch.

Checks stand in gpu_checks.py, those of ranks that share a process group in gpu_together.py. A check is called with the case's options.
Cases of several ranks are layouts of the acceptance matrix and of this file; all their ranks share the one GPU. `gpu` says why a case is
left out on a CPU; every other case also runs there, over gloo.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from titan_hydra.verify.matrix import MATRIX
from titan_hydra.verify.matrix import Case as Layout


@dataclass(frozen=True)
class Case:
    """A check, its options, and the number of ranks. `world`: the ranks have joined one process group, which the cases share."""

    name: str
    check: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    world: bool = False
    gpu: str = ""
    seconds: int = 90  # until it counts as hung


def run(name: str, *overrides: str, check: str = "learns", gpu: str = "", seconds: int = 90, **options) -> Case:
    """One process trains the small model of gpu_checks.py with these overrides, through the worker, as cluster=inline does."""
    return Case(name, check, {"overrides": overrides, **options}, gpu=gpu, seconds=seconds)


KERNEL = "the CPU has no such attention kernel"
FLOAT8 = "the compiler refuses emulated Float8"
CUDA = "about CUDA alone"
MATH = ("model.attention=math",)
DOCUMENTS = ("data.document_mask=true",)
CHUNKED = ("loss=linear_cross_entropy", "loss.chunk_tokens=100")  # chunks that divide nothing
BLOCK = ("compile=block",)
ROWWISE, TENSORWISE = ("precision=float8_rowwise",), ("precision=float8_tensorwise",)
FUSED = (*ROWWISE, "precision.kernels=fused")

ALONE = [
    Case("device and its memory", "device"),
    Case("initial weights as on a CPU", "initial_weights"),
    Case("order of attention kernels", "kernels"),
    Case("random generators in a checkpoint", "generators"),
    run("bf16"),
    run("fp32", "precision=fp32", like=(), within=0.01),
    run("bf16_full", "precision=bf16_full", like=(), within=0.02),
    run("muon", "optimizer=muon"),
    run("validation", "validation=on", "validation.interval=2", "validation.steps=2", like=(), within=1e-3),
    run("float8 rowwise", *ROWWISE, like=(), within=0.02),
    run("float8 rowwise_with_gw_hp", *ROWWISE, "precision.recipe=rowwise_with_gw_hp", like=(), within=0.02),
    run("float8 tensorwise", *TENSORWISE, like=(), within=0.02),
    Case("float8 casts are those of torch", "float8_casts"),
    run("float8 fused", *FUSED, like=ROWWISE, within=5e-3),
    run("float8 fused, ac lean", *FUSED, "ac=lean", like=FUSED, within=2e-3),
    run("mxfp8 is refused in one line", "precision=mxfp8", check="refuses", words="MXFP8 matmuls need a GPU of capability 10.0"),
    run("attention cudnn", "model.attention=cudnn", like=MATH, within=5e-3, gpu=KERNEL),
    run("attention flash", "model.attention=flash", like=MATH, within=5e-3),
    run("attention efficient", "model.attention=efficient", like=MATH, within=5e-3, gpu=KERNEL),
    run("documents", *DOCUMENTS, like=(*DOCUMENTS, *MATH), within=5e-3),
    run("chunked loss", *CHUNKED, like=(), within=2e-3),
    Case("split masters step as whole ones", "split_masters"),
    run("split masters", "precision=bf16", "optimizer.masters=split", like=("precision=bf16",), within=2e-3),
    *(run(f"ac {mode}", f"ac={mode}", like=(), within=2e-3, saves=mode == "full") for mode in ("full", "layer", "op", "lean")),
    *(run(f"resumes bitwise, checkpoint {kind}", f"checkpoint={kind}", check="resumes") for kind in ("sync", "async", "async_pinned")),
    run("profile and memory snapshot", "seed=1", "profiling=on", "profiling.first_step=3", "profiling.steps=2", check="profiles"),
    run("loss not finite is 78, module named", "debug=nan_hunt", "optimizer.lr=1e30", check="fails", status=78, words="nan_hunt"),
    run("out of memory is 76, allocations named", "data.local_batch=64", "data.seq_len=1024", check="out_of_memory", gpu=CUDA),
    run("a second run's memory is its own", check="own_memory", gpu=CUDA),
    Case("launch.py, cluster=local", "launches", seconds=180),
    Case("two workers: checkpoint, resume, other layout", "two_workers", seconds=300),
    Case("two workers: one sleeps, time-out is 77", "times_out", seconds=200),
]

# Several ranks on one GPU are more than the machine's devices; the checks of a cell would refuse that.
PLACE = ("cluster.gpus_per_node=16",)
# Heads wide enough for cuDNN and flash; vocabulary small, so that the loss is not all there is.
WIDE = (*PLACE, "model.dim=256", "model.n_heads=4", "model.n_kv_heads=2", "data.seq_len=256", "data.global_batch=8")
FP32 = {"loss": 2e-5, "norm": 2e-5, "gradients": 5e-5, "weights": 1e-2}
BF16 = {"loss": 1e-3, "norm": 2e-3, "gradients": 3e-2, "weights": 0.3}
COARSE = {"loss": 5e-3, "norm": 5e-2, "gradients": 0.4, "weights": 1.0}  # Float8's own rounding, which every layout does in its way


def layout(name: str, ranks: int, *overrides: str, precision: str = "bf16", tolerance: dict[str, float] = BF16, gpu: str = "",
           seconds: int = 90) -> Case:
    """A layout against one process in the same number format."""
    base = (*WIDE, f"precision={precision}")
    return agrees(Layout(f"{precision}, {name}", ranks, (f"gpus={ranks}", *overrides), base, **tolerance), gpu, seconds)


def agrees(case: Layout, gpu: str = "", seconds: int = 90) -> Case:
    """The case that proves a layout."""
    return Case(case.name, "agrees", {"layout": case}, case.ranks, True, gpu, seconds)


def on_gpu(case: Layout) -> Layout:
    """A case of the acceptance matrix with the tolerances of a GPU's sums, unless its own are wider."""
    wider = {name: max(value, getattr(case, name)) for name, value in FP32.items()}
    return dataclasses.replace(case, base=(*PLACE, *case.base), reference="process", **wider)


SHORT = [  # of the acceptance matrix, in fp32 without TF32
    "fsdp 2", "ddp 2", "simple_fsdp 2", "tp 2, sequence parallel on, loss parallel on", "cp 2, ulysses, sequence 32",
    *(f"pp 2, {schedule}, accumulation 1" for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipe_v")),
    "linear_cross_entropy, fsdp 2, vocabulary 2047", "hsdp 4", "fsdp 4, uneven mask, accumulation 4", "fsdp 4, tp 2",
    "hsdp 4, muon", "fsdp 4, cp 2, ulysses", "fsdp 2, pp 2, zbv", "pp 2, tp 2, zbv, loss parallel on",
]
BY_NAME = {case.name: case for case in MATRIX}
TP, CP = ("parallelism=tp", "data.local_batch=8"), ("parallelism=cp", "data.local_batch=8")
TORCH = "needs GPUs that read each other's memory"

TOGETHER = [
    Case("collectives are recorded", "records", ranks=2, world=True),
    Case("a device that another process fills is unfit", "taken", ranks=2, world=True, gpu=CUDA),
    *(agrees(on_gpu(BY_NAME[name])) for name in SHORT),
    layout("fsdp 2", 2, "parallelism=fsdp", "data.local_batch=4"),
    layout("hsdp 4", 4, "parallelism=hsdp", "data.local_batch=2"),
    layout("tp 2", 2, *TP),
    layout("pp 2, zbv", 2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=8"),
    *(layout(f"cp {ranks}, {rotate}{'' if balance else ' in order'}", ranks, *CP, f"parallelism.cp={ranks}",
             f"parallelism.cp_rotate={rotate}", f"parallelism.cp_load_balance={balance}")
      for ranks, rotate, balance in ((2, "allgather", True), (2, "alltoall", True), (2, "alltoall", False), (2, "ulysses", True),
                                     (4, "allgather", True))),
    layout("fsdp 2", 2, "parallelism=fsdp", "data.local_batch=4", precision="float8_rowwise", tolerance=COARSE),
    layout("fsdp 2, fused", 2, "parallelism=fsdp", "data.local_batch=4", "precision.kernels=fused", precision="float8_rowwise",
           tolerance=COARSE),
    layout("fsdp 2, float8 all-gather", 2, "parallelism=fsdp", "data.local_batch=4", precision="float8_tensorwise", tolerance=COARSE),
    layout("tp 2", 2, *TP, precision="float8_tensorwise", tolerance=COARSE),
    layout("fsdp 4, tp 2", 4, "parallelism=fsdp_tp", "data.local_batch=4", precision="float8_tensorwise", tolerance=COARSE),
    layout("tp 2, compile", 2, *TP, *BLOCK, seconds=180),
    layout("cp 2, allgather, compile", 2, *CP, *BLOCK, seconds=180),
    layout("tp 2, compile", 2, *TP, *BLOCK, precision="float8_tensorwise", tolerance=COARSE, gpu=FLOAT8, seconds=240),
    layout("async tp 2", 2, *TP, *BLOCK, "parallelism.async_tp=true", gpu=TORCH, seconds=180),
    layout("fsdp 4, async tp 2", 4, "parallelism=fsdp_tp", "data.local_batch=4", *BLOCK, "parallelism.async_tp=true", gpu=TORCH,
           seconds=180),
]
# Last, as they take longest.
COMPILED = [
    run("compile", *BLOCK, like=(), within=5e-3, seconds=180),
    run("compile, chunked loss, documents", *BLOCK, *CHUNKED, *DOCUMENTS, like=(*DOCUMENTS, *MATH), within=5e-3, seconds=180),
    *(run(f"compile, ac {mode}", *BLOCK, f"ac={mode}", like=(), within=5e-3, seconds=180)
      for mode in ("full", "op", "lean", "memory_budget")),
    run("compile, float8 rowwise", *BLOCK, *ROWWISE, like=(), within=0.02, gpu=FLOAT8, seconds=240),
    run("compile, float8 fused", *BLOCK, *FUSED, like=ROWWISE, within=5e-3, seconds=240),
    run("compile, float8 fused, ac lean", *BLOCK, *FUSED, "ac=lean", like=ROWWISE, within=5e-3, seconds=240),
    run("compile, float8 tensorwise", *BLOCK, *TENSORWISE, like=(), within=0.02, gpu=FLOAT8, seconds=240),
]
CASES = [*ALONE, *sorted(TOGETHER, key=lambda case: case.ranks), *COMPILED]

# What the kit itself is tested with: three of the four end as cases should not.
FAULTS = [
    Case("hangs", "hangs", world=True, seconds=3), Case("raises", "raises", world=True), Case("well after", "nothing", world=True),
    Case("a rank is killed", "dies", ranks=2, world=True),
]
