"""A case of the acceptance matrix, the model that most cases train, and overrides and bounds that many cases share.
Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES

# A model that trains in seconds and has what layouts split: grouped queries, several blocks, and a feed-forward whose
# width is not a power of two.
BASE = (
    "precision=fp32",
    "model.dim=64",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.ffn_dim=192",
    "model.vocab_size=512",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch=16",
    "lr_scheduler.warmup_steps=2",
    "optimizer.lr=2e-3",
    "checkpoint=off",
)

# cases that a rule refuses with torch 2.11, which cannot split these backwards (core/job/rules/pipeline.py)
NOT_ON_OLD_TORCH = (
    "pp 2, zbv, linear cross-entropy",
    "linear_cross_entropy, pp 2, zbv",
    "float8 fused, pp 2, zbv",
    "qwen3_moe, fsdp 4, pp 2, interleaved_zb, ep 2",
    "deepseek_v3, fsdp 4, pp 2, interleaved_zb, ep 2",
)
QUICK_STEPS = 3  # optimizer steps of a case in the tests
# The smallest global batch of a case that may need a band: its draws cut the batch into as many as four parts and change
# the order of the samples (judge.DRAWS).
SAMPLES = 4
EVEN = {"uneven_mask": True, "loss": 1e-6, "norm": 1e-6, "gradients": 1e-5}
SCHEDULES = tuple(kind.name for kind in PIPELINE_SCHEDULES.values() if not kind.from_file)
DEEP = {"base": ("model.n_layers=8",)}  # enough layers for two stages on each of four ranks
DEEP_ODD = {"base": ("model.n_layers=8", "model.vocab_size=2047")}
ODD = {"base": ("model.vocab_size=2047",)}
# A float32 value that differs in its last bit may be rounded to a neighbouring 8-bit value, up to an eighth away, and
# steps amplify this difference. One such value changes a gradient by 1.5e-5 under context parallelism.
EIGHT_BITS = {"loss": 5e-5, "norm": 2e-4, "gradients": 1e-4, "weights": 0.2}
ROWWISE: dict[str, Any] = {"base": ("precision=float8_emulate", "precision.compute_dtype=float32"), **EIGHT_BITS}
FUSED: dict[str, Any] = ROWWISE | {"base": (*ROWWISE["base"], "precision.kernels=fused")}
TENSORWISE = {"base": ("precision=float8_tensorwise", "precision.emulate=true", "precision.compute_dtype=float32")}
MXFP8 = {"base": ("precision=mxfp8", "precision.emulate=true", "precision.compute_dtype=float32")}
MXFP8_EXPERTS = ("precision.converter=mxfp8", "precision.converts=experts", "precision.emulate=true")
NVFP4 = (
    "precision.converter=nvfp4",
    "precision.emulate=true",
    "model.dim=128",
    "model.ffn_dim=256",
    "model.n_layers=2",
)
# Steps in 4 bits amplify the last bits of sums: ten of them by 4.5e-5 of the loss and 0.29 of a weight's change.
NOISY = {"loss": 5e-4, "norm": 1e-3, "weights": 0.6}
# The gradients of an adapter's A are 0 in the first step. The later gradients are visible in the weights, as SGD's
# steps are proportional to them.
PLAIN_SGD = ("optimizer=sgd", "optimizer.lr=1.0", "optimizer.weight_decay=0", "lr_scheduler.warmup_steps=1")
LORA_OF_EXPERTS = ("adapter=lora", "adapter.rank=4", "adapter.experts=true")
COMPILED = ("compile=block", "compile.backend=aot_eager")
SIMPLE = "parallelism.backend=simple_fsdp"
# no case has a multiple of 100 tokens, so the last chunk is smaller
LINEAR = ("loss=linear_cross_entropy", "loss.chunk_tokens=100")
# Muon orthogonalizes in bf16, whose rounding reaches the weights.
MUON = {"base": ("optimizer=muon",), "loss": 5e-6, "weights": 0.5}
SAME = EVEN | {"norm": 1e-5}
QWEN = ("model=qwen3_debug", "model.head_dim=16")  # this makes heads wider than dim / n_heads
MOE = ("model=qwen3_moe_debug", "model.head_dim=16", "model.expert_dim=64", "model.router_bias_update_rate=1e-3")
LATENT = (
    "model=deepseek_v3_debug",
    "model.q_lora_rank=24",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.n_experts=8",
    "model.experts_per_token=2",
    "model.expert_dim=32",
    "model.sequence_balance=0.01",
)
SPARSE = (("qwen3_moe", MOE), ("deepseek_v3", LATENT))
# The reference in float64 is separate code (reference.py), so it also finds faults that one process and all layouts
# share.
EXACT: dict[str, Any] = {"reference": "float64", "loss": 2e-6, "norm": 1e-5, "gradients": 1e-5, "weights": 2e-3}
STRETCHED = ("model.rope_scaling.factor=8", "model.rope_scaling.original_max_seq_len=16")
PACKED = ("model.vocab_size=4096", "data=embedded", "data.seq_len=64", "data.document_mask=true")
MIXTURE = (
    "data=mixture",
    "+data.mixture={a: {name: synthetic, weight: 1}, b: {name: synthetic, weight: 1}, c: {name: embedded, weight: 2}}",
    "model.vocab_size=4096",
)
YARN = ("model.yarn.factor=8", "model.yarn.original_max_seq_len=16", "model.yarn.temperature=0.7")
# Products and gradients are rounded to bfloat16's 8 bits, sums are not. A layout cuts sums at other places, so other
# partial sums are rounded. Even in one process, cutting the sums changes the loss by up to 1e-4 (`bf16, sft, fsdp 4, tp
# 2`, ten steps).
BF16: dict[str, Any] = {"loss": 3e-4, "norm": 2e-4, "gradients": 1e-2, "weights": 0.1, "base": ("precision=bf16",)}
# After ten steps, a model with tied embeddings in bf16 differs from the same model in float64 by 1.3e-3 of the loss and
# 8e-3 of the norm, both in one process and on two ranks.
TIED = {"loss": 5e-4, "norm": 6e-3}
HALVED = ("precision=bf16", "optimizer.masters=split")
SPLIT = BF16 | {"base": HALVED}
LAYOUTS_IN_BF16 = (("tp 2", 2, "tp"), ("pp 2", 2, "pp"), ("fsdp 4, tp 2", 4, "fsdp_tp"))


@dataclass(frozen=True)
class Case:
    """A layout to be verified. Its reference is the same job in one process, or reference.py in float64.

    The bounds limit relative differences. If the steps of a case amplify rounding, its bounds are wide, and judge.py
    measures a narrower band.
    """

    name: str
    ranks: int  # number of gloo ranks
    overrides: tuple[str, ...]  # the overrides that choose the layout
    base: tuple[str, ...] = ()  # overrides of both the layout's job and its reference
    # whether labels are ignored: in each sample and step a different number of them (verify.vary)
    uneven_mask: bool = False
    documents: bool = False  # whether a sample consists of documents that do not attend to each other (verify.vary)
    empty_step: bool = False  # whether no label at all counts at step 2 (verify.vary)
    # whether the run is saved halfway and continued by a new trainer, and compared with an uninterrupted reference
    resumed: bool = False
    # further overrides of the trainer that continues after the restart; only a float64 reference follows keys that
    # change what is learned
    then: tuple[str, ...] = ()
    validated: bool = False  # whether the held-out loss is measured at the end (twice, if resumed) and compared too
    # whether the model is also exported, and the export's held-out loss compared; only with one process
    exported: bool = False
    reference: Literal["process", "float64"] = "process"
    # samples of a local batch of the reference; None: all of the global batch. Formats that have one scale for a whole
    # tensor take it from the tokens of a microbatch, so their reference has the layout's microbatches
    microbatch: int | None = None
    loss: float = 1e-5  # bound of each step's loss
    norm: float = 1e-5  # bound of each step's gradient norm
    gradients: float = 1e-5  # bound of the worst parameter's gradient at the first step
    weights: float = 1e-3  # bound of the worst parameter's weight at the end, relative to how far the weight has moved
    # whether every token must use the same experts as in the reference; False in bf16, where rounding changes the
    # experts of some tokens
    routing: bool = True
    threads: bool = False  # whether the ranks are threads of one process (threads.py)
    slow: bool = False  # whether the case takes many seconds, so that `pytest -m "not slow"` leaves it out
    config_dir: Path | tuple[Path, ...] | None = None  # folders with the user's options

    @property
    def quick(self) -> bool:
        """Whether it is short: a cover of the short cases is in the default test suite."""
        return (self.ranks <= 2 or self.threads) and not self.slow


def case(name: str, ranks: int, *overrides: str, **options) -> Case:
    """Build a case with gpus=`ranks`."""
    return Case(name, ranks, (f"gpus={ranks}", *overrides), **options)


def in_bf16(
    title: str, *base: str, layouts: Iterable[tuple[str, int, str]] = LAYOUTS_IN_BF16, slow: bool = False, **options
) -> list[Case]:
    """Return a case in bf16 for each layout (name, ranks, option of `parallelism`) of the job `base`; cases of four
    ranks are marked slow.

    The model is small. The optimizer is SGD, as AdamW moves an element by the whole learning rate even if rounding
    alone decides the sign of its gradient.
    """
    small = ("precision=bf16", "optimizer=sgd", "optimizer.lr=0.1", "data.global_batch=8", "model.n_layers=2", *base)
    batches = {"tp": 8, "pp": 8, "cp": 8, "fsdp": 4, "fsdp_tp": 4, "hsdp": 2}
    return [
        case(
            f"bf16, {title}, {name}",
            ranks,
            f"parallelism={layout}",
            f"data.local_batch={batches[layout]}",
            slow=slow or ranks > 2,
            **BF16 | {"norm": 1e-3} | options | {"base": small},
        )
        for name, ranks, layout in layouts
    ]
