"""What a job is: every configuration key has its type, default, range and description here. `conf/` only chooses values
for these keys.

`key(default, help, range)` describes a field. A number always has a range; a text without a range may be any line that
is not empty; a key with choices, or of type bool, needs no range. If a section selects a part by its `name` (a model by
`family`, a cluster by `executor`), it has the keys of that part in addition to its own (parts.py, load.PICKED). `only`
names the options of a group with which the key is read; with any other option the key must keep its default.
`identity=False` marks keys that do not change the experiment (where it runs, how it is logged); they are left out of
the hash that names the run directory. `changes` states what changes with the value of the key, and so which runs may be
compared: "learning", "work" (what a step computes or how long it takes), both, "held-out loss" (only the samples on
which this loss is measured), or "technique". The `changes` of a section apply to all its keys; the default is
"learning".
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from .field import key
from .model import Model
from .operation import (
    Checkpoint,
    Cluster,
    Comm,
    Debug,
    FaultTolerance,
    Hardware,
    Launch,
    Metrics,
    Paths,
    Profiling,
    Search,
    Sweep,
    Validation,
)
from .ranges import BELOW_ONE, COUNT, DEGREE, NAME, NATURAL, NOT_NEGATIVE, NOTE, PATH, POSITIVE, WORD, Interval
from .registry import (
    ACTIVATION_CHECKPOINTS,
    ADAPTERS,
    CP_ROTATIONS,
    FORMATS,
    LR_SCHEDULES,
    OBJECTIVES,
    OPTIMIZERS,
    PARAMETRIZATIONS,
    PIPELINE_SCHEDULES,
    Names,
)
from .source import Data
from .source import Part as Part
from .source import Source as Source

DEGREE_OR_REST = Interval(1, 1_000_000, also=(-1,))
EPOCH = "epoch"  # the value of `steps` for one pass over the data
UNCOUNTED = 0  # the value of data.samples until the samples of a pass are counted


@dataclass
class Parallelism:
    name: str = key(..., "name of the option of conf/parallelism", NAME)
    dp_replicate: int = key(1, "data-parallel copies of the model (DDP, or the outer half of HSDP)", DEGREE_OR_REST)
    dp_shard: int = key(
        1,
        "data-parallel ranks that share one copy of the model (FSDP); -1: `gpus` divided by the other degrees",
        DEGREE_OR_REST,
    )
    cp: int = key(1, "context-parallel ranks: the sequence is split over them", DEGREE)
    tp: int = key(1, "tensor-parallel ranks: every matrix is split over them", DEGREE)
    pp: int = key(1, "pipeline-parallel ranks: the layers are split over them", DEGREE)
    ep: int = key(1, "expert-parallel ranks, among those of dp_shard x cp x tp: experts are split over them", DEGREE)
    backend: str = key(
        "fsdp2",
        "what shards parameters: torch's FSDP2, or SimpleFSDP, whose communication a compiler can optimize",
        choices=("fsdp2", "simple_fsdp"),
    )
    reshard_after_forward: str = key(
        "default",
        "when gathered parameters are freed after the forward; default: always (ZeRO-3), but never (ZeRO-2) with pipeline parallelism",
        choices=("default", "always", "never"),
    )
    sequence_parallel: bool = key(True, "with tensor parallelism, also split norms and residuals over the sequence")
    loss_parallel: bool = key(
        True, "with tensor parallelism, compute the loss on logits that stay split over the vocabulary"
    )
    async_tp: bool = key(False, "overlap tensor-parallel communication with matmuls; needs compile and CUDA")
    cp_rotate: str = key("allgather", "how context parallelism moves keys and values", choices=Names(CP_ROTATIONS))

    @property
    def sequence_parts(self) -> int:
        """The number of parts into which context parallelism cuts a sequence: one for each rank, two in a balanced ring."""
        return self.cp * (2 if self.cp > 1 and self.balanced else 1)

    @property
    def balanced(self) -> bool:
        """Whether each context-parallel rank has early and late parts of a sequence (`cp_load_balance` of a ring)."""
        return getattr(self, "cp_load_balance", False)


@dataclass
class PipelineSchedule:
    name: str = key("1f1b", "pipeline schedule", choices=Names(PIPELINE_SCHEDULES))
    stages_per_rank: int = key(
        1,
        "stages on each pipeline rank: 1 for gpipe and 1f1b, 2 for zbv and dualpipe_v, 2 or more for other schedules",
        Interval(1, 1000),
    )
    microbatches: int | None = key(
        None,
        "number of microbatches in a local batch; null: twice the number of stages, or fewer if the local "
        "batch is small",
        COUNT,
    )
    layers_per_stage: int | None = key(
        None,
        "number of transformer blocks in a stage; null: stages are balanced, and embedding and head count as "
        "one block each",
        COUNT,
    )
    split: list[str] = key(
        list,
        "name of the first module of each stage except the first stage, as [layers.2,layers.4]; empty: split "
        "by layers_per_stage",
        WORD,
    )


@dataclass
class ActivationCheckpoint:
    name: str = key("none", "what the forward pass keeps for the backward", choices=Names(ACTIVATION_CHECKPOINTS))


@dataclass
class Precision:
    name: str = key("bf16", "name of the option of conf/precision", NAME)
    param_dtype: str = key(
        "float32", "dtype of the weights that the optimizer updates", choices=("float32", "bfloat16")
    )
    compute_dtype: str = key("bfloat16", "dtype of forward and backward", choices=("float32", "bfloat16"))
    reduce_dtype: str = key(
        "float32", "dtype in which gradients are summed over ranks", choices=("float32", "bfloat16")
    )
    converter: str | None = key(
        None, "number format in which linears multiply; null: that of compute_dtype", choices=Names(FORMATS)
    )
    emulate: bool = key(
        False, "emulate the number format of linears in higher precision, for hardware that does not have this format"
    )
    skip: list[str] = key(lambda: ["output"], "names of linears that are not converted", WORD)


@dataclass
class Adapter:
    name: str = key("none", "adapters that are trained beside a frozen model, or none", choices=Names(ADAPTERS))
    linears: list[str] = key(
        list, "names of the linears that get adapters, such as [wq,wv]; empty: all linears of a block", WORD
    )


@dataclass
class Parametrization:
    name: str = key(
        "standard",
        "how initial values, learning rates and scales follow from the width and depth of the model",
        choices=Names(PARAMETRIZATIONS),
    )


@dataclass
class Compile:
    name: str = key("off", "what torch.compile compiles", choices=("off", "block", "model"))
    backend: str = key("inductor", "torch.compile back end", WORD, only=("block", "model"))


@dataclass
class Optimizer:
    name: str = key("adamw", "optimizer", choices=Names(OPTIMIZERS))
    lr: float = key(3e-4, "peak learning rate", NOT_NEGATIVE)
    weight_decay: float = key(
        0.1, "decoupled weight decay, only of matrices if decay_matrices_only is true", NOT_NEGATIVE
    )
    decay_matrices_only: bool = key(False, "no weight decay for norms and biases (TorchTitan decays everything)")
    max_norm: float = key(1.0, "gradients are clipped to this norm; 0 turns clipping off", NOT_NEGATIVE)
    qk_clip: float | None = key(
        None,
        "largest logit that attention should have (QK-clip of MuonClip, arXiv 2507.20534; there 100): after a step in "
        "which a head exceeds it, the weights of the head's queries and keys are scaled; null: off",
        POSITIVE,
        identity="if set",
        changes="learning and work",
    )
    masters: str = key(
        "whole",
        "the optimizer's float32 weights: whole, or split into the bfloat16 weights with which the model computes "
        "and the other 16 bits of each weight, which saves up to 4 bytes per parameter",
        choices=("whole", "split"),
        changes="technique",
    )
    offload: bool = key(
        False,
        "keep the optimizer's states, such as AdamW's moments, in the host's pinned memory between steps; an update brings "
        "them to the device and back, and gives the same weights",
        identity="if set",
        changes="technique",
    )
    ema_decay: float = key(
        0.0,
        "decay of an exponential moving average (EMA) of the weights, such as 0.999, which validation.ema and `titan "
        "checkpoint export --ema` use; training does not read it; 0: none is kept",
        BELOW_ONE,
        identity="if set",
        changes="technique",
    )


@dataclass
class LrSchedule:
    name: str = key("wsd", "shape of the learning rate", choices=Names(LR_SCHEDULES))
    warmup_steps: int = key(
        200, "steps of linear warm-up; step s has the fraction s / warmup_steps of the peak learning rate", NATURAL
    )


@dataclass
class Objective:
    name: str = key(
        "language", "what a sample is, which of its elements count, and the loss", choices=Names(OBJECTIVES)
    )


@dataclass
class Loss:
    name: str = key("cross_entropy", "loss function", choices=("cross_entropy", "linear_cross_entropy"))
    chunk_tokens: int = key(
        2048,
        "linear_cross_entropy: number of tokens whose logits are computed at a time; more are faster, fewer save memory",
        COUNT,
        only=("linear_cross_entropy",),
    )


@dataclass
class Tokenizer:
    name: str = key("embedded", "kind of tokenizer", choices=("embedded", "tiktoken", "hf"))
    path: str | None = key(
        None, "tokenizer.model (tiktoken) or tokenizer.json (hf)", PATH, only=("tiktoken", "hf"), reads="tokenizer"
    )


@dataclass
class Train:
    imports: list[str] = key(
        list,
        "Python modules of your own that add families, data sources and more (docs/extend.md), imported before "
        "the checks and on every rank",
        WORD,
    )
    sources: str | None = key(
        None,
        "digest of the files of train.imports and of what they import from the same folder; filled in by launch.py",
        WORD,
    )
    gc_interval: int = key(
        50,
        "steps between Python's garbage collections; all ranks collect at the same step, and never in between",
        COUNT,
        identity=False,
    )


@dataclass
class Job:
    """Everything that is needed to run one cell, and nothing that depends on the rank or the time."""

    name: str = key(
        "run", "first half of the run directory's name; the identity hash is the second half", NAME, identity=False
    )
    notes: str = key("", "free text kept with the run", NOTE, identity=False)
    gpus: int | None = key(
        None,
        "number of ranks; null: the product of the parallel degrees, or the devices of one node if dp_shard is -1",
        DEGREE,
        changes="technique",
    )
    steps: int = key(200, "optimizer steps; epoch: as many as one pass over rows of data needs", COUNT)
    seed: int = key(0, "seed of the initial weights and of the order of data", Interval(0, 2**63 - 1))
    elastic: list[str] = key(
        list,
        "layouts for other numbers of nodes, each a text of keys for titan resume, such as 'gpus=16 parallelism=fsdp', or auto for "
        "layouts that the planner chooses; each start of the job uses the largest layout that fits on the nodes it was given",
        identity=False,
    )
    model: Model = key(Model, "the network", changes="learning and work")
    parallelism: Parallelism = key(Parallelism, "how the model and the batch are split over ranks", changes="technique")
    pp_schedule: PipelineSchedule = key(PipelineSchedule, "order in which pipeline stages compute", changes="technique")
    ac: ActivationCheckpoint = key(ActivationCheckpoint, "activation checkpointing", changes="technique")
    precision: Precision = key(Precision, "number formats", changes="technique")
    adapter: Adapter = key(
        Adapter, "small matrices that are trained instead of the model's own weights", changes="learning and work"
    )
    parametrization: Parametrization = key(
        Parametrization,
        "rules by which a large model has the same best learning rate as a small one",
        identity="if set",
        changes="learning",
    )
    compile: Compile = key(Compile, "torch.compile, of each block or the whole model", changes="technique")
    optimizer: Optimizer = key(Optimizer, "how gradients change the weights", changes="learning")
    lr_scheduler: LrSchedule = key(LrSchedule, "how the learning rate changes from step to step", changes="learning")
    objective: Objective = key(Objective, "what the model learns from a sample", changes="learning and work")
    loss: Loss = key(Loss, "what is minimized", changes="technique")
    data: Data = key(Data, "training data")
    tokenizer: Tokenizer = key(Tokenizer, "how text becomes tokens", changes="learning")
    checkpoint: Checkpoint = key(Checkpoint, "saving and loading")
    validation: Validation = key(Validation, "held-out loss")
    metrics: Metrics = key(Metrics, "what is logged, and where")
    profiling: Profiling = key(Profiling, "traces of some steps")
    comm: Comm = key(Comm, "process groups and their time limits", changes="learning and work")
    fault_tolerance: FaultTolerance = key(
        FaultTolerance, "replica groups, which continue when one of them dies", changes="learning"
    )
    cluster: Cluster = key(Cluster, "where the ranks run")
    hardware: Hardware = key(Hardware, "the device for which predictions are made: its memory and its rates")
    debug: Debug = key(Debug, "checks and traces that slow a run down")
    train: Train = key(Train, "modules of your own, garbage collection")
    launch: Launch = key(Launch, "what launch.py does with the cell")
    sweep: Sweep = key(Sweep, "the sweep that the cell belongs to")
    search: Search = key(Search, "the search that draws the cells of a command line", identity=False)
    paths: Paths = key(Paths, "folders")


def default_of(spec: Any) -> Any:
    """Return the default of a dataclass field, calling its factory if it has one."""
    return spec.default if spec.default is not MISSING else spec.default_factory()
