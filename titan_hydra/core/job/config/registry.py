"""The parts that a name in the configuration selects; each has a record. A module of `train.imports` adds its own records
with `register`.

A record holds everything that the checks and the trainer know about a part. A function in it may be given as
"module:name". The named module is imported only on the ranks, so that neither the record nor the module that registers
it needs torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from titan_hydra.core.base.errors import ConfigError

Reference = str | Callable[..., Any]  # a function or class, or "module:name" of one


@dataclass(frozen=True)
class DataSourceKind:
    """A source of samples: `data.name`, or `name` in a mixture. `build(key, Source, Wanted, seed)` returns Documents
    (of titan_hydra.core.data.streams) or, if `documents` is false, Samples (of titan_hydra.core.data.loader).
    """

    name: str
    build: Reference
    config: Any = None  # a dataclass that extends schema.Source: the source's own keys
    documents: bool = True
    needs_path: bool = False
    suffixes: tuple[
        str, ...
    ] = ()  # suffixes of the files in `path` and `validation_path`; () if the source reads no files
    gives: tuple[str, ...] = ("tokens",)  # the arrays of a sample, by name
    encodes: bool = False  # whether the job's tokenizer encodes text of the source, although `documents` is false
    # (key, Source, Job) -> the faults of the source's files; runs on the launcher and imports no torch
    faults: Reference | None = None
    warnings: Reference | None = None  # like `faults`, but for files that are legal and probably a mistake
    encoded: bool = (
        False  # whether files of the source hold ids, with headers that name the tokenizer (core/data/items.py)
    )
    # (keys of the source, function that makes a path absolute, Tokenizer) -> (chat template of its conversations, id of
    # the token that ends an answer or None); imports no torch
    template: Reference | None = None
    sampled: bool = False  # whether the samples are of the model that the run starts from, and so stale after it
    beside: str | None = None  # what the source keeps in each device's memory, which predictions do not count


@dataclass(frozen=True)
class ObjectiveKind:
    """What is learned: `build(Job)` returns a titan_hydra.core.train.objectives.Objective. `faults(Job)` yields impossible
    combinations, except those that follow from the other fields.
    """

    name: str
    build: Reference
    config: Any = None  # a dataclass that extends schema.Objective: the objective's own keys
    needs: tuple[str, ...] = ("tokens",)  # the arrays of a sample that the objective uses
    head_loss: bool = False  # whether the head can compute the loss (loss=linear_cross_entropy)
    # whether the loss accepts logits that are split over the vocabulary (parallelism.loss_parallel)
    split_logits: bool = False
    cases: Reference | None = None  # the list of titan_hydra.instruments.verify.case.Case for `titan verify`
    # (weights, tensors of a batch, Job, routed) -> (summed loss, number of elements), in float64 and without the code
    # that trains, for `titan verify` (instruments/verify/reference.py); None: cross-entropy of the next token
    exact: Reference | None = None
    makes: str = "tokens"  # the model's input that the objective makes; the family must take this input
    faults: Reference = lambda job: ()


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer: `build(model, Optimizer, Mesh)` returns torch optimizers that have the peak learning rates.
    `moments(Optimizer)` is the number of states per parameter, for the estimate of memory. `splits_masters` is whether
    the optimizer updates parameters with a `lower_half` (optimizer.masters=split). `like_adam` is whether the size of
    an update depends only on the learning rate, as with AdamW and Muon; parametrization=mup has factors for such
    optimizers. `by_parameter` is whether a step of some of the parameters updates them as a step of all parameters
    does; optimizer.offload makes such steps.
    """

    name: str
    build: Reference
    config: Any = None  # a dataclass that extends schema.Optimizer: the optimizer's own keys
    moments: Callable[[Any], int] = lambda config: 2
    needs_float32: bool = False
    splits_masters: bool = False
    like_adam: bool = False
    by_parameter: bool = False


def states_per_parameter(optimizer: Any) -> int:
    """Return the number of state tensors, each as large as a parameter, that an optimizer keeps for it."""
    return OPTIMIZERS[optimizer.name].moments(optimizer) + bool(optimizer.ema_decay)


@dataclass(frozen=True)
class LrScheduleKind:
    """A learning rate over time: `factor(step, steps, LrSchedule)` is the learning rate at a step after the warm-up,
    relative to the peak rate; `step` counts from 1.
    """

    name: str
    factor: Reference
    config: Any = None  # a dataclass that extends schema.LrSchedule: the schedule's own keys


@dataclass(frozen=True)
class TrackerKind:
    """A copy of the metrics: `open(Job, Run, resumed_at)` returns a titan_hydra.core.train.observe.trackers.Tracker, on rank 0.
    The tracker's own keys are in the section metrics.NAME.
    """

    name: str
    open: Reference
    config: Any = None  # a dataclass: the tracker's own keys


@dataclass(frozen=True)
class PipelineScheduleKind:
    """A pipeline schedule: a class like torch's schedules, and the facts on which the layout of stages depends.
    `objection(microbatches, stages, ranks)` returns why the schedule refuses that number of microbatches; None if it
    does not. `steps(rank, pp, stages, microbatches)` yields the order of a rank's computations for predictions
    (core/job/schedules.py); without `steps`, predictions use the order of a similar schedule.
    """

    name: str
    schedule: Reference
    config: Any = None  # a dataclass that extends schema.PipelineSchedule: the schedule's own keys
    steps: Reference | None = None
    stages_per_rank: int | None = None  # number of stages on each rank; None: as configured
    # whether rank r holds stages r and 2 * pp - 1 - r, so that rank 0 holds the first and the last stage
    v_shaped: bool = False
    splits_backward: bool = False  # whether the backward computes the inputs' gradients first, and the weights' later
    late: bool = False  # whether no backward runs before the last forward
    from_file: bool = False  # whether the order is in the file `pp_schedule.csv`
    objection: Callable[[int, int, int], str | None] = lambda microbatches, stages, ranks: None


@dataclass(frozen=True)
class ActivationCheckpointKind:
    """What the forward keeps for the backward: `ac.name`. Every n-th block is checkpointed, n =
    `every(ActivationCheckpoint)` (0: none). The compiler may keep a share `budget(ActivationCheckpoint)` of the
    activation memory.

    Without `contexts`, a checkpointed block keeps only its input. `contexts(ActivationCheckpoint, sparse)` returns the
    context_fn of torch's checkpoint, which keeps chosen results. It keeps the result of one in every `matmuls` matmuls.
    """

    name: str
    config: Any = None  # a dataclass that extends schema.ActivationCheckpoint: the mode's own keys
    every: Callable[[Any], int] = lambda config: 0
    contexts: Reference | None = None
    matmuls: int = 1
    budget: Callable[[Any], float] | None = None
    host: bool = False  # whether the inputs of checkpointed blocks are kept in the host's memory
    # whether `titan plan` tries this mode and faults suggest it; modes are registered from the least recomputation to
    # the most
    searched: bool = True


@dataclass(frozen=True)
class AdapterKind:
    """What is trained beside a frozen model: `adapter.name`. `adapt(linear, Job)` changes a linear of a block in place.
    `parameters(Adapter, inputs, outputs)` is the number of parameters that an adapter adds to a linear, for
    predictions. Without `adapt`, the model itself is trained.
    """

    name: str
    adapt: Reference | None = None
    config: Any = None  # a dataclass that extends schema.Adapter: the adapter's own keys
    parameters: Callable[[Any, float, float], float] = lambda config, inputs, outputs: 0
    adapt_experts: Reference | None = None  # (stacked experts, Job) -> None; without it, experts have no adapters


@dataclass(frozen=True)
class ParametrizationKind:
    """How initial values, learning rates and scales follow from a model's width and depth: `parametrization.name`.
    `rules(Model, Parametrization)` returns a titan_hydra.core.job.parametrization.Rules; None: the standard parametrization.
    """

    name: str
    rules: Reference | None = None  # imports no torch
    config: Any = None  # a dataclass that extends schema.Parametrization: the parametrization's own keys


@dataclass(frozen=True)
class RotationKind:
    """How context parallelism lets a rank's queries see all keys: `parallelism.cp_rotate`. `attention(sdpa,
    DeviceMesh)` returns the module that replaces a block's attention kernel.
    """

    name: str
    attention: Reference
    config: Any = None  # a dataclass that extends schema.Parallelism: the rotation's own keys
    # whether torch's ring replaces the kernel, so that ranks exchange keys and values, and keep their queries
    ring: bool = False
    gathers: bool = False  # whether the rotation is a ring in which each rank gathers all keys and values at once
    # whether a rank computes some of the heads on whole sequences, so that the ranks must divide the heads evenly
    splits_heads: bool = False


@dataclass(frozen=True)
class ExecutorKind:
    """Where the ranks of cells run, and who starts them: `cluster.executor`. `executor` is a class without arguments
    that has the methods of titan_hydra.experiments.launch.executor.Executor.
    """

    name: str
    executor: Reference
    config: Any = None  # a dataclass that extends schema.Cluster: the executor's own keys, with identity=False
    # True: ranks are processes on the machine that starts them, and its devices can be counted. False: ranks belong to
    # jobs on whole nodes with cluster.gpus_per_node devices, and every replica group is a separate job.
    here: bool = True
    single: bool = False  # whether the executor runs a single rank, in the process of launch.py
    faults: Reference | None = None  # (Job) -> the faults of the executor's keys; imports no torch
    warnings: Reference | None = None  # like `faults`, but for what is legal and probably a mistake
    elastic: bool = False  # whether each start of a job may be given another number of nodes (`elastic`)
    site: Reference | None = None  # a titan_hydra.experiments.launch.executor.ClusterSite, for `titan cluster init`


@dataclass(frozen=True)
class SearchKind:
    """What draws the cells of a command line under -m: `search.name`. `run(Question)` (of experiments/compose/cells.py) starts the
    cells, awaits them, and returns the exit status. Without `run`, there is no search: the command line itself names
    every cell.
    """

    name: str
    run: Reference | None = None
    config: Any = None  # a dataclass that extends schema.Search: the search's own keys, with identity=False


@dataclass(frozen=True)
class Format:
    """A number format of linears: `precision.converter`. `convert(model, Job, Mesh, device)` changes the linears of a
    meta-device model in place, and returns lines for the log. `titan_hydra.core.parallel.formats` calls the other functions,
    which are optional; where a function is missing, a linear is treated as plain.
    """

    name: str
    convert: Reference
    step: int = 1  # dimensions of matmuls must be multiples of this
    bytes: int = 1  # bytes of an element
    rounding: float = 4e-3  # fraction of a mean loss by which the format's rounding may change this loss
    config: Any = None  # a dataclass that extends schema.Precision: the format's own keys
    # Four functions of (Precision): whether the weights' gradients are computed in the compute dtype; whether a tensor
    # has one scale; whether FSDP gathers weights in the format; whether opaque kernels compute several modules at once.
    plain_gradients: Callable[[Any], bool] = lambda precision: False
    one_scale: Callable[[Any], bool] = lambda precision: False
    gathered: Callable[[Any], bool] = lambda precision: False
    opaque: Callable[[Any], bool] = lambda precision: False
    faults: Reference | None = None  # (Job) -> further faults: what the format cannot be combined with
    # (Precision) -> what is converted: "linears", "experts" (torch's grouped matmuls), or both
    parts: Callable[[Any], tuple[str, ...]] = lambda precision: ("linears",)
    timed: bool = True  # whether matmuls in it run at the device's rate of Float8, for predictions
    block_scales: bool = False  # whether each block of elements has its own scale, so that one pass casts a tensor
    tensor_parallel: bool = True  # whether the converted linears can be split over ranks
    linears: Reference | None = None  # (Job) -> the styles with which tensor parallelism splits converted linears
    before_forward: Reference | None = None  # (model) -> None; called before the forwards of a step or of a validation
    plain: Reference | None = None  # (weight) -> the plain weight for a checkpoint, in the same memory


class Named(Protocol):
    """The field that all records have."""

    @property
    def name(self) -> str: ...


Kind = TypeVar("Kind", bound=Named)


class Registry(dict[str, Kind]):
    """The records of one kind, by name. `key` is the configuration key that chooses among them."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def add(self, record: Kind) -> None:
        """Add a record. Raises ConfigError if another record has its name."""
        if self.setdefault(record.name, record) != record:
            raise ConfigError(f"{self.key}={record.name}: this name is taken")


class Names(Sequence[str]):
    """The names that are in a registry at the time of reading, and the names in `more`."""

    def __init__(self, registry: Registry[Any], more: tuple[str, ...] = ()) -> None:
        self.registry, self.more = registry, more

    def __getitem__(self, index: Any) -> Any:
        return [*self.registry, *self.more][index]

    def __len__(self) -> int:
        return len(self[:])


def resolve(reference: Reference | None) -> Any:
    """Return the function or class that a record refers to; None for None. Raises ConfigError if it does not exist."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(
            f"{reference}: a registered record refers to it, and it cannot be imported: {error}"
        ) from error


def register(record: Named) -> None:
    """Add a record of any kind. Call it in a module of `train.imports`. Raises ConfigError if its name is taken."""
    REGISTRIES[type(record)].add(record)


def executor_named(name: str) -> Any:
    """Return the executor of this name. Raises ConfigError if there is none."""
    if name not in EXECUTORS:
        raise ConfigError(f"cluster.executor={name}: there is no such executor; a module of train.imports may bring it")
    return resolve(EXECUTORS[name].executor)()


PIPELINE_SCHEDULES: Registry[PipelineScheduleKind] = Registry("pp_schedule.name")
DATA_SOURCES: Registry[DataSourceKind] = Registry("data.name")
OBJECTIVES: Registry[ObjectiveKind] = Registry("objective.name")
OPTIMIZERS: Registry[OptimizerKind] = Registry("optimizer.name")
LR_SCHEDULES: Registry[LrScheduleKind] = Registry("lr_scheduler.name")
ACTIVATION_CHECKPOINTS: Registry[ActivationCheckpointKind] = Registry("ac.name")
TRACKERS: Registry[TrackerKind] = Registry("metrics.trackers")
FORMATS: Registry[Format] = Registry("precision.converter")
ADAPTERS: Registry[AdapterKind] = Registry("adapter.name")
PARAMETRIZATIONS: Registry[ParametrizationKind] = Registry("parametrization.name")
CP_ROTATIONS: Registry[RotationKind] = Registry("parallelism.cp_rotate")
EXECUTORS: Registry[ExecutorKind] = Registry("cluster.executor")
SEARCHES: Registry[SearchKind] = Registry("search.name")
REGISTRIES: dict[type, Registry[Any]] = {
    PipelineScheduleKind: PIPELINE_SCHEDULES,
    DataSourceKind: DATA_SOURCES,
    OptimizerKind: OPTIMIZERS,
    LrScheduleKind: LR_SCHEDULES,
    ActivationCheckpointKind: ACTIVATION_CHECKPOINTS,
    TrackerKind: TRACKERS,
    ObjectiveKind: OBJECTIVES,
    Format: FORMATS,
    AdapterKind: ADAPTERS,
    ParametrizationKind: PARAMETRIZATIONS,
    RotationKind: CP_ROTATIONS,
    ExecutorKind: EXECUTORS,
    SearchKind: SEARCHES,
}
