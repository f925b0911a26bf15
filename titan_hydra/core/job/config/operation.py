"""The sections of a job for checkpoints, metrics, supervision and the start of ranks. schema.py explains `key`."""

from __future__ import annotations

from dataclasses import dataclass

from .field import READS, key
from .ranges import ADDRESS, BELOW_ONE, COUNT, DEGREE, NAME, NATURAL, NOT_NEGATIVE, PATH, POSITIVE, Interval
from .registry import EXECUTORS, SEARCHES, TRACKERS, Names

LOADED = ("optimizer", "data", "lr_scheduler")  # parts of a checkpoint in addition to the weights


@dataclass
class Checkpoint:
    name: str = key(
        "sync", "how checkpoints are written", choices=("off", "sync", "async", "async_pinned"), changes="technique"
    )
    interval: int = key(
        500,
        "steps between checkpoints; 0: checkpoints are saved only by interval_minutes, and at the end",
        NATURAL,
        identity=False,
    )
    interval_minutes: float | None = key(
        None,
        "save also when this many minutes have passed since the last save began, by rank 0's clock",
        POSITIVE,
        identity=False,
    )
    keep_latest_k: int = key(2, "number of newest checkpoints to keep; 0 keeps all", NATURAL, identity=False)
    keep_every: int = key(
        0, "checkpoints of steps that are multiples of keep_every are never deleted; 0: none", NATURAL, identity=False
    )
    keep_best: bool = key(
        False,
        "save whenever a validation gives the lowest held-out loss so far, and never delete that checkpoint",
        only=("sync", "async", "async_pinned"),
        identity=False,
    )
    first_step: bool = key(
        False, "save step 1 too, which shows at once whether checkpoints can be written", identity=False
    )
    last_step: bool = key(True, "save the last step; a run that is asked to stop saves in any case", identity=False)
    export_dtype: str | None = key(
        None,
        "at the end, also write only the weights, in this number format, to RUN/export",
        identity=False,
        choices=("float32", "bfloat16"),
    )
    initial_load_path: str | None = key(
        None,
        "start from this checkpoint, run, or Hugging Face folder instead of drawing the weights",
        PATH,
        reads="weights",
    )
    exclude_from_loading: list[str] = key(
        lambda: [*LOADED],
        "parts of initial_load_path that are not loaded: optimizer (the moments), data (the position), lr_scheduler (the step number)",
        choices=LOADED,
    )


@dataclass
class Validation:
    name: str = key("off", "whether held-out loss is measured", identity=False, choices=("off", "on"))
    interval: int = key(
        0,
        "steps between validations; 0: a tenth of the run's steps. The last step is validated too",
        NATURAL,
        only=("on",),
        identity=False,
    )
    steps: int = key(
        10, "number of global batches in a validation", COUNT, only=("on",), identity=False, changes="held-out loss"
    )
    ema: bool = key(
        False,
        "measure with the moving average of the weights (optimizer.ema_decay) instead of the weights",
        only=("on",),
        identity=False,
        changes="held-out loss",
    )
    tasks: list[str] = key(
        list,
        "JSONL files of questions (prompt, choices and gold, or prompt and target) that the model answers in each validation",
        PATH,
        only=("on",),
        identity=False,
        reads="tasks",
    )


@dataclass
class Metrics:
    name: str = key("console", "name of the option of conf/metrics", NAME, identity=False)
    log_every: int = key(
        10, "steps between logged rows; the first and the last step are always logged", COUNT, identity=False
    )
    trackers: list[str] = key(
        list, "services to which the rows of metrics.jsonl are also copied", identity=False, choices=Names(TRACKERS)
    )
    peak_flops: float | None = key(
        None,
        "dense bf16 FLOP/s of a device, for MFU; null: looked up by the device's name; no MFU for an unknown device",
        POSITIVE,
        identity=False,
    )


@dataclass
class Profiling:
    name: str = key("off", "whether traces are recorded", identity=False, choices=("off", "on"))
    first_step: int = key(
        10,
        "the first step that is recorded, counted from the start of the process; the step before it warms up the profiler",
        COUNT,
        only=("on",),
        identity=False,
    )
    steps: int = key(
        3,
        "number of steps that are recorded; tokens/s and other rates leave these steps out",
        COUNT,
        only=("on",),
        identity=False,
    )
    all_ranks: bool = key(False, "record on every rank; if false, only on rank 0", only=("on",), identity=False)
    memory: bool = key(
        True, "on CUDA, also write a memory snapshot of the recorded steps", only=("on",), identity=False
    )


@dataclass
class Comm:
    name: str = key(
        "default",
        "process groups: real ones, or fake ones, with which one rank makes steps without the other ranks",
        choices=("default", "fake"),
    )
    rank: int = key(0, "comm=fake: the number of the one rank that makes steps", NATURAL, only=("fake",))
    init_timeout_seconds: int = key(300, "time-out of a collective until the first step is done", COUNT, identity=False)
    train_timeout_seconds: int = key(
        100,
        "time-out of a collective after the first step; compiled pipelines have 30 s more for each rank "
        "after the first",
        COUNT,
        identity=False,
    )
    health_check_seconds: int = key(
        60,
        "time limit of the check before training: a matmul on each device, then a collective over all ranks; "
        "0: no check",
        NATURAL,
        identity=False,
    )


REPLICATED = ("local_sgd", "diloco", "torchft")


@dataclass
class FaultTolerance:
    name: str = key(
        "off",
        "how replica groups learn together: by averaging weights now and then, or by summing gradients at every step",
        choices=("off", "local_sgd", "diloco", "torchft"),
    )
    replicas: int = key(
        1,
        "number of replica groups; each group has the whole layout, with `gpus` ranks of its own",
        DEGREE,
        only=REPLICATED,
    )
    sync_every: int = key(
        20, "number of steps after which the groups average the same weights again", COUNT, only=("local_sgd", "diloco")
    )
    fragments: int = key(
        1,
        "parts of the model, by layers, that are averaged in turn, each every sync_every steps",
        COUNT,
        only=("local_sgd", "diloco"),
    )
    outer_lr: float = key(
        0.7,
        "diloco: learning rate of the outer SGD, whose gradient is the average change of the groups' weights",
        POSITIVE,
        only=("diloco",),
    )
    outer_momentum: float = key(0.9, "diloco: Nesterov momentum of the outer SGD", BELOW_ONE, only=("diloco",))
    timeout_seconds: int = key(
        30, "a group without a heartbeat for this long is left out", COUNT, only=REPLICATED, identity=False
    )
    max_restarts: int = key(
        3, "number of restarts of a group that has died; 0: none", NATURAL, only=REPLICATED, identity=False
    )
    lighthouse: str | None = key(
        None,
        "torchft: address of a lighthouse that runs already and serves only this run; null: the groups "
        "start a lighthouse",
        ADDRESS,
        only=("torchft",),
        identity=False,
    )


@dataclass
class Cluster:
    name: str = key("local", "name of the option of conf/cluster", NAME, identity=False)
    executor: str = key(
        "local",
        "what starts the ranks. inline: one rank in this process (pdb works); local: a process per rank; "
        "slurm, kubernetes: jobs of a cluster",
        identity=False,
        choices=Names(EXECUTORS),
    )
    gpus_per_node: int | None = key(
        None,
        "number of devices in a node; null: the devices of this machine are counted (only for inline and local)",
        Interval(1, 1024),
        identity=False,
    )
    device_memory_gib: float | None = key(None, "memory of a device; null: unknown", POSITIVE, identity=False)
    max_parallel: int = key(
        0,
        "number of cells of a command line that run at once; 0: no limit with slurm; with local as many cells as the "
        "visible devices suffice for, and one cell without devices",
        NATURAL,
        identity=False,
    )
    time_minutes: int | None = key(None, "time limit of a job", COUNT, identity=False)
    stop_seconds: int = key(
        180, "seconds before the time limit at which ranks finish their step, save and requeue", COUNT, identity=False
    )


@dataclass
class Hardware:
    name: str = key("unknown", "name of the option of conf/hardware", NAME, identity=False)
    measured: bool = key(
        True, "false: no run was timed on this device; its rates are scaled from another device's", identity=False
    )
    memory_gib: float | None = key(None, "memory of a device that a process can allocate", POSITIVE, identity=False)
    gpus_per_node: int | None = key(None, "devices that fast links (NVLink) connect", Interval(1, 1024), identity=False)
    bf16_tflops: float | None = key(
        None, "sustained rate of large bf16 matmuls, 10^12 FLOP/s", POSITIVE, identity=False
    )
    float8_tflops: float | None = key(
        None,
        "sustained rate of large Float8 matmuls, without casts, 10^12 FLOP/s; null: no Float8",
        POSITIVE,
        identity=False,
    )
    small_matmul: float = key(
        0.0, "smallest dimension at which a bf16 matmul runs at half its rate", NOT_NEGATIVE, identity=False
    )
    small_float8: float = key(
        0.0, "smallest dimension at which a Float8 matmul runs at half its rate", NOT_NEGATIVE, identity=False
    )
    attention_tflops: float | None = key(
        None,
        "rate of causal attention, counting only FLOPs that the mask leaves, 10^12 FLOP/s",
        POSITIVE,
        identity=False,
    )
    short_attention: float = key(
        0.0, "sequence length at which attention runs at half of attention_tflops", NOT_NEGATIVE, identity=False
    )
    flash_tflops: float | None = key(
        None,
        "rate of causal attention with torch's flash kernel, for model.attention=flash, 10^12 FLOP/s; null: "
        "that of attention_tflops",
        POSITIVE,
        identity=False,
    )
    short_flash: float = key(
        0.0, "sequence length at which torch's flash kernel runs at half of flash_tflops", NOT_NEGATIVE, identity=False
    )
    memory_tbs: float | None = key(None, "bandwidth of the device's memory, 10^12 bytes/s", POSITIVE, identity=False)
    nvlink_gbs: float | None = key(
        None, "bus bandwidth of a collective inside a node, 10^9 bytes/s per device", POSITIVE, identity=False
    )
    nic_gbs: float | None = key(None, "bandwidth between nodes, 10^9 bytes/s per device", POSITIVE, identity=False)
    host_gbs: float | None = key(
        None,
        "bandwidth between the host's pinned memory and a device in each direction, while all devices of a node copy, "
        "10^9 bytes/s per device",
        POSITIVE,
        identity=False,
    )
    dispatcher: str = key(
        "all_to_all",
        "what exchanges the rows of experts: torch's all_to_all, or deep_ep, a library of yours that sends a token once "
        "to each node (DeepEP, HybridEP)",
        identity=False,
        choices=("all_to_all", "deep_ep"),
    )
    passes_per_second: float | None = key(
        None,
        "forward or backward passes of a pipeline stage that a process can start per second; null: no limit",
        POSITIVE,
        identity=False,
    )


@dataclass
class Debug:
    name: str = key("off", "name of the option of conf/debug", NAME, changes="technique")
    deterministic: bool = key(
        False, "only deterministic kernels: slower, bitwise equal results in every run", changes="work"
    )
    anomaly: bool = key(
        False,
        "autograd anomaly detection: names the forward op of a NaN gradient; slow",
        identity=False,
        changes="work",
    )
    nan_hunt: bool = key(
        False,
        "names the first module, gradient or parameter that is not finite, with its step and rank; slow",
        identity=False,
        changes="work",
    )
    balance_experts: bool = key(
        False,
        "give every expert the same number of tokens, whatever the router's scores: only for benchmarks",
        changes="learning and work",
    )
    trace_activations: bool = key(
        False,
        "record norms and checksums of every module's inputs and outputs, for `titan compare`; very slow",
        identity=False,
        changes="work",
    )


@dataclass
class Launch:
    mode: str = key(
        "run",
        "run: start the cells; dry: show cells, resources and cost, and start nothing",
        identity=False,
        choices=("run", "dry"),
    )
    force: bool = key(False, "run a finished cell again, from the start", identity=False)
    retry: str = key(
        "none", "which failed cells to run again", identity=False, choices=("none", "failed", "oom", "node", "all")
    )
    stop_at_failure: bool = key(
        False,
        "local, inline: after a failed cell, start no further cell, and let those that run beside it save and stop",
        identity=False,
    )
    wait: bool = key(False, "slurm, kubernetes: stay attached until the jobs end", identity=False)
    packed: bool = key(False, "slurm: run all cells one after another in one allocation", identity=False)
    max_gpu_hours: float | None = key(
        None, "refuse to start cells that together could need more GPU-hours than this", POSITIVE, identity=False
    )
    oom_check: str = key(
        "refuse",
        "what happens to a cell that is predicted not to fit its devices. refuse: it is refused if it needs "
        "more than 1.1 x their memory, else there is a warning; warn: only a warning; off: nothing",
        identity=False,
        choices=("refuse", "warn", "off"),
    )
    require_proof: bool = key(
        False,
        "refuse a cell if the folder of runs has no proof (titan verify) of its layout that was made with the "
        "present code",
        identity=False,
    )
    accept_changed: list[str] = key(
        list,
        "kinds of files that may hold other bytes than when the run began; otherwise such a run is refused",
        identity=False,
        choices=READS,
    )
    skip_invalid: bool = key(False, "leave out cells with faults instead of stopping", identity=False)


@dataclass
class Sweep:
    name: str | None = key(None, "name of the sweep; null: the swept keys", NAME, identity=False)
    cell: str | None = key(None, "name of this cell in its sweep; set by launch.py", identity=False)
    baseline: str | None = key(
        None, "cell with which the report compares the others; null: the first cell", identity=False
    )
    cells: dict[str, list[str]] = key(dict, "named cells of sweeps/NAME.yaml, each a list of overrides", identity=False)


@dataclass
class Search:
    name: str = key(
        "off",
        "search that draws the values of the keys that -m sweeps; off: every combination is run",
        identity=False,
        choices=Names(SEARCHES),
    )


@dataclass
class Paths:
    runs: str = key("runs", "folder of run directories", PATH, identity=False)
