"""What a job is: every configuration key, typed, defaulted, bounded and described once. `conf/` only chooses values for these keys.

`key(default, help, range)` describes a field: a number always has a range, text without one is a line that is not empty, and a key with
choices or of type bool needs none. `only` names the options of the group that read the key: with any other it must stay at its default.
`identity=False` marks what may change without making it another experiment (where it runs, how it is logged): such a field is left out of
the hash that names the run directory.
`changes` says what another value of the key changes, and so which runs may be compared: "learning", "work" (what a step computes or how
long it takes), both, "held-out loss" (the samples that it is measured on, and nothing of the training), or "technique". What a section
says holds for all its keys; where neither says anything, it is "learning".
"""
from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from .field import key
from .model import Model
from .ranges import ADDRESS, ANY, BELOW_ONE, COUNT, DEGREE, NAME, NATURAL, NOT_NEGATIVE, NOTE, PATH, POSITIVE, SHARE, WORD, Interval
from .registry import FORMATS, LR_SCHEDULES, OBJECTIVES, OPTIMIZERS, PIPELINE_SCHEDULES, TRACKERS, Names
from .source import Data
from .source import Part as Part
from .source import Source as Source

DEGREE_OR_REST = Interval(1, 1_000_000, also=(-1,))


@dataclass
class Parallelism:
    name: str = key(..., "which option of conf/parallelism this is", NAME)
    dp_replicate: int = key(1, "data-parallel replicas that hold whole copies (DDP, or the outer half of HSDP)", DEGREE_OR_REST)
    dp_shard: int = key(1, "data-parallel ranks that share one copy (FSDP); -1 takes what the others leave of `gpus`", DEGREE_OR_REST)
    cp: int = key(1, "context-parallel ranks: the sequence is split over them", DEGREE)
    tp: int = key(1, "tensor-parallel ranks: every matrix is split over them", DEGREE)
    pp: int = key(1, "pipeline-parallel ranks: the layers are split over them", DEGREE)
    ep: int = key(1, "expert-parallel ranks: experts are split over them; they are taken from dp_shard x cp x tp", DEGREE)
    backend: str = key("fsdp2", "what shards parameters: torch's FSDP2, or SimpleFSDP, whose communication a compiler sees",
                       choices=("fsdp2", "simple_fsdp"))
    reshard_after_forward: str = key("default", "free gathered parameters after the forward: default is always (ZeRO-3) without "
                                     "and never (ZeRO-2) with pipeline parallelism", choices=("default", "always", "never"))
    sequence_parallel: bool = key(True, "under tp, split norms and residuals over the sequence too")
    loss_parallel: bool = key(True, "under tp, compute the loss on logits that stay split over the vocabulary")
    async_tp: bool = key(False, "overlap tensor-parallel communication with matmuls; needs compile and CUDA")
    cp_rotate: str = key("allgather", "how context parallelism moves keys and values", choices=("allgather", "alltoall", "ulysses"))
    cp_load_balance: bool = key(True, "give each context-parallel rank early and late parts of the sequence, since late queries cost "
                                "more; ulysses is balanced as it is")

    @property
    def sequence_parts(self) -> int:
        """The parts into which context parallelism cuts a sequence: one a rank, or two if the ring is balanced."""
        return self.cp * (2 if self.cp > 1 and self.cp_load_balance and self.cp_rotate != "ulysses" else 1)


@dataclass
class PipelineSchedule:
    name: str = key("1f1b", "pipeline schedule", choices=Names(PIPELINE_SCHEDULES))
    stages_per_rank: int = key(1, "model chunks on each pipeline rank: 1 for gpipe and 1f1b, 2 for zbv and dualpipe_v, 2 or more else",
                               Interval(1, 1000))
    microbatches: int | None = key(None, "microbatches of a local batch; null: twice the stages, or fewer for a small batch", COUNT)
    layers_per_stage: int | None = key(None, "transformer blocks of a stage; null: balanced, embedding and head count as one each", COUNT)
    split: list[str] = key(list, "first module of each stage but the first, as [layers.2,layers.4]; empty: by layers_per_stage", WORD)
    csv: str | None = key(None, "file with the schedule's actions, for pp_schedule=csv", PATH, only=("csv",))


@dataclass
class ActivationCheckpoint:
    name: str = key("none", "what the forward pass keeps for the backward", choices=(
        "none", "full", "layer", "op", "lean", "memory_budget"))
    every: int = key(2, "ac=layer: checkpoint every n-th block", COUNT, only=("layer",))
    save_ops: list[str] = key(list, "ac=op, lean: the aten ops whose outputs are kept; empty is the mode's own list", WORD,
                              only=("op", "lean"))
    budget: float = key(0.5, "ac=memory_budget: share of the activation memory to keep, 0 to 1", SHARE, only=("memory_budget",))


@dataclass
class Precision:
    name: str = key("bf16", "which option of conf/precision this is", NAME)
    param_dtype: str = key("float32", "dtype of the weights that the optimizer updates", choices=("float32", "bfloat16"))
    compute_dtype: str = key("bfloat16", "dtype of forward and backward", choices=("float32", "bfloat16"))
    reduce_dtype: str = key("float32", "dtype in which gradients are summed over ranks", choices=("float32", "bfloat16"))
    converter: str | None = key(None, "number format of the linears", choices=Names(FORMATS))
    recipe: str | None = key(None, "how float8 scales: rowwise, tensorwise or rowwise_with_gw_hp", NAME)
    emulate: bool = key(False, "emulate the format in higher precision, for hardware without it")
    float8_all_gather: bool = key(False, "FSDP gathers Float8 weights (tensorwise only)")
    kernels: str = key("torchao", "what casts to Float8: torchao's operators, which a compiler fuses, or fused kernels of our own (rowwise "
                       "only)", choices=("torchao", "fused"), late=True)
    skip: list[str] = key(lambda: ["output"], "names of linears that are not converted", WORD)


@dataclass
class Adapter:
    name: str = key("none", "what is trained beside a model that stays as it is", choices=("none", "lora"), late=True)
    rank: int = key(16, "lora: width of the two thin matrices of a linear", Interval(1, 65_536), only=("lora",), late=True)
    alpha: float = key(32.0, "lora: the product of the two matrices is scaled by alpha / rank", POSITIVE, only=("lora",), late=True)
    linears: list[str] = key(list, "lora: names of the linears that get adapters, as [wq,wv]; empty: all of a block", WORD, only=("lora",),
                             late=True)


@dataclass
class Compile:
    name: str = key("off", "what torch.compile sees", choices=("off", "block", "model"))
    backend: str = key("inductor", "torch.compile back end", WORD, only=("block", "model"))


@dataclass
class Optimizer:
    name: str = key("adamw", "optimizer", choices=Names(OPTIMIZERS))
    lr: float = key(3e-4, "peak learning rate", NOT_NEGATIVE)
    beta1: float = key(0.9, "decay of AdamW's first moment", BELOW_ONE, only=Names(OPTIMIZERS, "beta1"))
    beta2: float = key(0.95, "decay of AdamW's second moment", BELOW_ONE, only=Names(OPTIMIZERS, "beta2"))
    eps: float = key(1e-8, "AdamW's epsilon", NOT_NEGATIVE, only=Names(OPTIMIZERS, "eps"))
    weight_decay: float = key(0.1, "decoupled weight decay, on matrices only when decay_matrices_only", NOT_NEGATIVE)
    decay_matrices_only: bool = key(False, "no weight decay for norms and biases (TorchTitan decays everything)")
    max_norm: float = key(1.0, "gradients are clipped to this norm; 0 turns clipping off", NOT_NEGATIVE)
    masters: str = key("whole", "the optimizer's float32 weights: whole, or split into the bfloat16 weights that the model computes with "
                       "and 16 bits beside each, which saves up to 4 bytes per parameter", choices=("whole", "split"), late=True,
                       changes="technique")
    muon_lr: float = key(0.02, "optimizer=muon: learning rate of the matrices; everything else takes AdamW with lr", NOT_NEGATIVE,
                         only=Names(OPTIMIZERS, "muon_lr"))
    muon_momentum: float = key(0.95, "optimizer=muon: momentum", BELOW_ONE, only=Names(OPTIMIZERS, "muon_momentum"))
    sgd_momentum: float = key(0.0, "optimizer=sgd: momentum", BELOW_ONE, only=Names(OPTIMIZERS, "sgd_momentum"), late=True)


@dataclass
class LrSchedule:
    name: str = key("wsd", "shape of the learning rate", choices=Names(LR_SCHEDULES))
    warmup_steps: int = key(200, "steps of linear warm-up: step s of them has s / warmup_steps of the peak rate", NATURAL)
    decay_ratio: float = key(0.1, "wsd: share of the steps over which the rate decays at the end", SHARE,
                             only=Names(LR_SCHEDULES, "decay_ratio"))
    decay_type: str = key("linear", "wsd: shape of the decay", only=Names(LR_SCHEDULES, "decay_type"),
                          choices=("linear", "sqrt", "cosine"))
    min_factor: float = key(0.0, "the rate ends at this share of its peak", SHARE, only=Names(LR_SCHEDULES, "min_factor"))


@dataclass
class Loss:
    name: str = key("cross_entropy", "loss function", choices=("cross_entropy", "linear_cross_entropy"))
    chunk_tokens: int = key(2048, "linear_cross_entropy: tokens whose logits are held at a time; more are faster, fewer save memory", COUNT,
                            only=("linear_cross_entropy",))


@dataclass
class Tokenizer:
    name: str = key("embedded", "kind of tokenizer", choices=("embedded", "tiktoken", "hf"))
    path: str | None = key(None, "tokenizer.model (tiktoken) or tokenizer.json (hf)", PATH, only=("tiktoken", "hf"))


LOADED = ("optimizer", "data", "lr_scheduler")  # parts of a checkpoint beside the weights


@dataclass
class Checkpoint:
    name: str = key("sync", "how checkpoints are written", choices=("off", "sync", "async", "async_pinned"), changes="technique")
    interval: int = key(500, "steps between checkpoints; 0: only by interval_minutes, and at the end", NATURAL, identity=False)
    interval_minutes: float | None = key(None, "save also when this many minutes have passed since the last save began, by rank 0's clock",
                                         POSITIVE, identity=False)
    keep_latest_k: int = key(2, "how many of the newest checkpoints to keep; 0 keeps all", NATURAL, identity=False)
    keep_every: int = key(0, "checkpoints of steps that are multiples of this are never deleted; 0: none", NATURAL, identity=False)
    keep_best: bool = key(False, "save whenever a validation gives the lowest held-out loss so far, and never delete that checkpoint",
                          only=("sync", "async", "async_pinned"), identity=False, late=True)
    first_step: bool = key(False, "save step 1 too: shows at once whether checkpoints can be written", identity=False)
    last_step: bool = key(True, "save the last step; a run that is asked to stop saves in any case", identity=False)
    export_dtype: str | None = key(None, "at the end write the weights alone to RUN/export, in this number format", identity=False,
                                   choices=("float32", "bfloat16"))
    initial_load_path: str | None = key(None, "start from this checkpoint, run, or Hugging Face folder instead of drawing the weights",
                                        PATH)
    exclude_from_loading: list[str] = key(lambda: [*LOADED], "what is not loaded from initial_load_path: "
                                          "optimizer (its moments), data (the position in it), lr_scheduler (the step number)",
                                          late=True, choices=LOADED)


@dataclass
class Validation:
    name: str = key("off", "whether held-out loss is measured", identity=False, choices=("off", "on"))
    interval: int = key(0, "steps between validations; 0: a tenth of the run's steps. The last step is validated too", NATURAL,
                        only=("on",), identity=False)
    steps: int = key(10, "global batches of a validation", COUNT, only=("on",), identity=False, changes="held-out loss")


@dataclass
class Metrics:
    name: str = key("console", "which option of conf/metrics this is", NAME, identity=False)
    log_every: int = key(10, "steps between logged rows; the first and the last step are always logged", COUNT, identity=False)
    trackers: list[str] = key(list, "copies of metrics.jsonl", identity=False, choices=Names(TRACKERS))
    peak_flops: float | None = key(None, "dense bf16 FLOP/s of a device, for MFU; null: by its name, and no MFU if that is unknown",
                                   POSITIVE, identity=False)
    wandb_project: str = key("titan_hydra", "wandb project", WORD, identity=False)
    wandb_entity: str | None = key(None, "wandb user or team; null: the default of the account", WORD, identity=False)
    wandb_tags: list[str] = key(list, "tags of the run in wandb; its notes there are `notes`", identity=False)
    wandb_mode: str = key("offline", "wandb: offline writes to the run, online sends", identity=False, choices=("offline", "online"))


@dataclass
class Profiling:
    name: str = key("off", "whether traces are recorded", identity=False, choices=("off", "on"))
    first_step: int = key(10, "the first step that is recorded, counted from the start of the process; the one before it warms up", COUNT,
                          only=("on",), identity=False)
    steps: int = key(3, "steps that are recorded; they do not count for any rate", COUNT, only=("on",), identity=False)
    all_ranks: bool = key(False, "record on every rank; else on rank 0 alone", only=("on",), identity=False)
    memory: bool = key(True, "on CUDA, write a memory snapshot of these steps too", only=("on",), identity=False)


@dataclass
class Comm:
    name: str = key("default", "process groups: real ones, or fake ones, in which one rank steps alone", choices=("default", "fake"))
    rank: int = key(0, "comm=fake: which rank of the world is stepped", NATURAL, only=("fake",))
    init_timeout_seconds: int = key(300, "collective time-out until the first step is done", COUNT, identity=False)
    train_timeout_seconds: int = key(100, "collective time-out afterwards; compiled pipelines have 30 s more for each further rank",
                                     COUNT, identity=False)
    health_check_seconds: int = key(60, "before training, time limit of a matmul on each device, then of a collective over all ranks; "
                                    "0: no check", NATURAL, identity=False)


REPLICATED = ("local_sgd", "diloco", "torchft")


@dataclass
class FaultTolerance:
    name: str = key("off", "how replica groups learn together: they average weights now and then, or sum gradients at every step",
                    late=True, choices=("off", "local_sgd", "diloco", "torchft"))
    replicas: int = key(1, "replica groups; each is the whole layout, with `gpus` ranks of its own", DEGREE, only=REPLICATED, late=True)
    sync_every: int = key(20, "steps between two meetings over the same weights", COUNT, only=("local_sgd", "diloco"), late=True)
    fragments: int = key(1, "parts of the model, by layers, that meet in turn, each every sync_every steps", COUNT,
                         only=("local_sgd", "diloco"), late=True)
    outer_lr: float = key(0.7, "diloco: learning rate of the outer SGD, whose gradient is the average change of the groups' weights",
                          POSITIVE, only=("diloco",), late=True)
    outer_momentum: float = key(0.9, "diloco: Nesterov momentum of the outer SGD", BELOW_ONE, only=("diloco",), late=True)
    timeout_seconds: int = key(30, "a group without a heartbeat for this long is left out", COUNT, only=REPLICATED,
                               identity=False, late=True)
    max_restarts: int = key(3, "how often a group that has died is started again; 0: never", NATURAL, only=REPLICATED,
                            identity=False, late=True)
    lighthouse: str | None = key(None, "torchft: address of a lighthouse that runs already, for this run alone; null: the groups start it",
                                 ADDRESS, only=("torchft",), identity=False, late=True)


@dataclass
class Cluster:
    name: str = key("local", "which option of conf/cluster this is", NAME, identity=False)
    executor: str = key("local", "inline: this process, one rank (pdb works); local: a process per rank; slurm: sbatch",
                        identity=False, choices=("inline", "local", "slurm"))
    gpus_per_node: int | None = key(None, "devices of a node; null on a local machine: counted", Interval(1, 1024), identity=False)
    device_memory_gib: float | None = key(None, "memory of a device; null: unknown", POSITIVE, identity=False)
    max_parallel: int = key(0, "cells of a command line that run at once; 0: no limit (slurm), one (local)", NATURAL, identity=False)
    time_minutes: int | None = key(None, "time limit of a job", COUNT, identity=False)
    partition: str | None = key(None, "SLURM partition", WORD, identity=False)
    account: str | None = key(None, "SLURM account", WORD, identity=False)
    qos: str | None = key(None, "SLURM quality of service", WORD, identity=False)
    constraint: str | None = key(None, "features that nodes must have", WORD, identity=False)
    exclude: list[str] = key(list, "nodes never to use", WORD, identity=False)
    reservation: str | None = key(None, "SLURM reservation", WORD, identity=False)
    comment: str | None = key(None, "sbatch --comment", identity=False)
    cpus_per_task: int | None = key(None, "CPU cores of a rank: a node's / gpus_per_node; null: SLURM's default, often one",
                                    Interval(1, 100_000), identity=False)
    sbatch: dict[str, Any] = key(dict, "further sbatch flags, as {mail-user: me@site, exclusive: true}; null drops one", ANY,
                                 identity=False)
    srun: list[str] = key(list, "further srun arguments, such as --container-image=IMAGE", identity=False)
    setup: list[str] = key(list, "shell lines before the ranks start: module load, source", identity=False)
    environment: dict[str, str] = key(dict, "environment variables of the ranks", ANY, identity=False)
    python: str | None = key(None, "Python on the nodes; null: the one that runs launch.py", PATH, identity=False)
    stop_seconds: int = key(180, "how long before the time limit ranks finish their step, save and requeue", COUNT, identity=False)
    max_requeues: int = key(100, "a job that was preempted or timed out more often than this fails", NATURAL, identity=False)

    def warning_seconds(self, minutes: int | None) -> int:
        """Return how many seconds before the end of a job of `minutes` (None: no limit) its ranks are asked to stop."""
        return self.stop_seconds if minutes is None else min(self.stop_seconds, 30 * minutes)


@dataclass
class Hardware:
    name: str = key("unknown", "which option of conf/hardware this is", NAME, identity=False)
    measured: bool = key(True, "false: no run was timed on this device, its rates are scaled from another's", identity=False)
    memory_gib: float | None = key(None, "memory of a device that a process can allocate", POSITIVE, identity=False)
    gpus_per_node: int | None = key(None, "devices that fast links (NVLink) connect", Interval(1, 1024), identity=False)
    bf16_tflops: float | None = key(None, "sustained rate of large bf16 matmuls, 10^12 FLOP/s", POSITIVE, identity=False)
    float8_tflops: float | None = key(None, "sustained rate of large Float8 matmuls, without casts, 10^12 FLOP/s; null: no Float8",
                                      POSITIVE, identity=False)
    small_matmul: float = key(0.0, "smallest dimension at which a bf16 matmul runs at half its rate", NOT_NEGATIVE, identity=False)
    small_float8: float = key(0.0, "smallest dimension at which a Float8 matmul runs at half its rate", NOT_NEGATIVE, identity=False)
    attention_tflops: float | None = key(None, "rate of causal attention, counting only FLOPs that the mask leaves, 10^12 FLOP/s",
                                         POSITIVE, identity=False)
    flash_tflops: float | None = key(None, "attention_tflops with torch's flash kernel, for model.attention=flash; null: no difference",
                                     POSITIVE, identity=False)
    memory_tbs: float | None = key(None, "bandwidth of the device's memory, 10^12 bytes/s", POSITIVE, identity=False)
    nvlink_gbs: float | None = key(None, "bus bandwidth of a collective inside a node, 10^9 bytes/s per device", POSITIVE, identity=False)
    nic_gbs: float | None = key(None, "bandwidth between nodes, 10^9 bytes/s per device", POSITIVE, identity=False)
    passes_per_second: float | None = key(None, "passes over an empty pipeline stage that a process can start; null: no limit",
                                          POSITIVE, identity=False)


@dataclass
class Debug:
    name: str = key("off", "which option of conf/debug this is", NAME, changes="technique")
    deterministic: bool = key(False, "only deterministic kernels; slower, same bits every time", changes="work")
    anomaly: bool = key(False, "autograd anomaly detection: names the forward op of a NaN gradient; slow", identity=False, changes="work")
    nan_hunt: bool = key(False, "names the first module, gradient or parameter that is not finite, with its step and rank; slow",
                         identity=False, changes="work")
    balance_experts: bool = key(False, "give every expert the same number of tokens, whatever the router says: for benchmarks alone",
                                late=True, changes="learning and work")
    trace_activations: bool = key(False, "record norms and checksums of every module's inputs and outputs, for `titan compare`; very slow",
                                  identity=False, changes="work")


@dataclass
class Train:
    imports: list[str] = key(list, "Python modules of your own that add families, data sources and more (docs/extend.md), imported before "
                             "the checks and on every rank", WORD)
    sources: str | None = key(None, "digest of the files of train.imports and of what they import from the same folder; filled in by "
                              "launch.py", WORD, late=True)
    objective: str = key("language", "what is learned: what a sample is, which of its elements count, and the loss", late=True,
                         choices=Names(OBJECTIVES), changes="learning and work")
    beta: float = key(0.1, "objective dpo: how strongly the model is held to its reference model", POSITIVE, late=True)
    clip: float = key(0.2, "objective policy: a token gives no gradient once its probability has changed by more than this share in the "
                      "direction of its advantage", POSITIVE, late=True)
    gc_interval: int = key(50, "steps between Python's garbage collections, on all ranks at the same step; none happen in between", COUNT,
                           identity=False)


@dataclass
class Launch:
    mode: str = key("run", "run, or dry: show cells, resources and cost, and start nothing", identity=False, choices=("run", "dry"))
    force: bool = key(False, "run a finished cell again, from the start", identity=False)
    retry: str = key("none", "which failed cells to run again", identity=False, choices=("none", "failed", "oom", "node", "all"))
    wait: bool = key(False, "slurm: stay attached until the jobs end", identity=False)
    packed: bool = key(False, "slurm: all cells one after another in one allocation", identity=False)
    max_gpu_hours: float | None = key(None, "refuse to start cells that could take more than this together", POSITIVE, identity=False)
    oom_check: str = key("refuse", "a cell predicted not to fit its devices: refuse beyond 1.1 x their memory and warn below, always warn, "
                         "or off", identity=False, choices=("refuse", "warn", "off"))
    skip_invalid: bool = key(False, "leave out cells with faults instead of stopping", identity=False)


@dataclass
class Sweep:
    name: str | None = key(None, "name of the sweep; null: the swept keys", NAME, identity=False)
    cell: str | None = key(None, "name of this cell in its sweep; set by launch.py", identity=False)
    baseline: str | None = key(None, "cell that the report compares with; null: the first", identity=False)
    cells: dict[str, list[str]] = key(dict, "named cells of sweeps/NAME.yaml, each a list of overrides", identity=False)


@dataclass
class Paths:
    runs: str = key("runs", "folder of run directories", PATH, identity=False)


@dataclass
class Job:
    """One cell: everything that is needed to run it, and nothing that depends on rank or time."""

    name: str = key("run", "first half of the run directory's name; the identity hash is the other", NAME, identity=False)
    notes: str = key("", "free text kept with the run", NOTE, identity=False)
    gpus: int | None = key(None, "ranks; null: the product of the degrees, or one node where dp_shard is -1", DEGREE, changes="technique")
    steps: int = key(200, "optimizer steps", COUNT)
    seed: int = key(0, "seed of initial weights and data order", Interval(0, 2**63 - 1))
    model: Model = key(Model, "the network", changes="learning and work")
    parallelism: Parallelism = key(Parallelism, "how it is split over ranks", changes="technique")
    pp_schedule: PipelineSchedule = key(PipelineSchedule, "in which order pipeline stages work", changes="technique")
    ac: ActivationCheckpoint = key(ActivationCheckpoint, "activation checkpointing", changes="technique")
    precision: Precision = key(Precision, "number formats", changes="technique")
    adapter: Adapter = key(Adapter, "small matrices that are trained instead of the model", late=True, changes="learning and work")
    compile: Compile = key(Compile, "torch.compile, of each block or the whole model", changes="technique")
    optimizer: Optimizer = key(Optimizer, "how gradients change the weights", changes="learning")
    lr_scheduler: LrSchedule = key(LrSchedule, "learning rate over time", changes="learning")
    loss: Loss = key(Loss, "what is minimized", changes="technique")
    data: Data = key(Data, "training data")
    tokenizer: Tokenizer = key(Tokenizer, "text to tokens", changes="learning")
    checkpoint: Checkpoint = key(Checkpoint, "saving and loading")
    validation: Validation = key(Validation, "held-out loss")
    metrics: Metrics = key(Metrics, "what is logged and where to")
    profiling: Profiling = key(Profiling, "traces of some steps")
    comm: Comm = key(Comm, "process groups and their time limits", changes="learning and work")
    fault_tolerance: FaultTolerance = key(FaultTolerance, "replica groups, which go on when one of them dies", late=True,
                                          changes="learning")
    cluster: Cluster = key(Cluster, "where it runs")
    hardware: Hardware = key(Hardware, "the device that predictions are for: what it holds and how fast it is", late=True)
    debug: Debug = key(Debug, "checks and traces that slow a run down")
    train: Train = key(Train, "modules of your own, the objective, garbage collection")
    launch: Launch = key(Launch, "what launch.py does with the cell")
    sweep: Sweep = key(Sweep, "the sweep that the cell belongs to", late=True)
    paths: Paths = key(Paths, "folders")


def default_of(spec: Any) -> Any:
    """Return the default of a dataclass field, calling its factory if it has one."""
    return spec.default if spec.default is not MISSING else spec.default_factory()
