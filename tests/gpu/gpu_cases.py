"""List the tests on one GPU, one case per line: its name, the check that runs it, and the number of ranks. This file
imports no torch. The checks are in gpu_checks.py, gpu_kernels.py and gpu_commands.py; those of ranks that share a
process group are in gpu_together.py. A check is called with the case's options. Cases of several ranks are layouts of
the acceptance matrix and of this file, and whole runs; all their ranks share the one GPU. `gpu` gives the reason why a
case is left out on a CPU; every other case also runs there, over gloo.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from titan_hydra.instruments.verify.case import Case as Layout
from titan_hydra.instruments.verify.matrix import MATRIX


@dataclass(frozen=True)
class Case:
    """A check, its options, and the number of ranks. With `world`, the ranks have joined one process group, which
    several cases share. With `apart`, the case runs in processes of its own, as ring attention must: torch keeps the
    options of a ring, and cuDNN's graphs of attention, for the whole process. With `alone`, no other case may use the
    device at the same time.
    """

    name: str
    check: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    world: bool = False
    gpu: str = ""
    seconds: int = 90  # after which the case counts as hung
    apart: bool = False
    alone: bool = False

    @property
    def shard(self) -> str:
        """Return which shard the case belongs to: whole runs of several ranks, layouts by their number of ranks, and
        cases of one process, each compiled or not. Shards run side by side.
        """
        words = (*self.options.get("overrides", ()), *getattr(self.options.get("layout"), "overrides", ()))
        kind = "layouts" if self.world else "runs" if self.ranks > 1 or self.check in WORKING else "one process"
        return f"{kind} of {self.ranks}{', compiled' if COMPILES & {*words} else ''}"


def run(
    name: str, *overrides: str, check: str = "learns", ranks: int = 1, gpu: str = "", seconds: int = 90, **options
) -> Case:
    """Return a case that trains the small model of gpu_checks.py with these overrides: on one rank in one process
    through the worker, as cluster=inline does; on several ranks in a process group of the run's own.
    """
    return Case(name, check, {"overrides": overrides, **options}, ranks, gpu=gpu, seconds=seconds)


KERNEL = "the CPU has no such attention kernel"
FLOAT8 = "the compiler refuses emulated Float8"
CUDA = "about CUDA alone"
BROAD = "a CPU would take minutes"
MATH = ("model.attention=math",)
DOCUMENTS = ("data.document_mask=true",)
CHUNKED = ("loss=linear_cross_entropy", "loss.chunk_tokens=100")  # chunk sizes that do not divide the number of tokens
BLOCK = ("compile=block",)
COMPILES = {*BLOCK, "compile=model"}
WORKING = ("two_workers", "replicas", "times_out")  # checks that start workers of several ranks
ROWWISE, TENSORWISE = ("precision=float8_rowwise",), ("precision=float8_tensorwise",)
FUSED = (*ROWWISE, "precision.kernels=fused")
SPLIT = ("optimizer.masters=split",)
LORA = ("adapter=lora", "adapter.rank=8")
OFFLOADED = ("optimizer.offload=true",)
SIMPLE = ("parallelism.backend=simple_fsdp",)
EXPERTS = ("model=qwen3_moe_debug", "model.head_dim=64", "model.expert_dim=128")
DEEPSEEK = ("model=deepseek_v3_debug", "model.n_kv_heads=4")
FLUX = (
    "model=flux_debug",
    "data=synthetic_images",
    "data.seq_len=24",
    "model.n_layers=4",
    "model.double_layers=2",
    "model.n_kv_heads=4",
    "model.rope_first=0",
)
FSDP = ("parallelism=fsdp", "data.local_batch=2")
CHAT = ("data=embedded_chat", "data.seq_len=192", "validation=off")
VALIDATED = ("name=validated", "validation=on", "validation.interval=2", "validation.steps=2")
AVERAGED = (*VALIDATED, "optimizer.ema_decay=0.9", "validation.ema=true")

# Cases are ordered by importance: first the main recipe, then what has never run on a card and takes seconds.
ALONE = [
    Case("device and its memory", "device"),
    Case("order of attention kernels", "kernels"),
    run("bf16"),
    Case("float8 casts are those of torch", "float8_casts"),
    run("float8 fused", *FUSED, like=ROWWISE, within=5e-3),
    run("float8 rowwise", *ROWWISE, like=(), within=0.02),
    Case("split masters step as whole ones", "split_masters"),
    run("split masters", *SPLIT, like=(), within=2e-3),
    run("chunked loss", *CHUNKED, like=(), within=2e-3),
    Case("initial weights as on a CPU", "initial_weights"),
    *(
        run(f"resumes bitwise, checkpoint {kind}", f"checkpoint={kind}", check="resumes")
        for kind in ("async_pinned", "sync")
    ),
    run("attention cudnn", "model.attention=cudnn", like=MATH, within=5e-3, gpu=KERNEL),
    Case("attention of other widths, heads and masks", "attention"),
    run("documents", *DOCUMENTS, like=(*DOCUMENTS, *MATH), within=5e-3),
    run(
        "nvfp4 is refused in one line",
        "precision=nvfp4",
        "model.dim=256",
        check="refuses",
        words="NVFP4 matmuls need a GPU of capability 10.0",
    ),
    run(
        "qwen3_moe, mxfp8 experts are refused in one line",
        *EXPERTS,
        "precision=mxfp8_experts",
        check="refuses",
        words="MXFP8 matmuls need a GPU of capability 10.0",
    ),
    run("qwen3_moe, lora of experts", *EXPERTS, "adapter=lora", "adapter.rank=8", "adapter.experts=true", falls=False),
    run("ac offload", "ac=offload", like=(), within=2e-3, saves=True),
    run("optimizer.offload", *OFFLOADED, like=(), within=1e-3),
    run("optimizer.offload resumes bitwise", *OFFLOADED, "checkpoint=async", check="resumes"),
    *(run(f"transformers, {kind}", check="foreign", kind=kind) for kind in ("llama", "gpt_oss")),
    run("qk_clip, moving average", "optimizer=muon", "optimizer.qk_clip=20", *AVERAGED),
    run("deepseek_v3, mtp", *DEEPSEEK, "model.mtp=1"),
    *(run(f"ac {mode}", f"ac={mode}", like=(), within=2e-3) for mode in ("lean", "op")),
    run("validation", *VALIDATED, like=(), within=1e-3),
    Case("experts without tokens", "empty_experts"),
    run("attention flash", "model.attention=flash", like=MATH, within=5e-3),
    run("attention efficient", "model.attention=efficient", like=MATH, within=5e-3, gpu=KERNEL),
    run("qwen3_moe", *EXPERTS, like=(*EXPERTS, "precision=fp32"), within=0.02),
    run("deepseek_v3", *DEEPSEEK, like=(*DEEPSEEK, "precision=fp32"), within=0.02),
    run("sft, documents", *CHAT, like=(*CHAT, *MATH), within=5e-3),
    run("lora", *LORA, falls=False),
    run("flux", *FLUX, falls=False),
    run("image_text", "model=llama3_vision_debug", "data=synthetic_image_text", falls=False),
    run(
        "out of memory is 76, allocations named",
        "data.local_batch=64",
        "data.seq_len=1024",
        check="out_of_memory",
        gpu=CUDA,
    ),
    run("float8 tensorwise", *TENSORWISE, like=(), within=0.02),
    run("to Hugging Face's format and back; text", check="exported"),
    run("experts to Hugging Face's format and back; text", *EXPERTS, check="exported"),
    run("flux samples images", *FLUX, check="samples"),
    Case("preferences are scored and learned; rollouts", "prefers"),
]
# More cases of one rank, which run after the layouts.
ALONE_TOO = [
    Case("random generators in a checkpoint", "generators"),
    run("fp32", "precision=fp32", like=(), within=0.01),
    run("bf16_full", "precision=bf16_full", like=(), within=0.02),
    run("muon", "optimizer=muon"),
    run("float8 rowwise_with_gw_hp", *ROWWISE, "precision.recipe=rowwise_with_gw_hp", like=(), within=0.02),
    run("float8 fused, ac lean", *FUSED, "ac=lean", like=FUSED, within=2e-3),
    run(
        "mxfp8 is refused in one line",
        "precision=mxfp8",
        check="refuses",
        words="MXFP8 matmuls need a GPU of capability 10.0",
    ),
    *(run(f"ac {mode}", f"ac={mode}", like=(), within=2e-3, saves=mode == "full") for mode in ("full", "layer")),
    run("qwen3_moe, ac full", *EXPERTS, "ac=full", like=EXPERTS, within=2e-3),
    run("resumes bitwise, checkpoint async", "checkpoint=async", check="resumes"),
    run(
        "profile and memory snapshot",
        "seed=1",
        "profiling=on",
        "profiling.first_step=3",
        "profiling.steps=2",
        check="profiles",
    ),
    run(
        "loss not finite is 78, module named",
        "debug=nan_hunt",
        "optimizer.lr=1e30",
        check="fails",
        status=78,
        words="nan_hunt",
    ),
    run("a second run's memory is its own", check="own_memory", gpu=CUDA),
]
# Whole runs on two ranks: the training loop with checkpoints, validation and profiler over NCCL, with deterministic
# kernels.
RUNS = [
    *(
        run(f"{name}, resumes bitwise", *overrides, f"checkpoint={kind}", check="resumes", ranks=2)
        for name, kind, *overrides in (
            ("fsdp 2, split masters", "async_pinned", *FSDP, *SPLIT),
            ("fsdp 2, ep 2", "async_pinned", *FSDP, *EXPERTS, "parallelism.ep=2"),
            ("fsdp 2, lora", "async", *FSDP, *LORA),
            ("fsdp 2, accumulation 2, muon", "sync", *FSDP, "data.local_batch=1", "optimizer=muon"),
            ("tp 2", "async_pinned", "parallelism=tp"),
            ("pp 2, zbv", "sync", "parallelism=pp", "pp_schedule=zbv", "model.n_layers=4"),
            ("fsdp 2, documents, ac op", "async_pinned", *FSDP, *DOCUMENTS, "ac=op"),
        )
    ),
    run("pp 2, validation", "parallelism=pp", *VALIDATED, ranks=2, like=VALIDATED, within=2e-3),
    run(
        "profile, fsdp 2",
        *FSDP,
        "seed=1",
        "profiling=on",
        "profiling.first_step=3",
        "profiling.steps=2",
        check="profiles",
        ranks=2,
    ),
]
WORKERS = [
    Case("launch.py, cluster=local", "launches", seconds=180),
    Case("two workers: checkpoint, resume, other layout", "two_workers", seconds=300),
    Case("two replica groups meet", "replicas", seconds=200),
    Case("two workers: one sleeps, time-out is 77", "times_out", seconds=200),
]

# A case may have more ranks than the machine has devices, which the checks of a cell would refuse.
PLACE = ("cluster.gpus_per_node=16",)
# Heads are wide enough for cuDNN and flash; the vocabulary is small, so that the loss is only a part of the
# computation.
WIDE = (*PLACE, "model.dim=256", "model.n_heads=4", "model.n_kv_heads=2", "data.seq_len=256", "data.global_batch=8")
FP32 = {"loss": 2e-5, "norm": 2e-5, "gradients": 5e-5, "weights": 1e-2}
BF16 = {"loss": 1e-3, "norm": 2e-3, "gradients": 3e-2, "weights": 0.3}
# tolerances for the rounding of Float8 itself, which is different on every layout
COARSE = {"loss": 5e-3, "norm": 5e-2, "gradients": 0.4, "weights": 1.0}


def layout(
    name: str,
    ranks: int,
    *overrides: str,
    precision: str = "bf16",
    base: tuple[str, ...] = (),
    gpu: str = "",
    seconds: int = 90,
    apart: bool = False,
    **tolerance,
) -> Case:
    """Return a case that compares a layout with one process in the same number format; `base` has overrides for the
    layout and for the one process.
    """
    base = (*WIDE, f"precision={precision}", *base)
    return agrees(
        Layout(f"{precision}, {name}", ranks, (f"gpus={ranks}", *overrides), base, **BF16 | tolerance),
        gpu,
        seconds,
        apart,
    )


def base_of(case: Layout) -> tuple:
    """Return what layouts with the same reference have in common."""
    return case.base, case.uneven_mask, case.documents


def agrees(case: Layout, gpu: str = "", seconds: int = 90, apart: bool = False) -> Case:
    """Return the case that compares this layout with one process."""
    return Case(case.name, "agrees", {"layout": case}, case.ranks, True, gpu, seconds, apart)


def on_gpu(case: Layout) -> Layout:
    """Return a case of the acceptance matrix with the tolerances that sums on a GPU need, or with the case's own if
    they are wider.
    """
    wider = {name: max(value, getattr(case, name)) for name, value in FP32.items()}
    return dataclasses.replace(case, base=(*PLACE, *case.base), reference="process", **wider)


SHORT = [  # cases of the acceptance matrix, in fp32 without TF32
    "fsdp 2",
    "qwen3_moe, single, accumulation 4",
    "qwen3_moe, fsdp 2, ep 2",
    "ddp 2",
    "simple_fsdp 2",
    "tp 2, sequence parallel on, loss parallel on",
    "cp 2, ulysses, sequence 32",
    "deepseek_v3, tp 2, ep 2",
    *(
        f"pp 2, {schedule}, accumulation 1"
        for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipe_v")
    ),
    "linear_cross_entropy, fsdp 2, vocabulary 2047",
    "hsdp 4",
    "qwen3_moe, fsdp 4, tp 2, ep 2",
    "fsdp 4, uneven mask, accumulation 4",
    "fsdp 4, tp 2",
    "hsdp 4, muon",
    "fsdp 4, cp 2, ulysses",
    "fsdp 2, pp 2, zbv",
    "pp 2, tp 2, zbv, loss parallel on",
]
BY_NAME = {case.name: case for case in MATRIX}
SHARDED, TP, CP = (
    ("parallelism=fsdp", "data.local_batch=4"),
    ("parallelism=tp", "data.local_batch=8"),
    ("parallelism=cp", "data.local_batch=8"),
)
ULYSSES = (*CP, "parallelism.cp_rotate=ulysses")
TORCH = "needs GPUs that read each other's memory"
# rounding sends some tokens to other experts
MOE = {"base": EXPERTS, "gradients": 0.2, "weights": 0.5, "routing": False}
LATENT = MOE | {
    "base": (
        *DEEPSEEK,
        "model.qk_nope_head_dim=128",
        "model.qk_rope_head_dim=64",
        "model.v_head_dim=128",
        "model.n_experts=8",
        "model.experts_per_token=2",
        "model.expert_dim=128",
    )
}
PACKED = {"base": ("data=embedded", "model.vocab_size=4096", *DOCUMENTS)}
FLUX_AWAKE = (*FLUX, "train.imports=[gpu_awake]", "model.family=awake_flux", "data.seq_len=264")
AWAKE = {"base": FLUX_AWAKE, "loss": 3e-3, "norm": 5e-3, "gradients": 0.1}


def ring(name: str, ranks: int, rotate: str, *overrides: str, gpu: str = "") -> Case:
    """Return a case of ring attention over the sequence, in processes of its own."""
    words = (*CP, f"parallelism.cp={ranks}", f"parallelism.cp_rotate={rotate}", *overrides)
    return layout(f"cp {ranks}, {rotate}{name}", ranks, *words, gpu=gpu, apart=True)


TOGETHER = [
    layout("fsdp 2", 2, *SHARDED),
    Case("collectives are recorded", "records", ranks=2, world=True),
    layout("fsdp 2, accumulation 2", 2, *SHARDED, "data.local_batch=2"),
    layout("fsdp 2, fused", 2, *SHARDED, "precision.kernels=fused", precision="float8_rowwise", **COARSE),
    layout("fsdp 2", 2, *SHARDED, precision="float8_rowwise", **COARSE),
    layout("split masters, fsdp 2", 2, *SHARDED, base=SPLIT),
    layout("fsdp 2, ac offload", 2, *SHARDED, "ac=offload"),
    layout("fsdp 2, optimizer.offload", 2, *SHARDED, *OFFLOADED),
    layout("tp 2", 2, *TP),
    layout("pp 2, zbv", 2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=8"),
    layout("cp 2, ulysses", 2, *ULYSSES),
    layout("fsdp 2, float8 all-gather", 2, *SHARDED, precision="float8_tensorwise", **COARSE),
    layout("qwen3_moe, fsdp 2, ep 2", 2, *SHARDED, "parallelism.ep=2", **MOE),
    layout("fsdp 2, documents", 2, *SHARDED, **PACKED),
    layout("deepseek_v3, 192 and 128 wide, tp 2, ep 2", 2, *TP, "parallelism.ep=2", **LATENT),
    layout("lora, fsdp 2", 2, *SHARDED, base=LORA),
    layout("flux, fsdp 2", 2, *SHARDED, **AWAKE),
    layout("cp 2, ulysses, documents", 2, *ULYSSES, **PACKED),
    layout("tp 2", 2, *TP, precision="float8_tensorwise", **COARSE),
    # In both kinds of FLUX's blocks cuDNN gets the same q, k and v, but gradients with different strides.
    *(
        layout(
            f"flux, attention {kernel} against math",
            *(1, "parallelism=single", "data.local_batch=8", f"model.attention={kernel}"),
            **AWAKE | {"base": (*FLUX_AWAKE, *MATH)},
        )
        for kernel in ("auto", "efficient")
    ),
    ring("", 2, "allgather"),
    ring("", 2, "alltoall"),
    ring(" in order", 2, "alltoall", "parallelism.cp_load_balance=false"),
    ring("", 4, "allgather"),
    *(agrees(on_gpu(BY_NAME[name])) for name in SHORT),
    Case("a device that another process fills is unfit", "taken", ranks=2, world=True, gpu=CUDA, alone=True),
    layout("hsdp 4", 4, "parallelism=hsdp", "data.local_batch=2"),
    layout("qwen3_moe, fsdp 4, tp 2, ep 2", 4, "parallelism=fsdp_tp", "parallelism.ep=2", "data.local_batch=4", **MOE),
    layout("fsdp 4, tp 2", 4, "parallelism=fsdp_tp", "data.local_batch=4", precision="float8_tensorwise", **COARSE),
]
# Llama 3.1 8B's width, in two of its layers and with a small vocabulary
WIDTH = (
    "model=llama3_8b",
    "model.n_layers=2",
    "model.n_heads=32",
    "model.n_kv_heads=8",
    "model.vocab_size=4096",
    "data.seq_len=1024",
    "data.local_batch=2",
    "optimizer.lr=3e-4",
)
LEAN = (*FUSED, *SPLIT, "ac=lean", "loss=linear_cross_entropy")
# These cases run last, as they take longest.
COMPILED = [
    run("8B's width, compile", *WIDTH, *BLOCK, like=WIDTH, within=5e-3, falls=False, gpu=BROAD, seconds=240),
    run(
        "8B's width, compile, float8 fused, lean",
        *(*WIDTH, *BLOCK, *LEAN),
        like=WIDTH,
        within=0.02,
        falls=False,
        gpu=BROAD,
        seconds=240,
    ),
    run("compile", *BLOCK, like=(), within=5e-3, seconds=180),
    run("compile, float8 fused", *BLOCK, *FUSED, like=ROWWISE, within=5e-3, seconds=240),
    run("compile, float8 rowwise", *BLOCK, *ROWWISE, like=(), within=0.02, gpu=FLOAT8, seconds=240),
    run("compile, ac offload", *BLOCK, "ac=offload", like=(), within=5e-3, seconds=180),
    run("compile, ac lean", *BLOCK, "ac=lean", like=(), within=5e-3, seconds=180),
    run(
        "compile, chunked loss, documents",
        *BLOCK,
        *CHUNKED,
        *DOCUMENTS,
        like=(*DOCUMENTS, *MATH),
        within=5e-3,
        seconds=180,
    ),
    run("compile, float8 tensorwise", *BLOCK, *TENSORWISE, like=(), within=0.02, gpu=FLOAT8, seconds=240),
    run("compile, ac op", *BLOCK, "ac=op", like=(), within=5e-3, seconds=180),
    run("compile, qwen3_moe", *EXPERTS, *BLOCK, like=EXPERTS, within=0.02, seconds=180),
    run("compile, float8 fused, ac lean", *BLOCK, *FUSED, "ac=lean", like=ROWWISE, within=5e-3, seconds=240),
    *(
        run(f"compile, ac {mode}", *BLOCK, f"ac={mode}", like=(), within=5e-3, seconds=180)
        for mode in ("full", "memory_budget")
    ),
    layout("fsdp 2, compile=model", 2, *SHARDED, *SIMPLE, "compile=model", seconds=180),
    layout("tp 2, compile", 2, *TP, *BLOCK, seconds=180),
    layout("async tp 2", 2, *TP, *BLOCK, "parallelism.async_tp=true", gpu=TORCH, seconds=180),
    layout("tp 2, compile", 2, *TP, *BLOCK, precision="float8_tensorwise", gpu=FLOAT8, seconds=240, **COARSE),
    ring(", compile", 2, "allgather", *BLOCK),
    layout(
        "fsdp 4, async tp 2",
        4,
        "parallelism=fsdp_tp",
        "data.local_batch=4",
        *BLOCK,
        "parallelism.async_tp=true",
        gpu=TORCH,
        seconds=180,
    ),
]


def in_sets(cases: list[Case]) -> list[Case]:
    """Order cases so that cases that share processes are adjacent; these sets are in the order of their first cases.
    Cases that run apart come after the shared cases with the same number of ranks.
    """
    places: dict[tuple, int] = {}
    for case in cases:
        places.setdefault((case.ranks, case.world, case.apart), len(places))
    return sorted(cases, key=lambda case: places[case.ranks, case.world, case.apart])


CASES = [*ALONE, *in_sets(TOGETHER), *RUNS, *ALONE_TOO, *WORKERS, *in_sets(COMPILED)]

# Cases that test the kit itself; three of the five end as no case should.
FAULTS = [
    Case("well before", "nothing", world=True),
    Case("hangs", "hangs", world=True, seconds=1),
    Case("raises", "raises", world=True),
    Case("well after", "nothing", world=True),
    Case("a rank is killed", "dies", ranks=2, world=True),
]
