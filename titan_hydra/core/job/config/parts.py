"""The package's own sources, objectives, optimizers, schedules, trackers and formats: the keys of each, and its record.
They are registered like the parts of a user's module (`train.imports`). Recipes and model families register their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from .field import key
from .ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, PATH, POSITIVE, SHARE, WIDTH, WORD, Interval
from .registry import (
    ActivationCheckpointKind,
    AdapterKind,
    DataSourceKind,
    Format,
    LrScheduleKind,
    ObjectiveKind,
    OptimizerKind,
    ParametrizationKind,
    PipelineScheduleKind,
    RotationKind,
    SearchKind,
    TrackerKind,
    register,
)
from .schema import (
    ActivationCheckpoint,
    Adapter,
    LrSchedule,
    Optimizer,
    Parallelism,
    Parametrization,
    PipelineSchedule,
    Precision,
)
from .source import FileSource, Source


@dataclass
class TextSource(FileSource):
    text_key: str = key("text", "name of the column that holds the text")


@dataclass
class HubSource(Source):
    path: str | None = key(None, "name of a dataset of the Hugging Face hub, or a folder", PATH, reads="data")
    subset: str | None = key(None, "configuration of the dataset, for example `en`")
    split: str = key("train", "split of the dataset")
    text_key: str = key("text", "name of the column that holds the text")
    validation_split: str = key("validation", "split used for validation", identity=False, changes="held-out loss")


@dataclass
class AdamW(Optimizer):
    beta1: float = key(0.9, "decay of AdamW's first moment", BELOW_ONE)
    beta2: float = key(0.95, "decay of AdamW's second moment", BELOW_ONE)
    eps: float = key(1e-8, "AdamW's epsilon", NOT_NEGATIVE)


@dataclass
class MuonAndAdamW(AdamW):
    muon_lr: float = key(
        0.02, "Muon's learning rate, for matrices; all other parameters use AdamW with lr", NOT_NEGATIVE
    )
    muon_momentum: float = key(0.95, "Muon's momentum, for matrices", BELOW_ONE)


@dataclass
class SGD(Optimizer):
    sgd_momentum: float = key(0.0, "SGD's momentum", BELOW_ONE)


@dataclass
class Decay(LrSchedule):
    min_factor: float = key(0.0, "final learning rate as a fraction of the peak", SHARE)


@dataclass
class StableDecay(Decay):
    decay_ratio: float = key(0.1, "fraction of the run's steps, at its end, in which the rate decays", SHARE)
    decay_type: str = key("linear", "shape of the decay", choices=("linear", "sqrt", "cosine"))


@dataclass
class LayerCheckpoint(ActivationCheckpoint):
    every: int = key(2, "every n-th block is checkpointed; the other blocks save all activations", COUNT)


@dataclass
class OperatorCheckpoint(ActivationCheckpoint):
    save_ops: list[str] = key(list, "aten operators whose results are saved; empty: the mode's own list", WORD)


@dataclass
class MemoryBudget(ActivationCheckpoint):
    budget: float = key(0.5, "fraction of the activation memory that the compiler may use, 0 to 1", SHARE)


@dataclass
class WrittenSchedule(PipelineSchedule):
    csv: str | None = key(None, "file with the schedule's actions, one line per rank", PATH, reads="schedule")


@dataclass
class RingRotation(Parallelism):
    cp_load_balance: bool = key(
        True, "give each context-parallel rank early and late parts of the sequence, because late queries cost more"
    )


@dataclass
class LowRank(Adapter):
    rank: int = key(16, "rank of the low-rank product that is added to a linear", Interval(1, 65_536))
    alpha: float = key(32.0, "the product of the two matrices is scaled by alpha / rank", POSITIVE)
    experts: bool = key(False, "whether each matrix of each routed expert gets an adapter too")


@dataclass
class MaximalUpdate(Parametrization):
    base_dim: int = key(
        256,
        "model.dim of the base model, whose learning rate holds for all widths; at this width mup equals standard",
        WIDTH,
    )
    base_head_dim: int | None = key(
        None,
        "width of a query of the base model; null: that of this model, so that wider models have more heads",
        WIDTH,
    )
    base_layers: int | None = key(
        None,
        "blocks of the base model, whose learning rate holds for all depths (CompleteP); null: only for widths",
        COUNT,
    )


@dataclass
class Float8(Precision):
    recipe: str = key(
        "rowwise",
        "scales: one per row, one per tensor, or one per row with the weights' gradients in the compute dtype",
        choices=("rowwise", "tensorwise", "rowwise_with_gw_hp"),
    )
    float8_all_gather: bool = key(False, "FSDP gathers Float8 weights (tensorwise only)")
    kernels: str = key(
        "torchao",
        "what casts to Float8: torchao's operators, which a compiler fuses, or this package's fused kernels "
        "(rowwise only)",
        choices=("torchao", "fused"),
    )


@dataclass
class MXFP8(Precision):
    converts: str = key(
        "linears",
        "what multiplies in MXFP8: linears, experts (their matmuls, but for the weights' gradients), or both",
        choices=("linears", "experts", "both"),
    )


@dataclass
class WandBTracker:
    project: str = key("titan_hydra", "project in wandb", WORD, identity=False)
    entity: str | None = key(None, "user or team in wandb; null: the default of the account", WORD, identity=False)
    tags: list[str] = key(list, "tags of the run in wandb (its notes come from the key `notes`)", identity=False)
    mode: str = key(
        "offline",
        "offline: write to the run directory; online: send to the server",
        identity=False,
        choices=("offline", "online"),
    )


def _one_for_each_stage(microbatches: int, stages: int, ranks: int) -> str | None:
    return f"needs at least one for each of the {stages} stages" if microbatches < stages else None


def _equal_rounds(microbatches: int, stages: int, ranks: int) -> str | None:
    rounds = max(1, microbatches // ranks)
    return f"works in {rounds} equal rounds over {ranks} ranks" if microbatches % rounds else None


SELECTIVE = "titan_hydra.core.parallel.activation_checkpoint"
for mode in (
    ActivationCheckpointKind("none"),
    ActivationCheckpointKind("lean", OperatorCheckpoint, lambda config: 1, f"{SELECTIVE}:every_matmul"),
    ActivationCheckpointKind("op", OperatorCheckpoint, lambda config: 1, f"{SELECTIVE}:every_second_matmul", matmuls=2),
    ActivationCheckpointKind("full", every=lambda config: 1),
    ActivationCheckpointKind("offload", every=lambda config: 1, host=True, searched=False),
    ActivationCheckpointKind("layer", LayerCheckpoint, lambda config: config.every, searched=False),
    ActivationCheckpointKind("memory_budget", MemoryBudget, budget=lambda config: config.budget, searched=False),
):
    register(mode)

TORCH, ORDERS = "torch.distributed.pipelining.schedules", "titan_hydra.core.job.schedules"
for schedule in (
    PipelineScheduleKind(
        "gpipe", f"{TORCH}:ScheduleGPipe", steps=f"{ORDERS}:forwards_first", stages_per_rank=1, late=True
    ),
    PipelineScheduleKind(
        "1f1b",
        f"{TORCH}:Schedule1F1B",
        steps=f"{ORDERS}:one_forward_one_backward",
        stages_per_rank=1,
        objection=_one_for_each_stage,
    ),
    PipelineScheduleKind("looped_bfs", f"{TORCH}:ScheduleLoopedBFS", steps=f"{ORDERS}:breadth_first", late=True),
    PipelineScheduleKind(
        "interleaved_1f1b", f"{TORCH}:ScheduleInterleaved1F1B", steps=f"{ORDERS}:interleaved", objection=_equal_rounds
    ),
    PipelineScheduleKind(
        "interleaved_zb",
        f"{TORCH}:ScheduleInterleavedZeroBubble",
        steps=f"{ORDERS}:interleaved_zero_bubble",
        splits_backward=True,
        objection=_equal_rounds,
    ),
    PipelineScheduleKind(
        "zbv",
        f"{TORCH}:ScheduleZBVZeroBubble",
        steps=f"{ORDERS}:zero_bubble_v",
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
    PipelineScheduleKind(
        "dualpipe_v",
        f"{TORCH}:ScheduleDualPipeV",
        steps=f"{ORDERS}:dual_pipe_v",
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        objection=_one_for_each_stage,
    ),
    PipelineScheduleKind(
        "csv", "titan_hydra.core.base.private:PipelineScheduleRuntime", WrittenSchedule, from_file=True
    ),
):
    register(schedule)

DATA, UNKNOWN = "titan_hydra.core.data", "titan_hydra.core.data.unknown"
TEXT = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
for source in (
    DataSourceKind("embedded", f"{DATA}:open_embedded", warnings=f"{UNKNOWN}:in_embedded"),
    DataSourceKind(
        "text_files",
        f"{DATA}:open_text_files",
        TextSource,
        needs_path=True,
        suffixes=TEXT,
        faults=f"{DATA}.first_rows:faults_of_text",
        warnings=f"{UNKNOWN}:in_files",
    ),
    DataSourceKind(
        "tokens",
        f"{DATA}:open_tokens",
        FileSource,
        documents=False,
        needs_path=True,
        suffixes=(".bin",),
        encoded=True,
        faults=f"{DATA}.learned:faults_of_ids",
        warnings=f"{DATA}.learned:warnings_of_ids",
    ),
    DataSourceKind("c4", f"{DATA}:open_hub", HubSource),
    DataSourceKind("hf", f"{DATA}:open_hub", HubSource, needs_path=True, warnings=f"{UNKNOWN}:in_folder"),
    DataSourceKind("synthetic", f"{DATA}:draw_tokens", documents=False),
):
    register(source)

register(
    ObjectiveKind("language", "titan_hydra.core.train.objectives.language:Language", head_loss=True, split_logits=True)
)

UPDATES = "titan_hydra.core.train.optimizer"
for optimizer in (
    OptimizerKind("adamw", f"{UPDATES}:adamw", AdamW, splits_masters=True, like_adam=True, by_parameter=True),
    OptimizerKind(
        "muon",
        f"{UPDATES}:muon",
        MuonAndAdamW,
        lambda config: 1,
        needs_float32=True,
        like_adam=True,
        by_parameter=True,
    ),
    OptimizerKind("sgd", f"{UPDATES}:sgd", SGD, lambda config: int(config.sgd_momentum > 0), by_parameter=True),
):
    register(optimizer)
for rate in (
    LrScheduleKind("wsd", f"{UPDATES}:wsd", StableDecay),
    LrScheduleKind("cosine", f"{UPDATES}:cosine", Decay),
    LrScheduleKind("constant", f"{UPDATES}:constant"),
):
    register(rate)

register(TrackerKind("tensorboard", "titan_hydra.core.train.observe.trackers:TensorBoard"))
register(TrackerKind("wandb", "titan_hydra.core.train.observe.trackers:WandB", WandBTracker))

FLOAT8 = "titan_hydra.core.parallel.formats.float8"
register(
    Format(
        "float8",
        f"{FLOAT8}:convert",
        16,
        config=Float8,
        plain_gradients=lambda precision: precision.recipe == "rowwise_with_gw_hp",
        one_scale=lambda precision: precision.recipe == "tensorwise",
        gathered=lambda precision: precision.float8_all_gather,
        opaque=lambda precision: precision.kernels == "fused",
        faults="titan_hydra.core.job.rules.precision:float8_faults",
        linears=f"{FLOAT8}:linears",
        before_forward=f"{FLOAT8}:before_forward",
        plain=f"{FLOAT8}:plain",
    )
)
register(
    Format(
        "mxfp8",
        "titan_hydra.core.parallel.formats.mxfp8:convert",
        32,
        config=MXFP8,
        block_scales=True,
        plain_gradients=lambda precision: precision.converts == "experts",
        faults="titan_hydra.core.job.rules.precision:mxfp8_faults",
        parts=lambda precision: ("linears", "experts") if precision.converts == "both" else (precision.converts,),
        tensor_parallel=False,
    )
)
register(
    Format(
        "nvfp4",
        "titan_hydra.core.parallel.formats.nvfp4:convert",
        128,
        rounding=1.5e-2,  # arXiv 2509.25149, section 3: below 1 % of the loss until the end, then 1.5 %
        faults="titan_hydra.core.job.rules.precision:nvfp4_faults",
        tensor_parallel=False,
        timed=False,
    )
)

register(SearchKind("off"))

register(AdapterKind("none"))
register(
    AdapterKind(
        "lora",
        "titan_hydra.core.parallel.lora:adapt",
        LowRank,
        lambda config, inputs, outputs: config.rank * (inputs + outputs),
        adapt_experts="titan_hydra.core.parallel.lora:adapt_experts",
    )
)

register(ParametrizationKind("standard"))
register(ParametrizationKind("mup", "titan_hydra.core.job.parametrization:MaximalUpdateRules", MaximalUpdate))

CONTEXT = "titan_hydra.core.parallel.context"
register(RotationKind("allgather", f"{CONTEXT}:Ring", RingRotation, ring=True, gathers=True))
register(RotationKind("alltoall", f"{CONTEXT}:Ring", RingRotation, ring=True))
register(RotationKind("ulysses", f"{CONTEXT}:Ulysses", splits_heads=True))
