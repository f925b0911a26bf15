"""The acceptance matrix: every layout that must learn what one process learns, one line each. Imports no torch."""

from titan_hydra.core.job.config.files import CONF
from titan_hydra.core.job.config.registry import OBJECTIVES, resolve
from titan_hydra.core.job.run.code import versions

from .case import (
    BF16,
    COMPILED,
    DEEP,
    DEEP_ODD,
    EIGHT_BITS,
    EVEN,
    EXACT,
    FUSED,
    HALVED,
    LATENT,
    LINEAR,
    LORA_OF_EXPERTS,
    MIXTURE,
    MOE,
    MUON,
    MXFP8,
    MXFP8_EXPERTS,
    NOISY,
    NOT_ON_OLD_TORCH,
    NVFP4,
    ODD,
    PACKED,
    PLAIN_SGD,
    QWEN,
    ROWWISE,
    SAME,
    SCHEDULES,
    SIMPLE,
    SPARSE,
    SPLIT,
    STRETCHED,
    TENSORWISE,
    TIED,
    YARN,
    Case,
    case,
    in_bf16,
)
from .continued import CONTINUED
from .heads import HEADS
from .many import MANY
from .scaled import SCALED

# fmt: off
MATRIX = [
    *(case(f"{layout} {ranks}", ranks, f"parallelism={layout}", f"data.local_batch={16 // ranks}")
      for layout in ("ddp", "fsdp", "hsdp") for ranks in (2, 4)),
    case("fsdp 4, always reshard", 4, "parallelism=fsdp", "data.local_batch=4", "parallelism.reshard_after_forward=always"),
    case("fsdp 4, never reshard", 4, "parallelism=fsdp", "data.local_batch=4", "parallelism.reshard_after_forward=never"),
    *(case(f"{layout} 4, accumulation {steps}", 4, f"parallelism={layout}", f"data.local_batch={4 // steps}")
      for layout in ("ddp", "fsdp", "hsdp") for steps in (2, 4)),
    case("single, accumulation 4", 1, "parallelism=single", "data.local_batch=4"),
    case("hsdp 2, uneven mask, accumulation 2", 2, "parallelism=hsdp", "data.local_batch=4", **EVEN),
    *(case(f"{layout} 4, vocabulary 2047", 4, f"parallelism={layout}", "data.local_batch=4", **ODD) for layout in ("ddp", "fsdp", "hsdp")),
    *(case(f"{layout} 4, uneven mask", 4, f"parallelism={layout}", "data.local_batch=4", **EVEN) for layout in ("ddp", "fsdp", "hsdp")),
    case("fsdp 4, uneven mask, accumulation 4", 4, "parallelism=fsdp", "data.local_batch=1", **EVEN),
    case("fsdp 2, clipped", 2, "parallelism=fsdp", "data.local_batch=8", base=("optimizer.max_norm=0.1",)),
    case("fsdp 2, tied embeddings", 2, "parallelism=fsdp", "data.local_batch=8", base=("model.tie_embeddings=true",)),
    *(case(f"{layout} {ranks}, muon", ranks, f"parallelism={layout}", f"data.local_batch={16 // ranks}", **MUON)
      for layout, ranks in (("fsdp", 2), ("hsdp", 4))),

    # Tensor parallel
    *(case(f"tp {ranks}, sequence parallel {sp}, loss parallel {lp}", ranks, "parallelism=tp", f"parallelism.tp={ranks}",
           f"parallelism.sequence_parallel={sp}", f"parallelism.loss_parallel={lp}", "data.local_batch=16", slow=ranks > 2)
      for ranks in (2, 4) for sp in ("on", "off") for lp in ("on", "off")),
    *(case(f"{layout} 4, tp 2", 4, f"parallelism={layout}", "parallelism.tp=2", "data.local_batch=8") for layout in ("ddp", "fsdp")),
    case("fsdp 4, tp 2, accumulation 4", 4, "parallelism=fsdp_tp", "data.local_batch=2", slow=True),
    *(case(f"fsdp 4, tp 2, uneven mask, vocabulary 2047, loss parallel {lp}", 4, "parallelism=fsdp_tp", "data.local_batch=8",
           f"parallelism.loss_parallel={lp}", **EVEN, **ODD) for lp in ("on", "off")),
    case("fsdp 4, tp 2, tied embeddings, vocabulary 2047", 4, "parallelism=fsdp_tp", "data.local_batch=8",
         base=("model.tie_embeddings=true", "model.vocab_size=2047")),
    case("tp 2, tied embeddings", 2, "parallelism=tp", "data.local_batch=16", base=("model.tie_embeddings=true",)),
    case("fsdp 4, tp 2, muon", 4, "parallelism=fsdp_tp", "data.local_batch=8", slow=True, **MUON),
    case("hsdp 8, tp 2", 8, "parallelism=hsdp", "parallelism.tp=2", "data.local_batch=4", slow=True),

    # Activation checkpointing and compile
    *(case(f"fsdp 4, tp 2, ac {ac}", 4, "parallelism=fsdp_tp", f"ac={ac}", "data.local_batch=8", slow=ac in ("layer", "op"))
      for ac in ("full", "layer", "op", "lean", "offload")),
    case("tp 2, ac op, sequence parallel off", 2, "parallelism=tp", "ac=op", "parallelism.sequence_parallel=off", "data.local_batch=16"),
    *(case(f"fsdp 4, tp 2, compile, ac {ac}", 4, "parallelism=fsdp_tp", *COMPILED, f"ac={ac}", "data.local_batch=8", slow=ac != "none")
      for ac in ("none", "op", "lean", "offload")),
    case("fsdp 4, tp 2, compile by inductor, ac op", 4, "parallelism=fsdp_tp", "compile=block", "ac=op", "data.local_batch=8", slow=True),
    *(case(f"tp 2, compile, {what} off", 2, "parallelism=tp", *COMPILED, "data.local_batch=16", f"parallelism.{what}=off", slow=True)
      for what in ("loss_parallel", "sequence_parallel")),
    *(case(f"fsdp 2, compile, ac {ac}", 2, "parallelism=fsdp", *COMPILED, f"ac={ac}", "data.local_batch=8", slow=True)
      for ac in ("full", "layer", "memory_budget", "offload")),
    *(case(f"pp 2, ac {ac}", 2, "parallelism=pp", f"ac={ac}", "data.local_batch=16") for ac in ("full", "layer", "op", "lean", "offload")),
    *(case(f"pp 2, compile, ac {ac}", 2, "parallelism=pp", *COMPILED, f"ac={ac}", "data.local_batch=16", slow=True)
      for ac in ("none", "full", "op", "offload")),

    # Pipeline parallel, 8 microbatches
    *(case(f"pp {ranks}, {schedule}, accumulation {steps}", ranks, "parallelism=pp", f"parallelism.pp={ranks}", f"pp_schedule={schedule}",
           f"data.local_batch={16 // steps}", "pp_schedule.microbatches=8", slow=ranks * steps > 2, **DEEP)
      for schedule in SCHEDULES for ranks in (2, 4) for steps in (1, 2)),
    case("pp 2, csv", 2, "parallelism=pp", "pp_schedule=csv", f"pp_schedule.csv={CONF}/pp_schedule/zb_h1.csv",
         "data.local_batch=16", **DEEP),
    *(case(f"{layout} 2, pp 2, {schedule}", 4, f"parallelism={layout}", "parallelism.pp=2", f"pp_schedule={schedule}", "data.local_batch=8",
           slow=(layout, schedule) != ("fsdp", "zbv"), **DEEP)
      for layout, schedule in (("ddp", "1f1b"), ("ddp", "zbv"), *(("fsdp", schedule) for schedule in SCHEDULES))),
    *(case(f"{layout} 2, pp 2, {schedule}, accumulation 2", 4, f"parallelism={layout}", "parallelism.pp=2", f"pp_schedule={schedule}",
           "data.local_batch=4", slow=True, **DEEP) for layout, schedule in (("ddp", "1f1b"), ("fsdp", "1f1b"), ("fsdp", "zbv"))),
    case("fsdp 2, pp 2, always reshard", 4, "parallelism=fsdp_pp", "data.local_batch=8", "parallelism.reshard_after_forward=always",
         **DEEP),
    *(case(f"fsdp 2, pp 2, {schedule}, uneven mask, vocabulary 2047", 4, "parallelism=fsdp_pp", f"pp_schedule={schedule}",
           "data.local_batch=8", **EVEN, **DEEP_ODD) for schedule in ("1f1b", "zbv")),
    *(case(f"hsdp 8, pp 2, accumulation {steps}", 8, "parallelism=hsdp", "parallelism.pp=2", f"data.local_batch={4 // steps}", slow=True,
           **DEEP) for steps in (1, 2)),
    *(case(f"pp 2, {what}", 2, "parallelism=pp", *overrides, "data.local_batch=16", **DEEP) for what, overrides in (
        ("split by names", ("pp_schedule.split=[layers.7]",)), ("three stages a rank", ("pp_schedule=looped_bfs",
        "pp_schedule.stages_per_rank=3")),
        ("a head alone", ("pp_schedule=interleaved_1f1b", "pp_schedule.split=[layers.0,layers.7,norm]")))),
    *(case(f"pp 2, {schedule}, document mask", 2, "parallelism=pp", f"pp_schedule={schedule}", "data.local_batch=16",
           base=("model.vocab_size=4096", "data=embedded", "data.document_mask=true", "data.seq_len=256")) for schedule in ("1f1b", "zbv")),
    *(case(f"pp 2, tp 2, {schedule}, loss parallel {lp}", 4, "parallelism=pp", "parallelism.tp=2", f"pp_schedule={schedule}",
           f"parallelism.loss_parallel={lp}", "data.local_batch=16", slow=(schedule, lp) != ("zbv", "on"))
      for schedule in ("1f1b", "zbv") for lp in ("on", "off")),
    case("pp 2, tp 2, sequence parallel off", 4, "parallelism=pp", "parallelism.tp=2", "parallelism.sequence_parallel=off",
         "data.local_batch=16", slow=True),
    *(case(f"fsdp 8, tp 2, pp 2, {schedule}, uneven mask, vocabulary 2047", 8, "parallelism=fsdp_tp_pp", f"pp_schedule={schedule}",
           "data.local_batch=8", slow=True, **EVEN, **ODD) for schedule in ("1f1b", "zbv")),
    *(case(f"pp 2, cp 2, {schedule}", 4, "parallelism=pp", "parallelism.cp=2", f"pp_schedule={schedule}", "data.local_batch=16", slow=True)
      for schedule in ("1f1b", "zbv")),
    *(case(f"pp 2, {schedule}, compile", 2, "parallelism=pp", f"pp_schedule={schedule}", *COMPILED, "data.local_batch=16", slow=True)
      for schedule in ("1f1b", "interleaved_1f1b")),
    *(case(f"pp 2, {schedule}, linear cross-entropy", 2, "parallelism=pp", f"pp_schedule={schedule}", "loss=linear_cross_entropy",
           "data.local_batch=16", slow=True) for schedule in ("1f1b", "zbv")),
    case("pp 2, fsdp 2, simple_fsdp", 4, "parallelism=fsdp_pp", SIMPLE, "data.local_batch=8", slow=True),

    # SimpleFSDP
    *(case(f"simple_fsdp {ranks}", ranks, "parallelism=fsdp", SIMPLE, f"data.local_batch={16 // ranks}")
      for ranks in (2, 4)),
    case("simple_fsdp 4, vocabulary 2047, uneven mask", 4, "parallelism=fsdp", SIMPLE, "data.local_batch=2", uneven_mask=True, **ODD),
    *(case(f"simple_fsdp 2, compile the model, {name}", 2, "parallelism=fsdp", SIMPLE, "compile=model", "data.local_batch=8", *overrides,
           slow=True) for name, *overrides in (("by inductor",), ("ac lean", "ac=lean", "compile.backend=aot_eager"))),
    case("simple_fsdp 4, hsdp", 4, "parallelism=hsdp", SIMPLE, "data.local_batch=4"),
    case("simple_fsdp 2, tied embeddings", 2, "parallelism=fsdp", SIMPLE, "data.local_batch=8", base=("model.tie_embeddings=true",)),
    case("simple_fsdp 4, fsdp_tp", 4, "parallelism=fsdp_tp", SIMPLE, "data.local_batch=8", slow=True),
    case("simple_fsdp 4, fsdp_tp, compiled", 4, "parallelism=fsdp_tp", SIMPLE, "data.local_batch=8", *COMPILED,
         slow=True),
    case("simple_fsdp 4, fsdp_tp, vocabulary 2047", 4, "parallelism=fsdp_tp", SIMPLE, "data.local_batch=8", **ODD),

    # Context parallel
    *(case(f"cp {ranks}, {rotate}{'' if balance else ' in order'}, sequence {seq_len}", ranks, "parallelism=cp", f"parallelism.cp={ranks}",
           f"parallelism.cp_rotate={rotate}", *([] if balance else ["parallelism.cp_load_balance=false"]), "data.local_batch=16",
           slow=seq_len != 32 or (ranks == 4 and not balance), base=(f"data.seq_len={seq_len}",))
      for ranks in (2, 4) for seq_len in (16, 32, 64)
      for rotate, balance in (("allgather", True), ("allgather", False), ("alltoall", True), ("alltoall", False), ("ulysses", True))),
    *(case(f"fsdp 4, cp 2, {rotate}", 4, "parallelism=fsdp_cp", f"parallelism.cp_rotate={rotate}", "data.local_batch=8")
      for rotate in ("allgather", "alltoall", "ulysses")),
    case("ddp 4, cp 2", 4, "parallelism=ddp", "parallelism.cp=2", "data.local_batch=8"),
    case("simple_fsdp 4, cp 2", 4, "parallelism=fsdp_cp", SIMPLE, "data.local_batch=8", slow=True),
    case("hsdp 8, cp 2", 8, "parallelism=hsdp", "parallelism.cp=2", "data.local_batch=4", slow=True),
    case("cp 2, never reshard, accumulation 2", 2, "parallelism=cp", "data.local_batch=8", "parallelism.reshard_after_forward=never"),
    *(case(f"fsdp 4, cp 2, {rotate}, uneven mask, vocabulary 2047, accumulation 2", 4, "parallelism=fsdp_cp",
           f"parallelism.cp_rotate={rotate}", "data.local_batch=4", **EVEN, **ODD) for rotate in ("alltoall", "ulysses")),
    *(case(f"fsdp 8, cp 2, tp 2, {rotate}", 8, "parallelism=fsdp_cp", f"parallelism.cp_rotate={rotate}", "parallelism.tp=2",
           "data.local_batch=8", slow=True) for rotate in ("allgather", "ulysses")),
    *(case(f"cp 2, pp 2, {rotate}, {schedule}", 4, "parallelism=cp", f"parallelism.cp_rotate={rotate}", "parallelism.pp=2",
           f"pp_schedule={schedule}", "data.local_batch=16", slow=True, **DEEP)
      for rotate, schedule in (("alltoall", "1f1b"), ("alltoall", "zbv"), ("ulysses", "zbv"))),
    case("cp 2, tp 2, pp 2, uneven mask", 8, "parallelism=cp", "parallelism.tp=2", "parallelism.pp=2", "data.local_batch=8", **EVEN),
    case("fsdp 16, cp 2, tp 2, pp 2", 16, "parallelism=fsdp_tp_cp_pp", "parallelism.dp_shard=2", "parallelism.cp=2", "parallelism.tp=2",
         "parallelism.pp=2", "data.local_batch=8", slow=True),
    case("cp 2, ulysses, document mask", 2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16",
         base=("model.vocab_size=4096", "data=embedded", "data.document_mask=true", "data.seq_len=256")),
    case("cp 2, chunked loss", 2, "parallelism=cp", "loss=linear_cross_entropy", "data.local_batch=16"),
    *(case(f"cp 2, {rotate}, ac {mode}", 2, "parallelism=cp", f"parallelism.cp_rotate={rotate}", f"ac={mode}", "data.local_batch=16")
      for rotate, mode in (("alltoall", "full"), ("alltoall", "op"), ("ulysses", "op"), ("allgather", "offload"))),
    *(case(f"cp 2, {rotate}, compile", 2, "parallelism=cp", f"parallelism.cp_rotate={rotate}", *COMPILED, "data.local_batch=16", slow=True)
      for rotate in ("allgather", "ulysses")),

    # Number formats; the reference has the same format. Rowwise and MXFP8 scales are powers of two, so a split changes
    # no value. The exception is a row that tensor parallelism splits (wo, w2): each part has its own scale. A
    # tensorwise scale is computed from the tokens of one rank or microbatch, so the reference has the same microbatches.
    # Under cp a rank has its part of each sequence, as no process alone has, and values are rounded differently (by up to
    # 12 % in e5m2). Adam's division by the moments carries these differences to the weights.
    *(case(f"float8 rowwise, {layout} {ranks}", ranks, f"parallelism={layout}", f"data.local_batch={16 // ranks}", slow=ranks > 2,
           **ROWWISE)
      for layout, ranks in (("fsdp", 2), ("hsdp", 4))),
    case("float8 rowwise, fsdp 4, accumulation 2", 4, "parallelism=fsdp", "data.local_batch=2", slow=True, **ROWWISE),
    case("float8 rowwise, simple_fsdp 2", 2, "parallelism=fsdp", SIMPLE, "data.local_batch=8", **ROWWISE),
    case("float8 rowwise_with_gw_hp, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8",
         **ROWWISE | {"base": (*ROWWISE["base"], "precision.recipe=rowwise_with_gw_hp")}),
    case("float8 rowwise, pp 2", 2, "parallelism=pp", "parallelism.pp=2", "data.local_batch=8", **ROWWISE),
    case("float8 rowwise, cp 2", 2, "parallelism=cp", "parallelism.cp=2", "data.local_batch=16", **ROWWISE),
    case("float8 fused against torchao", 1, "parallelism=single", "data.local_batch=16", "precision.kernels=fused",
         **ROWWISE | {"gradients": 1e-2, "weights": 0.1}),  # scales that several linears share
    *(case(f"float8 fused, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", *more, slow=ranks > 2, **FUSED)
      for name, ranks, layout, batch, more in (
          ("fsdp 2", 2, "fsdp", 8, ()), ("hsdp 4", 4, "hsdp", 4, ()), ("fsdp 4, accumulation 2", 4, "fsdp", 2, ()),
          ("simple_fsdp 2", 2, "fsdp", 8, (SIMPLE,)), ("pp 2, 1f1b", 2, "pp", 16, ()),
          ("pp 2, zbv", 2, "pp", 16, ("pp_schedule=zbv",)), ("cp 2", 2, "cp", 16, ()),
          *((f"fsdp 2, ac {ac}", 2, "fsdp", 8, (f"ac={ac}",)) for ac in ("full", "layer", "op", "lean")))),
    *(case(f"float8 fused, fsdp 2, compile, ac {ac}", 2, "parallelism=fsdp", "data.local_batch=8", *COMPILED, f"ac={ac}", slow=True,
           **FUSED) for ac in ("none", "full", "lean")),
    case("mxfp8, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", **MXFP8),
    case("float8 rowwise, tp 2", 2, "parallelism=tp", "parallelism.tp=2", "data.local_batch=16",
         **ROWWISE | {"gradients": 2e-2}),
    case("float8 rowwise, fsdp 4, tp 2", 4, "parallelism=fsdp_tp", "data.local_batch=8", slow=True,
         **ROWWISE | {"gradients": 2e-2}),
    case("float8 tensorwise, tp 2", 2, "parallelism=tp", "parallelism.tp=2", "data.local_batch=16", microbatch=16, norm=5e-5,
         gradients=1e-3, weights=0.1, **TENSORWISE),
    case("float8 tensorwise, cp 2", 2, "parallelism=cp", "parallelism.cp=2", "data.local_batch=16", loss=1e-4, norm=5e-4, gradients=0.25,
         weights=0.5, **TENSORWISE),
    *(case(f"float8 tensorwise, fsdp 2, gathered as {format}", 2, "parallelism=fsdp", "data.local_batch=8",
           f"precision.float8_all_gather={format == 'float8'}", microbatch=8, **EIGHT_BITS, **TENSORWISE)
      for format in ("float8", "float32")),
    *(case(f"float8 tensorwise, {layout} 4, {other} 2", 4, f"parallelism={layout}", f"parallelism.{other}=2", "data.local_batch=8",
           microbatch=microbatch, **EIGHT_BITS | {"gradients": 1e-2}, slow=True, **TENSORWISE)
      for layout, other, microbatch in (("fsdp", "tp", 8), ("hsdp", "tp", 8), ("fsdp", "pp", 2))),

    # Number formats against float32: each product is rounded to 8 bits (bf16) or 4 bits (e4m3), which must not bias the
    # loss.
    *(case(f"{name} against fp32", 2, "parallelism=fsdp", "data.local_batch=8", f"precision={name}", *more, loss=1e-2, norm=1e-2,
           gradients=gradients, weights=0.5)
      for name, more, gradients in (("bf16", (), 0.03), ("float8_emulate", (), 0.15), ("mxfp8", ("precision.emulate=true",), 0.15),
                                    ("float8_tensorwise", ("precision.emulate=true",), 0.25))),
    case("float8 fused against fp32", 2, "parallelism=fsdp", "data.local_batch=8", "precision=float8_emulate", "precision.kernels=fused",
         loss=1e-2, norm=1e-2, gradients=0.15, weights=0.5),
    case("bf16 linear_cross_entropy against fp32", 2, "parallelism=fsdp", "data.local_batch=8", "precision=bf16", *LINEAR, loss=1e-2,
         norm=1e-2, gradients=0.03, weights=0.5),
    case("bf16 against fp32, one process", 1, "parallelism=single", "data.local_batch=16", "precision=bf16", loss=1e-3, norm=5e-3,
         gradients=0.03, weights=0.1),

    # Copies in bf16 that are one step old have another held-out loss, in layouts and in one process alike.
    case("bf16, validated, against fp32", 1, "parallelism=single", "data.local_batch=16", "precision=bf16", validated=True, loss=4e-4,
         norm=2e-2, gradients=0.03, weights=0.2, base=("optimizer=sgd", "optimizer.lr=1.0", "model.n_layers=2", "lr_scheduler=constant")),

    # bf16 layouts against one process in bf16
    case("bf16, single, accumulation 4", 1, "parallelism=single", "data.local_batch=4", **BF16),
    *(case(f"bf16, {layout} {ranks}, accumulation 2", ranks, f"parallelism={layout}", f"data.local_batch={8 // ranks}", **BF16)
      for layout, ranks in (("ddp", 2), ("fsdp", 2), ("hsdp", 4))),
    case("bf16, simple_fsdp 2, uneven mask", 2, "parallelism=fsdp", SIMPLE, "data.local_batch=8", uneven_mask=True, **BF16),
    *(case(f"bf16, tp 2, sequence parallel {sp}", 2, "parallelism=tp", f"parallelism.sequence_parallel={sp}", "data.local_batch=16", **BF16)
      for sp in ("on", "off")),
    case("bf16, fsdp 4, tp 2, uneven mask", 4, "parallelism=fsdp_tp", "data.local_batch=8", uneven_mask=True, **BF16),
    *(case(f"bf16, pp 2, {schedule}", 2, "parallelism=pp", f"pp_schedule={schedule}", "data.local_batch=16", **BF16)
      for schedule in ("1f1b", "interleaved_zb", "zbv")),
    case("bf16, fsdp 4, pp 2, zbv", 4, "parallelism=fsdp_pp", "pp_schedule=zbv", "data.local_batch=8", **BF16),
    case("bf16, pp 2, tp 2, zbv", 4, "parallelism=pp", "parallelism.tp=2", "pp_schedule=zbv", "data.local_batch=16", **BF16),
    *(case(f"bf16, cp 2, {rotate}", 2, "parallelism=cp", f"parallelism.cp_rotate={rotate}", "data.local_batch=16", **BF16)
      for rotate in ("allgather", "alltoall", "ulysses")),
    *(case(f"bf16, tp 2, {what}", 2, "parallelism=tp", *overrides, "data.local_batch=16", **BF16) for what, overrides in (
        ("compile", COMPILED), ("ac op", ("ac=op",)), ("ac offload", ("ac=offload",)))),
    # This loss rounds the logits' gradient before dividing it by the number of tokens; the plain loss divides first.
    *(case(f"bf16, {layout} 2, linear_cross_entropy, uneven mask, accumulation 2", 2, f"parallelism={layout}", f"data.local_batch={batch}",
           uneven_mask=True, **BF16 | {"base": ("precision=bf16", *LINEAR)}) for layout, batch in (("tp", 8), ("fsdp", 4))),
    case("bf16, fsdp 2, tied embeddings", 2, "parallelism=fsdp", "data.local_batch=8",
         **BF16 | TIED | {"base": ("precision=bf16", "model.tie_embeddings=true")}),

    # Adapters and other families
    case("lora, tp 2", 2, "parallelism=tp", "data.local_batch=16", base=("adapter=lora", "adapter.rank=4", *PLAIN_SGD),
         weights=1e-4),
    *in_bf16("lora", "adapter=lora", "adapter.rank=4"),
    *in_bf16("lora of experts", *MOE, *LORA_OF_EXPERTS, "adapter.rank=8", gradients=0.2, weights=0.3, routing=False, slow=True),
    *(case(f"lora of experts, {family}, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", *more, slow=ranks > 2,
           weights=1e-4, reference="float64", base=(*base, *LORA_OF_EXPERTS, *PLAIN_SGD))
      for family, base in SPARSE for name, ranks, layout, batch, *more in (
          ("single", 1, "single", 16), ("fsdp 2", 2, "fsdp", 8), ("fsdp 2, ep 2", 2, "fsdp", 4, "parallelism.ep=2"),
          ("tp 2", 2, "tp", 16), ("tp 2, ep 2", 2, "tp", 16, "parallelism.ep=2"), ("pp 2", 2, "pp", 8),
          ("fsdp 4, ep 2", 4, "fsdp", 4, "parallelism.ep=2"), ("fsdp 2, ep 2, ac op", 2, "fsdp", 8, "parallelism.ep=2", "ac=op"))
      if family == "qwen3_moe" or layout != "tp"),
    *in_bf16("qwen3", *QWEN, gradients=2e-2),
    *(found for family, base in SPARSE for found in in_bf16(family, *base, gradients=0.2, weights=0.3, routing=False, slow=True)),

    # Split masters: layouts against one process with split masters, and against one process with float32 masters.
    case("split masters, single, accumulation 4", 1, "parallelism=single", "data.local_batch=4", **SPLIT),
    *(case(f"split masters, {name}", 4 if "4" in name else 2, *overrides, slow="4" in name, **SPLIT) for name, overrides in (
        ("fsdp 2, accumulation 2", ("parallelism=fsdp", "data.local_batch=4")),
        ("fsdp 2, never reshard", ("parallelism=fsdp", "data.local_batch=8", "parallelism.reshard_after_forward=never", "ac=lean")),
        ("fsdp 2, gradients summed in bfloat16", ("parallelism=fsdp", "data.local_batch=8", "precision.reduce_dtype=bfloat16")),
        ("tp 2, sequence parallel", ("parallelism=tp", "data.local_batch=16")),
        ("pp 2, zbv", ("parallelism=pp", "data.local_batch=16", "pp_schedule=zbv")),
        ("cp 2, ulysses", ("parallelism=cp", "data.local_batch=16", "parallelism.cp_rotate=ulysses")),
        ("hsdp 4", ("parallelism=hsdp", "data.local_batch=4")), ("fsdp 4, pp 2", ("parallelism=fsdp_pp", "data.local_batch=8")),
        ("fsdp 4, tp 2, compile", ("parallelism=fsdp_tp", "data.local_batch=8", *COMPILED)))),
    *(case(f"split masters, {layout} 2, tied embeddings", 2, f"parallelism={layout}", f"data.local_batch={batch}",
           **SPLIT | TIED | {"base": (*HALVED, "model.tie_embeddings=true")})
      for layout, batch in (("fsdp", 8), ("tp", 16))),
    case("split masters, fsdp 4, tp 2, vocabulary 2047, uneven mask", 4, "parallelism=fsdp_tp", "data.local_batch=8", uneven_mask=True,
         **SPLIT | {"base": (*HALVED, "model.vocab_size=2047")}),
    *(case(f"split masters against whole ones, {layout} 2", 2, f"parallelism={layout}", f"data.local_batch={batch}",
           "optimizer.masters=split", **BF16) for layout, batch in (("fsdp", 8), ("tp", 16))),
    case("split masters, qwen3_moe, fsdp 2, ep 2", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=8",
         **SPLIT | {"base": (*MOE, *HALVED), "gradients": 0.2, "weights": 0.3, "routing": False}),

    # Qwen3 normalizes each head; the gradients of these norms are partial sums on tensor-parallel ranks.
    case("qwen3, single, against float64", 1, "parallelism=single", "data.local_batch=4", reference="float64", base=QWEN),
    case("qwen3, fsdp 2, tied embeddings", 2, "parallelism=fsdp", "data.local_batch=8", base=(*QWEN, "model.tie_embeddings=true")),
    *(case(f"qwen3, tp 2, sequence parallel {sp}", 2, "parallelism=tp", f"parallelism.sequence_parallel={sp}", "data.local_batch=16",
           base=QWEN) for sp in ("on", "off")),
    case("qwen3, fsdp 4, tp 2, uneven mask", 4, "parallelism=fsdp_tp", "data.local_batch=8", **EVEN, base=QWEN),
    case("qwen3, fsdp 4, tp 2, compile, ac op", 4, "parallelism=fsdp_tp", *COMPILED, "ac=op", "data.local_batch=8", slow=True, base=QWEN),
    case("qwen3, pp 2, zbv", 2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16", base=QWEN),
    *(case(f"qwen3, cp 2, {rotate}", 2, "parallelism=cp", f"parallelism.cp_rotate={rotate}", "data.local_batch=16", base=QWEN,
           slow=rotate == "alltoall") for rotate in ("alltoall", "ulysses")),
    case("qwen3, cp 2, tp 2, pp 2", 8, "parallelism=cp", "parallelism.tp=2", "parallelism.pp=2", "data.local_batch=8", slow=True,
         base=QWEN),
    case("qwen3, simple_fsdp 2", 2, "parallelism=fsdp", SIMPLE, "data.local_batch=8", slow=True, base=QWEN),
    # The gradient of a head's norm is a small sum of large terms. Each rank rounds its terms before they are added, so
    # the gradient differs by 1.03e-2 on two ranks.
    *(case(f"qwen3, bf16, {layout} 2", 2, f"parallelism={layout}", f"data.local_batch={batch}",
           **BF16 | {"base": (*QWEN, "precision=bf16"), "gradients": 2e-2}) for layout, batch in (("fsdp", 8), ("tp", 16))),
    case("qwen3, float8 rowwise, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", **ROWWISE | {"base": (*QWEN, *ROWWISE["base"])}),
    case("qwen3, float8 fused, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", **FUSED | {"base": (*QWEN, *FUSED["base"])}),

    # NVFP4 has a scale of the whole tensor, as tensorwise Float8 has, and one in sixteen values. With the reference's
    # microbatches a layout rounds the same values, but for cp. Gradients are rounded with noise, which follows from the values.
    *(case(f"nvfp4, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", slow=ranks > 2, microbatch=microbatch,
           **EIGHT_BITS | NOISY, base=("precision=fp32", *NVFP4))
      for name, ranks, layout, batch, microbatch in (("fsdp 2", 2, "fsdp", 8, 8), ("pp 2", 2, "pp", 8, 2), ("hsdp 4", 4, "hsdp", 4, 4))),
    *(case(f"nvfp4, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", loss=1e-2, norm=5e-2,
           gradients=0.35, weights=0.6, base=("precision=fp32", *NVFP4))
      for name, ranks, layout, batch in (("single, accumulation 4", 1, "single", 4), ("cp 2", 2, "cp", 16))),
    case("nvfp4, bf16, fsdp 2, ac op", 2, "parallelism=fsdp", "data.local_batch=8", "ac=op", microbatch=8,
         **EIGHT_BITS | NOISY | {"gradients": 1e-2}, base=("precision=bf16", *NVFP4)),
    case("nvfp4 against fp32", 2, "parallelism=fsdp", "data.local_batch=8", *NVFP4, base=("precision=fp32", *NVFP4[2:]), loss=2e-2,
         norm=5e-2, gradients=0.5, weights=0.8),
    # Experts in MXFP8. Elements that share a scale are part of one row, or of one row or column of a weight, which no layout
    # splits, so a layout rounds the same values. In later steps a last bit may still change a rounded value, and with it a
    # token's experts.
    *(case(f"mxfp8 experts, {family}, {name}", ranks, f"parallelism={layout}", f"data.local_batch={batch}", *more, slow=ranks > 2,
           routing=False, weights=0.2, base=(*base, "precision=fp32", *MXFP8_EXPERTS))
      for family, base in SPARSE for name, ranks, layout, batch, *more in (
          ("fsdp 2", 2, "fsdp", 8), ("fsdp 2, ep 2", 2, "fsdp", 4, "parallelism.ep=2"), ("tp 2", 2, "tp", 16),
          ("tp 2, ep 2", 2, "tp", 16, "parallelism.ep=2"), ("pp 2", 2, "pp", 8), ("fsdp 4, pp 2", 4, "fsdp_pp", 8, "parallelism.ep=2"))),
    case("mxfp8 experts and linears, deepseek_v3, fsdp 2, ep 2", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=8",
         routing=False, weights=0.2, base=(*LATENT, "precision=fp32", *MXFP8_EXPERTS, "precision.converts=both")),
    *in_bf16("mxfp8 experts", *MOE, *MXFP8_EXPERTS, gradients=0.2, weights=0.3, routing=False, slow=True),
    case("mxfp8 experts against fp32", 2, "parallelism=fsdp", "data.local_batch=8", *MXFP8_EXPERTS, base=(*MOE, "precision=fp32"),
         loss=1e-2, norm=1e-2, gradients=0.15, weights=0.5, routing=False),
    # Experts are distributed over ep of the dp_shard x cp x tp ranks; each expert is sharded over all ranks that hold
    # the same experts.
    *(case(f"{family}, single, accumulation 4", 1, "parallelism=single", "data.local_batch=4", base=base) for family, base in SPARSE),
    *(case(f"{family}, {name}, ep {ep}", ranks, f"parallelism={layout}", f"parallelism.ep={ep}", f"data.local_batch={batch}", *more,
           base=base, uneven_mask=mask,
           slow=ranks > 4 or ((ranks > 2) is (family == "qwen3_moe") and (name, ep) != ("tp 2", 2)))
      for name, ranks, layout, ep, batch, mask, *more in (
          ("fsdp 2", 2, "fsdp", 1, 8, False), ("fsdp 2", 2, "fsdp", 2, 4, True), ("tp 2", 2, "tp", 1, 16, False),
          ("tp 2", 2, "tp", 2, 16, True), ("simple_fsdp 2", 2, "fsdp", 1, 8, False, SIMPLE),
          ("fsdp 4", 4, "fsdp", 2, 4, False), ("fsdp 4", 4, "fsdp", 4, 2, True), ("hsdp 4", 4, "hsdp", 2, 4, False),
          ("fsdp 4, tp 2", 4, "fsdp_tp", 1, 8, False), ("fsdp 4, tp 2", 4, "fsdp_tp", 2, 4, True),
          ("fsdp 4, tp 2", 4, "fsdp_tp", 4, 8, False), ("fsdp 4, cp 2", 4, "fsdp_cp", 4, 8, True),
          ("cp 2, ulysses", 2, "cp", 2, 16, False, "parallelism.cp_rotate=ulysses"),
          ("fsdp 4, pp 2", 4, "fsdp_pp", 2, 8, True), ("tp 2, pp 2", 4, "pp", 2, 16, True, "parallelism.tp=2"),
          ("fsdp 4, pp 2, interleaved_zb", 4, "fsdp_pp", 2, 8, True, "pp_schedule=interleaved_zb"),
          ("fsdp 8, cp 2, tp 2", 8, "fsdp_cp", 8, 8, True, "parallelism.tp=2"),
          ("fsdp 8, cp 2, tp 2", 8, "fsdp_cp", 2, 8, False, "parallelism.tp=2"),
          ("hsdp 8, tp 2", 8, "hsdp", 4, 4, False, "parallelism.tp=2")) for family, base in SPARSE),
    *(case(f"{family}, fsdp 2, ep 2, {name}", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=4", *more, base=base,
           slow="compile" in name or family == "qwen3_moe")
      for name, *more in (
          *((f"ac {ac}", f"ac={ac}") for ac in ("full", "layer", "op", "lean", "offload")), ("linear_cross_entropy", *LINEAR),
          *((f"compile, ac {ac}", *COMPILED, f"ac={ac}") for ac in ("none", "full", "op", "offload")))
      for family, base in SPARSE),
    *(case(f"{family}, tp 2, ep 2, compile", 2, "parallelism=tp", "parallelism.ep=2", "data.local_batch=16", *COMPILED, base=base,
           slow=True) for family, base in SPARSE),
    *(case(f"{family}, {layout} {ranks}, ep {ranks}, compile by inductor", ranks, f"parallelism={layout}", f"parallelism.ep={ranks}",
           "data.local_batch=4", "compile=block", base=base, slow=True) for ranks, layout in ((1, "single"), (2, "fsdp"))
      for family, base in SPARSE),
    case("deepseek_v3, fsdp 2, tp 2, ep 2, no latent of queries", 4, "parallelism=fsdp_tp", "parallelism.ep=2", "data.local_batch=8",
         base=(*LATENT, "model.q_lora_rank=0")),
    *(case(f"{family}, fsdp 2, ep 2, muon", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=8",
           **MUON | {"base": (*base, "optimizer=muon"), "loss": 1e-4, "norm": 1e-4, "routing": False}) for family, base in SPARSE),
    # Weights differ from the reference by 5e-2 of the distance that they have moved. So some tokens use other experts
    # than in the reference, and the loads of 6 to 36 experts differ.
    *(case(f"{family}, fsdp 2, ep 2, float8 {name}", 2, "parallelism=fsdp", "parallelism.ep=2", "data.local_batch=8",
           **format | {"base": (*base, *format["base"]), "routing": False})
      for family, base in SPARSE for name, format in (("rowwise", ROWWISE), ("fused", FUSED))),
    # If one token uses another expert, a router's gradient of step 1 differs by 0.13; without such a token it differs
    # by 6e-3.
    *(case(f"{family}, bf16, {name} 2, ep {ep}", 2, f"parallelism={name}", f"parallelism.ep={ep}", f"data.local_batch={batch}",
           **BF16 | {"base": (*base, "precision=bf16"), "gradients": 0.2, "weights": 0.3, "routing": False})
      for name, ep, batch in (("fsdp", 1, 8), ("fsdp", 2, 8), ("tp", 2, 16)) for family, base in SPARSE),

    # One process against separate arithmetic in float64. A small max_norm clips every step.
    *(case(f"{name}, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | {"base": base} | more)
      for name, base, more in (
          ("llama3", ("optimizer.max_norm=0.1", "optimizer.weight_decay=0.5", "model.norm_eps=1e-4", *STRETCHED), {}),
          ("llama3, tied, documents, uneven mask", ("model.tie_embeddings=true", "lr_scheduler=cosine", "lr_scheduler.warmup_steps=0",
                                                    "optimizer.decay_matrices_only=true", "model.rope_theta=2e4"),
           {"uneven_mask": True, "documents": True, "empty_step": True, "validated": True, "exported": True}),
          ("llama3, packed documents", (*PACKED, "model.n_layers=2", "model.attention=math"), {}),
          ("llama3, a mixture, validated", (*MIXTURE, "model.n_layers=2"), {"validated": True}),
          ("lora", ("adapter=lora", "adapter.rank=4", *PLAIN_SGD, "lr_scheduler.decay_ratio=0.56"), {}),
          ("llama3, muon", ("optimizer=muon", "lr_scheduler.warmup_steps=10"), {"loss": 3e-4, "norm": 3e-3, "weights": 0.5}),
          ("qwen3_moe", MOE, {}),
          ("qwen3_moe, twelve experts, exported", (*MOE, "model.router_bias_update_rate=0", "model.n_experts=12", "model.n_layers=2"),
           {"validated": True, "exported": True}),
          ("qwen3_moe, muon", (*MOE, "optimizer=muon", "lr_scheduler.warmup_steps=1", "model.n_layers=2"),
           {"loss": 3e-4, "norm": 3e-3, "weights": 0.5, "routing": False}),
          ("qwen3_moe, plain scores, a dense block, the loss of balance", (*MOE, "model.norm_topk_prob=false",
           "model.first_k_dense_replace=1", "model.routed_scaling_factor=1.5", "model.sequence_balance=0.05"), {"uneven_mask": True}),
          ("qwen3_moe, sigmoid", (*MOE, "model.router=sigmoid", "model.n_shared_experts=1", "model.router_bias_update_rate=0.05"), {}),
          ("deepseek_v3", LATENT, {}),
          ("deepseek_v3, yarn, no latent of queries", (*LATENT, *YARN, "model.q_lora_rank=0", "model.norm_eps=1e-4"), {}))),

    # Head and loss in one kernel, chunk by chunk.
    case("linear_cross_entropy, single, accumulation 4", 1, "parallelism=single", "data.local_batch=4", *LINEAR, **SAME),
    *(case(f"linear_cross_entropy, fsdp 2, {what}", 2, "parallelism=fsdp", "data.local_batch=8", *LINEAR, *more, **SAME, **base)
      for what, more, base in (("vocabulary 2047", (), ODD), ("tied embeddings", (), {"base": ("model.tie_embeddings=true",)}),
                               ("always reshard", ("parallelism.reshard_after_forward=always",), {}),
                               ("simple_fsdp", (SIMPLE,), {}))),
    case("linear_cross_entropy, fsdp 4, accumulation 2", 4, "parallelism=fsdp", "data.local_batch=2", *LINEAR, slow=True, **SAME),
    case("linear_cross_entropy, tp 2, vocabulary 2047", 2, "parallelism=tp", "data.local_batch=16", *LINEAR, **SAME, **ODD),
    case("linear_cross_entropy, fsdp 4, tp 2, vocabulary 2047", 4, "parallelism=fsdp_tp", "data.local_batch=8", *LINEAR, **SAME, **ODD),
    case("linear_cross_entropy, tp 2, tied embeddings, no sequence parallel", 2, "parallelism=tp", "parallelism.sequence_parallel=off",
         "data.local_batch=16", *LINEAR, **SAME, base=("model.tie_embeddings=true",)),
    *(case(f"linear_cross_entropy, pp 2, {schedule}", 2, "parallelism=pp", f"pp_schedule={schedule}", "data.local_batch=8", *LINEAR, **SAME)
      for schedule in ("1f1b", "zbv")),
    case("linear_cross_entropy, fsdp 4, cp 2", 4, "parallelism=fsdp_cp", "data.local_batch=8", *LINEAR, slow=True, **SAME),
]
# fmt: on


def whole_matrix() -> list[Case]:
    """Return the cases of the package, and the cases that come with objectives: those of recipes and the user's own.
    With torch 2.11, leave out those that a rule refuses then.
    """
    cases = [
        *MATRIX,
        *CONTINUED,
        *HEADS,
        *SCALED,
        *MANY,
        *(listed for record in OBJECTIVES.values() for listed in resolve(record.cases) or ()),
    ]
    return [
        listed for listed in cases if not versions()["torch"].startswith("2.11.") or listed.name not in NOT_ON_OLD_TORCH
    ]
