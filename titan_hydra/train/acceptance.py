"""The acceptance matrix: every layout that must learn what one process learns, one line each. Imports no torch."""
from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.config.compose import CONF


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
    slow: bool = False  # more than a few seconds: left out by `pytest -m "not slow"`


def case(name: str, ranks: int, *overrides: str, **options) -> Case:
    """A case on as many ranks as the layout takes."""
    return Case(name, ranks, (f"gpus={ranks}", *overrides), **options)


EVEN = {"uneven_mask": True, "loss": 1e-6, "norm": 1e-6, "gradients": 1e-5}
SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipe_v")
DEEP = {"base": ("model.n_layers=8",)}  # two stages on each of four ranks
DEEP_ODD = {"base": ("model.n_layers=8", "model.vocab_size=2047")}
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

    # Tensor parallel
    *(case(f"tp {ranks}, sequence parallel {sp}, loss parallel {lp}", ranks, "parallelism=tp", f"parallelism.tp={ranks}",
           f"parallelism.sequence_parallel={sp}", f"parallelism.loss_parallel={lp}", "data.local_batch=16")
      for ranks in (2, 4) for sp in ("on", "off") for lp in ("on", "off")),
    *(case(f"{layout} 4, tp 2", 4, f"parallelism={layout}", "parallelism.tp=2", "data.local_batch=8") for layout in ("ddp", "fsdp")),
    case("fsdp 4, tp 2, accumulation 4", 4, "parallelism=fsdp_tp", "data.local_batch=2"),
    *(case(f"fsdp 4, tp 2, uneven mask, vocabulary 2047, loss parallel {lp}", 4, "parallelism=fsdp_tp", "data.local_batch=8",
           f"parallelism.loss_parallel={lp}", **EVEN, **ODD) for lp in ("on", "off")),
    case("fsdp 4, tp 2, tied embeddings, vocabulary 2047", 4, "parallelism=fsdp_tp", "data.local_batch=8",
         base=("model.tie_embeddings=true", "model.vocab_size=2047")),
    case("tp 2, tied embeddings", 2, "parallelism=tp", "data.local_batch=16", base=("model.tie_embeddings=true",)),
    case("fsdp 4, tp 2, muon", 4, "parallelism=fsdp_tp", "data.local_batch=8", base=("optimizer=muon",), loss=1e-4, norm=1e-3),
    case("hsdp 8, tp 2", 8, "parallelism=hsdp", "parallelism.tp=2", "data.local_batch=4"),

    # Activation checkpointing and compile
    *(case(f"fsdp 4, tp 2, ac {ac}", 4, "parallelism=fsdp_tp", f"ac={ac}", "data.local_batch=8") for ac in ("full", "layer", "op", "lean")),
    case("tp 2, ac op, sequence parallel off", 2, "parallelism=tp", "ac=op", "parallelism.sequence_parallel=off", "data.local_batch=16"),
    *(case(f"fsdp 4, tp 2, compile, ac {ac}", 4, "parallelism=fsdp_tp", "compile=block", "compile.backend=aot_eager", f"ac={ac}",
           "data.local_batch=4", slow=ac != "none") for ac in ("none", "full", "layer", "op", "lean", "memory_budget")),
    case("fsdp 2, tp 2, compile by inductor", 4, "parallelism=fsdp_tp", "compile=block", "data.local_batch=8", slow=True),
    *(case(f"tp 2, compile, {what}", 2, "parallelism=tp", "compile=block", "compile.backend=aot_eager", "data.local_batch=16", f"parallelism.{what}=off", slow=True)
      for what in ("loss_parallel", "sequence_parallel")),

    # Pipeline parallel, 8 microbatches
    *(case(f"pp {ranks}, {schedule}, accumulation {steps}", ranks, "parallelism=pp", f"parallelism.pp={ranks}", f"pp_schedule={schedule}",
           f"data.local_batch={16 // steps}", "pp_schedule.microbatches=8", **DEEP)
      for schedule in SCHEDULES for ranks in (2, 4) for steps in (1, 2)),
    case("pp 2, csv", 2, "parallelism=pp", "pp_schedule=csv", f"pp_schedule.csv={CONF}/pp_schedule/zb_h1.csv",
         "data.local_batch=16", **DEEP),
    *(case(f"{layout} 2, pp 2, {schedule}", 4, f"parallelism={layout}", "parallelism.pp=2", f"pp_schedule={schedule}", "data.local_batch=8",
           **DEEP) for layout, schedule in (("ddp", "1f1b"), ("ddp", "zbv"), *(("fsdp", schedule) for schedule in SCHEDULES))),
    *(case(f"{layout} 2, pp 2, {schedule}, accumulation 2", 4, f"parallelism={layout}", "parallelism.pp=2", f"pp_schedule={schedule}",
           "data.local_batch=4", **DEEP) for layout, schedule in (("ddp", "1f1b"), ("fsdp", "1f1b"), ("fsdp", "zbv"))),
    case("fsdp 2, pp 2, always reshard", 4, "parallelism=fsdp_pp", "data.local_batch=8", "parallelism.reshard_after_forward=always",
         **DEEP),
    *(case(f"fsdp 2, pp 2, {schedule}, uneven mask, vocabulary 2047", 4, "parallelism=fsdp_pp", f"pp_schedule={schedule}",
           "data.local_batch=8", **EVEN, **DEEP_ODD) for schedule in ("1f1b", "zbv")),
    case("hsdp 8, pp 2", 8, "parallelism=hsdp", "parallelism.dp_shard=2", "parallelism.pp=2", "data.local_batch=4", **DEEP),
    case("hsdp 8, pp 2, accumulation 2", 8, "parallelism=hsdp", "parallelism.dp_shard=2", "parallelism.pp=2", "data.local_batch=2", **DEEP),
    # SimpleFSDP
    *(case(f"simple_fsdp {ranks}", ranks, "parallelism=fsdp", "parallelism.backend=simple_fsdp", f"data.local_batch={16 // ranks}")
      for ranks in (2, 4)),
    case("simple_fsdp 4, vocabulary 2047, uneven mask", 4, "parallelism=fsdp", "parallelism.backend=simple_fsdp", "data.local_batch=2",
         uneven_mask=True, **ODD),
    case("simple_fsdp 4, hsdp", 4, "parallelism=hsdp", "parallelism.backend=simple_fsdp", "data.local_batch=4"),
    case("simple_fsdp 2, tied embeddings", 2, "parallelism=fsdp", "parallelism.backend=simple_fsdp", "data.local_batch=8",
         base=("model.tie_embeddings=true",)),
    case("simple_fsdp 4, fsdp_tp", 4, "parallelism=fsdp_tp", "parallelism.backend=simple_fsdp", "data.local_batch=8"),
    case("simple_fsdp 4, fsdp_tp, vocabulary 2047", 4, "parallelism=fsdp_tp", "parallelism.backend=simple_fsdp", "data.local_batch=8", **ODD),

    # Context parallel
    *(case(f"cp {ranks}, {rotate}{'' if balance else ' in order'}, sequence {seq_len}", ranks, "parallelism=cp", f"parallelism.cp={ranks}",
           f"parallelism.cp_rotate={rotate}", f"parallelism.cp_load_balance={balance}", "data.local_batch=16",
           base=(f"data.seq_len={seq_len}",))
      for ranks in (2, 4) for seq_len in (16, 32, 64)
      for rotate, balance in (("allgather", True), ("allgather", False), ("alltoall", True), ("alltoall", False), ("ulysses", True))),
    *(case(f"fsdp 4, cp 2, {rotate}", 4, "parallelism=fsdp_cp", f"parallelism.cp_rotate={rotate}", "data.local_batch=8")
      for rotate in ("allgather", "alltoall", "ulysses")),
    case("ddp 4, cp 2", 4, "parallelism=ddp", "parallelism.cp=2", "data.local_batch=8"),
    case("hsdp 8, cp 2", 8, "parallelism=hsdp", "parallelism.cp=2", "data.local_batch=4"),
    case("cp 2, never reshard, accumulation 2", 2, "parallelism=cp", "data.local_batch=8", "parallelism.reshard_after_forward=never"),
    *(case(f"fsdp 4, cp 2, {rotate}, uneven mask, vocabulary 2047, accumulation 2", 4, "parallelism=fsdp_cp",
           f"parallelism.cp_rotate={rotate}", "data.local_batch=4", **EVEN, **ODD) for rotate in ("alltoall", "ulysses")),
    *(case(f"fsdp 8, cp 2, tp 2, {rotate}", 8, "parallelism=fsdp_cp", f"parallelism.cp_rotate={rotate}", "parallelism.tp=2",
           "data.local_batch=8") for rotate in ("allgather", "ulysses")),
    case("cp 2, tp 2, pp 2, uneven mask", 8, "parallelism=cp", "parallelism.tp=2", "parallelism.pp=2", "data.local_batch=8", **EVEN),
]
