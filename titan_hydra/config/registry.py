"""The parts that a name in the configuration chooses, one record each. A module of `train.imports` adds its own with
`register`.

A record holds all that the checks and the trainer know of a part. What computes is given as a function, or as
"module:name" of one, which is imported only on the ranks: so a record, and the module that registers it, need no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from titan_hydra.base.errors import ConfigError

if TYPE_CHECKING:
    from . import schema
    from .fault import Fault

Reference = str | Callable[..., Any]  # a function or class, or "module:name" of one


@dataclass(frozen=True)
class DataSourceKind:
    """A source of samples: `data.name`, or `name` in a mixture. `build(key, Source, Wanted, seed)` returns Documents
    (of titan_hydra.data.streams) or, if `documents` is false, Samples (of titan_hydra.data.loader).
    """

    name: str
    build: Reference
    documents: bool = True
    reads: tuple[str, ...] = ()  # the keys of a source that it uses; the others must stay at their defaults
    needs_path: bool = False
    suffixes: tuple[str, ...] = ()  # of the files that `path` and `validation_path` name; () if they name no files
    gives: tuple[str, ...] = ("tokens",)  # the arrays of a sample, by name
    encodes: bool = False  # the job's tokenizer encodes its text, as it does all documents
    # (key, Source, Job): yields what is wrong with its files, on the launcher; imports no torch
    faults: Reference | None = None
    warnings: Reference | None = None  # as `faults`, of what is legal and probably a mistake


@dataclass(frozen=True)
class ObjectiveKind:
    """What is learned: `build(Job)` returns a titan_hydra.train.objectives.Objective. `faults(Job)` yields what it
    cannot be combined with beyond what the other fields tell.
    """

    name: str
    build: Reference
    needs: tuple[str, ...] = ("tokens",)  # the arrays of a sample that it uses
    head_loss: bool = False  # the head can compute its loss (loss=linear_cross_entropy)
    documents: bool = False  # it needs data.document_mask
    sequences: bool = False  # its loss joins the tokens of a document, so that context parallelism cannot cut it
    split_logits: bool = False  # its loss takes logits that are split over the vocabulary (parallelism.loss_parallel)
    # the keys of `train` that it uses; those of other objectives must stay at their defaults
    reads: tuple[str, ...] = ()
    makes: str = "tokens"  # what it gives a model; only families that take it suit
    faults: Callable[[schema.Job], Iterable[Fault]] | str = lambda job: ()


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer: `build(model, Optimizer, Mesh)` returns a list of torch optimizers with peak rates.
    `moments(Optimizer)` is how many numbers it keeps for each parameter, for the estimate of memory. `splits_masters`:
    it updates parameters with a `lower_half` (optimizer.masters=split).
    """

    name: str
    build: Reference
    moments: Callable[[schema.Optimizer], int] = lambda config: 2
    reads: tuple[str, ...] = ()
    needs_float32: bool = False
    splits_masters: bool = False


@dataclass(frozen=True)
class LrScheduleKind:
    """A learning rate over time: `factor(step, steps, LrSchedule)` is the share of the peak rate after the warm-up;
    steps count from 1.
    """

    name: str
    factor: Reference
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrackerKind:
    """A copy of the metrics: `open(Job, Run, resumed_at)` returns a titan_hydra.observe.trackers.Tracker, on rank 0."""

    name: str
    open: Reference


@dataclass(frozen=True)
class PipelineScheduleKind:
    """A pipeline schedule: a class of torch's kind and what the layout of stages depends on. `objection(microbatches,
    stages, ranks)` is why it does not accept that number of microbatches; None if it does.
    """

    name: str
    schedule: Reference
    stages_per_rank: int | None = None  # None: as configured
    v_shaped: bool = False  # rank r holds stages r and 2 * pp - 1 - r, so the first rank holds the first and the last
    splits_backward: bool = False  # the backward computes the inputs' gradients first, the weights' later
    objection: Callable[[int, int, int], str | None] = lambda microbatches, stages, ranks: None


@dataclass(frozen=True)
class Format:
    """A number format of linears: `precision.converter`. `convert(model, Job, Mesh, device)` changes the linears of a
    meta-device model in place and returns lines for the log. The other functions are what
    `titan_hydra.parallel.formats` calls; without them linears stay plain.
    """

    name: str
    convert: Reference
    step: int = 1  # the matmuls take dimensions in steps of this
    bytes: int = 1  # of an element
    rounding: float = 4e-3  # share of the loss that a mean may be off by rounding alone
    recipes: tuple[str, ...] = ()  # of `precision.recipe`; () if there is one way to scale
    plain_gradients: tuple[str, ...] = ()  # the recipes that compute the weights' gradients in the compute dtype
    # the recipes with one scale for a whole tensor: FSDP can gather such weights in this format
    one_scale: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()  # the recipes that have kernels of our own: precision.kernels=fused
    tensor_parallel: bool = True  # its linears can be split over ranks
    linears: Reference | None = None  # (Job): the styles with which tensor parallelism splits them
    after_step: Reference | None = None  # (model): after the weights have changed
    plain: Reference | None = None  # (weight): what a checkpoint holds of it, in the same memory


class Named(Protocol):
    """What all records have."""

    @property
    def name(self) -> str: ...


Kind = TypeVar("Kind", bound=Named)


class Registry(dict[str, Kind]):
    """The records of one kind, by name. `key` is the configuration key that chooses among them."""

    def __init__(self, key: str, *records: Kind) -> None:
        super().__init__({record.name: record for record in records})
        self.key = key

    def add(self, record: Kind) -> None:
        """Add a record. Raises ConfigError if another one has its name."""
        if self.setdefault(record.name, record) != record:
            raise ConfigError(f"{self.key}={record.name}: this name is taken")


class Names(Sequence[str]):
    """The names in a registry at the time of asking, and `more`; with `reads`, only of the records that read this
    key.
    """

    def __init__(self, registry: Registry[Any], reads: str = "", more: tuple[str, ...] = ()) -> None:
        self.registry, self.reads, self.more = registry, reads, more

    def __getitem__(self, index: Any) -> Any:
        named = [name for name, record in self.registry.items() if not self.reads or self.reads in record.reads]
        return [*named, *self.more][index]

    def __len__(self) -> int:
        return len(self[:])


def resolve(reference: Reference | None) -> Any:
    """Return the function or class that a record refers to; None for None. Raises ConfigError if there is no such
    one.
    """
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{reference}: a registered record refers to it, and it cannot be imported: {error}") from error


def register(record: Named) -> None:
    """Add a record of any kind. Call it in a module of `train.imports`. Raises ConfigError if its name is taken."""
    REGISTRIES[type(record)].add(record)


def _one_for_each_stage(microbatches: int, stages: int, ranks: int) -> str | None:
    return f"needs at least one for each of the {stages} stages" if microbatches < stages else None


def _equal_rounds(microbatches: int, stages: int, ranks: int) -> str | None:
    rounds = max(1, microbatches // ranks)
    return f"works in {rounds} equal rounds over {ranks} ranks" if microbatches % rounds else None


TORCH = "torch.distributed.pipelining.schedules"
HUB = ("path", "subset", "split", "text_key", "validation_split")
PIPELINE_SCHEDULES = Registry(
    "pp_schedule.name",
    PipelineScheduleKind("gpipe", f"{TORCH}:ScheduleGPipe", 1),
    PipelineScheduleKind("1f1b", f"{TORCH}:Schedule1F1B", 1, objection=_one_for_each_stage),
    PipelineScheduleKind("looped_bfs", f"{TORCH}:ScheduleLoopedBFS"),
    PipelineScheduleKind("interleaved_1f1b", f"{TORCH}:ScheduleInterleaved1F1B", objection=_equal_rounds),
    PipelineScheduleKind("interleaved_zb", f"{TORCH}:ScheduleInterleavedZeroBubble", splits_backward=True, objection=_equal_rounds),
    PipelineScheduleKind("zbv", f"{TORCH}:ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    PipelineScheduleKind("dualpipe_v", f"{TORCH}:ScheduleDualPipeV", 2, True, True, _one_for_each_stage),
    PipelineScheduleKind("csv", "titan_hydra.base.private:PipelineScheduleRuntime"),  # the rest is in its file
)
CHAT, POLICY, IMAGE_TEXT = "titan_hydra.data.chat", "titan_hydra.data.policy", "titan_hydra.data.image_text"
UNKNOWN = "titan_hydra.data.unknown"
TURNS = ("tokens", "trained", "documents")
PICTURES = ("patches", "cells", "images", "places")
IMAGES = "titan_hydra.data.images"
NOISY = ("latents", "noise", "time", "text", "pooled")
DATA_SOURCES = Registry(
    "data.name",
    DataSourceKind("embedded", "titan_hydra.data:open_embedded", warnings=f"{UNKNOWN}:in_embedded"),
    DataSourceKind(
        "text_files",
        "titan_hydra.data:open_text_files",
        reads=("path", "text_key", "validation_path"),
        needs_path=True,
        suffixes=(".txt", ".md", ".jsonl", ".json", ".csv", ".parquet"),
        warnings=f"{UNKNOWN}:in_files",
    ),
    DataSourceKind(
        "tokens", "titan_hydra.data:open_tokens", documents=False, reads=("path", "validation_path"), needs_path=True, suffixes=(".bin",)
    ),
    DataSourceKind("c4", "titan_hydra.data:open_hub", reads=HUB),
    DataSourceKind("hf", "titan_hydra.data:open_hub", reads=HUB, needs_path=True, warnings=f"{UNKNOWN}:in_folder"),
    DataSourceKind("synthetic", "titan_hydra.data:draw_tokens", documents=False),
    DataSourceKind(
        "chat",
        f"{CHAT}:open_chat",
        documents=False,
        reads=("path", "validation_path", "chat_template", "train_on"),
        needs_path=True,
        suffixes=(".jsonl", ".json"),
        gives=TURNS,
        encodes=True,
        faults=f"{CHAT}:faults",
        warnings=f"{CHAT}:warnings_of_chat",
    ),
    DataSourceKind(
        "embedded_chat",
        f"{CHAT}:open_chat",
        documents=False,
        reads=("chat_template", "train_on"),
        gives=TURNS,
        encodes=True,
        faults=f"{CHAT}:faults",
        warnings=f"{CHAT}:warnings_of_chat",
    ),
    DataSourceKind(
        "preference",
        f"{POLICY}:open_preference",
        documents=False,
        reads=("path", "validation_path", "chat_template"),
        needs_path=True,
        suffixes=(".jsonl", ".json"),
        gives=(*TURNS, "reference"),
        encodes=True,
        faults=f"{POLICY}:faults_of_pairs",
        warnings=f"{POLICY}:warnings_of_pairs",
    ),
    DataSourceKind(
        "rollouts",
        f"{POLICY}:open_rollouts",
        documents=False,
        reads=("path", "validation_path"),
        needs_path=True,
        suffixes=(".jsonl", ".json"),
        gives=(*TURNS, "old_logprobs", "advantages"),
        encodes=True,
    ),
    DataSourceKind(
        "image_text",
        f"{IMAGE_TEXT}:open_image_text",
        documents=False,
        reads=("path", "validation_path", "patches"),
        needs_path=True,
        suffixes=(".tar",),
        gives=(*TURNS, *PICTURES),
        encodes=True,
        faults=f"{IMAGE_TEXT}:pillow_is_there",
        warnings=f"{IMAGE_TEXT}:warnings_of_captions",
    ),
    DataSourceKind(
        "synthetic_image_text",
        f"{IMAGE_TEXT}:draw_image_text",
        documents=False,
        reads=("patches",),
        gives=(*TURNS, *PICTURES),
        encodes=True,
        faults=f"{IMAGE_TEXT}:pillow_is_there",
    ),
    DataSourceKind(
        "encoded_images",
        f"{IMAGES}:open_encoded",
        documents=False,
        reads=("path", "validation_path", "caption_dropout"),
        needs_path=True,
        gives=NOISY,
        faults=f"{IMAGES}:faults",
    ),
    DataSourceKind(
        "image_files",
        "titan_hydra.train.encode:open_image_files",
        documents=False,
        needs_path=True,
        suffixes=(".jsonl",),
        reads=("path", "validation_path", "encoders", "caption_dropout"),
        gives=NOISY,
        faults=f"{IMAGES}:faults_of_files",
        warnings=f"{UNKNOWN}:in_captions",
    ),
    DataSourceKind("synthetic_images", f"{IMAGES}:draw_images", documents=False, reads=("caption_dropout",), gives=NOISY),
)
OBJECTIVES = Registry(
    "train.objective",
    ObjectiveKind("language", "titan_hydra.train.objectives.language:Language", head_loss=True, split_logits=True),
    ObjectiveKind("sft", "titan_hydra.train.objectives.sft:SupervisedFineTuning", needs=TURNS, head_loss=True, split_logits=True),
    ObjectiveKind(
        "dpo",
        "titan_hydra.train.objectives.policy:Preference",
        needs=(*TURNS, "reference"),
        head_loss=True,
        split_logits=True,
        documents=True,
        sequences=True,
        reads=("beta",),
    ),
    ObjectiveKind(
        "policy",
        "titan_hydra.train.objectives.policy:ClippedPolicy",
        needs=(*TURNS, "old_logprobs", "advantages"),
        head_loss=True,
        split_logits=True,
        reads=("clip",),
    ),
    ObjectiveKind(
        "image_text", "titan_hydra.train.objectives.image_text:ImageText", needs=(*TURNS, *PICTURES), head_loss=True, split_logits=True
    ),
    ObjectiveKind(
        "diffusion",
        "titan_hydra.train.objectives.diffusion:Diffusion",
        NOISY,
        makes="latents",
        faults="titan_hydra.config.rules.images:faults",
    ),
)
ADAM = ("beta1", "beta2", "eps")
OPTIMIZERS = Registry(
    "optimizer.name",
    OptimizerKind("adamw", "titan_hydra.train.optimizer:adamw", reads=ADAM, splits_masters=True),
    OptimizerKind("muon", "titan_hydra.train.optimizer:muon", lambda config: 1, (*ADAM, "muon_lr", "muon_momentum"), needs_float32=True),
    OptimizerKind("sgd", "titan_hydra.train.optimizer:sgd", lambda config: int(config.sgd_momentum > 0), ("sgd_momentum",)),
)
LR_SCHEDULES = Registry(
    "lr_scheduler.name",
    LrScheduleKind("wsd", "titan_hydra.train.optimizer:wsd", ("decay_ratio", "decay_type", "min_factor")),
    LrScheduleKind("cosine", "titan_hydra.train.optimizer:cosine", ("min_factor",)),
    LrScheduleKind("constant", "titan_hydra.train.optimizer:constant"),
)
TRACKERS = Registry(
    "metrics.trackers",
    TrackerKind("tensorboard", "titan_hydra.observe.trackers:TensorBoard"),
    TrackerKind("wandb", "titan_hydra.observe.trackers:WandB"),
)
FLOAT8 = "titan_hydra.parallel.formats.float8"
FORMATS = Registry(
    "precision.converter",
    Format(
        "float8",
        f"{FLOAT8}:convert",
        16,
        recipes=("rowwise", "tensorwise", "rowwise_with_gw_hp"),
        plain_gradients=("rowwise_with_gw_hp",),
        one_scale=("tensorwise",),
        fused=("rowwise",),
        linears=f"{FLOAT8}:linears",
        after_step=f"{FLOAT8}:after_step",
        plain=f"{FLOAT8}:plain",
    ),
    Format("mxfp8", "titan_hydra.parallel.formats.mxfp8:convert", 32, tensor_parallel=False),
)
REGISTRIES: dict[type, Registry[Any]] = {
    PipelineScheduleKind: PIPELINE_SCHEDULES,
    DataSourceKind: DATA_SOURCES,
    OptimizerKind: OPTIMIZERS,
    LrScheduleKind: LR_SCHEDULES,
    TrackerKind: TRACKERS,
    ObjectiveKind: OBJECTIVES,
    Format: FORMATS,
}
