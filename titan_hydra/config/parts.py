"""The package's own sources, objectives, optimizers, schedules, trackers and formats: the keys of each, and its record.
They register as those of a user's module (`train.imports`) do; recipes and model families bring theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .field import key
from .ranges import BELOW_ONE, NOT_NEGATIVE, PATH, SHARE
from .registry import (
    DataSourceKind,
    Format,
    LrScheduleKind,
    ObjectiveKind,
    OptimizerKind,
    PipelineScheduleKind,
    TrackerKind,
    register,
)
from .schema import LrSchedule, Optimizer
from .source import FileSource, Source


@dataclass
class TextSource(FileSource):
    text_key: str = key("text", "name of the column that holds the text")


@dataclass
class HubSource(Source):
    path: str | None = key(None, "name of a dataset of the Hugging Face hub, or a folder", PATH)
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
    muon_lr: float = key(0.02, "learning rate of the matrices; everything else takes AdamW with lr", NOT_NEGATIVE)
    muon_momentum: float = key(0.95, "momentum of the matrices", BELOW_ONE)


@dataclass
class SGD(Optimizer):
    sgd_momentum: float = key(0.0, "momentum", BELOW_ONE)


@dataclass
class Decay(LrSchedule):
    min_factor: float = key(0.0, "the rate ends at this share of its peak", SHARE)


@dataclass
class StableDecay(Decay):
    decay_ratio: float = key(0.1, "share of the steps over which the rate decays at the end", SHARE)
    decay_type: str = key("linear", "shape of the decay", choices=("linear", "sqrt", "cosine"))


def _one_for_each_stage(microbatches: int, stages: int, ranks: int) -> str | None:
    return f"needs at least one for each of the {stages} stages" if microbatches < stages else None


def _equal_rounds(microbatches: int, stages: int, ranks: int) -> str | None:
    rounds = max(1, microbatches // ranks)
    return f"works in {rounds} equal rounds over {ranks} ranks" if microbatches % rounds else None


TORCH = "torch.distributed.pipelining.schedules"
for schedule in (
    PipelineScheduleKind("gpipe", f"{TORCH}:ScheduleGPipe", 1),
    PipelineScheduleKind("1f1b", f"{TORCH}:Schedule1F1B", 1, objection=_one_for_each_stage),
    PipelineScheduleKind("looped_bfs", f"{TORCH}:ScheduleLoopedBFS"),
    PipelineScheduleKind("interleaved_1f1b", f"{TORCH}:ScheduleInterleaved1F1B", objection=_equal_rounds),
    PipelineScheduleKind("interleaved_zb", f"{TORCH}:ScheduleInterleavedZeroBubble", splits_backward=True, objection=_equal_rounds),
    PipelineScheduleKind("zbv", f"{TORCH}:ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    PipelineScheduleKind("dualpipe_v", f"{TORCH}:ScheduleDualPipeV", 2, True, True, _one_for_each_stage),
    PipelineScheduleKind("csv", "titan_hydra.base.private:PipelineScheduleRuntime"),  # the rest is in its file
):
    register(schedule)

DATA, UNKNOWN = "titan_hydra.data", "titan_hydra.data.unknown"
TEXT = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
for source in (
    DataSourceKind("embedded", f"{DATA}:open_embedded", warnings=f"{UNKNOWN}:in_embedded"),
    DataSourceKind("text_files", f"{DATA}:open_text_files", TextSource, needs_path=True, suffixes=TEXT, warnings=f"{UNKNOWN}:in_files"),
    DataSourceKind("tokens", f"{DATA}:open_tokens", FileSource, documents=False, needs_path=True, suffixes=(".bin",)),
    DataSourceKind("c4", f"{DATA}:open_hub", HubSource),
    DataSourceKind("hf", f"{DATA}:open_hub", HubSource, needs_path=True, warnings=f"{UNKNOWN}:in_folder"),
    DataSourceKind("synthetic", f"{DATA}:draw_tokens", documents=False),
):
    register(source)

register(ObjectiveKind("language", "titan_hydra.train.objectives.language:Language", head_loss=True, split_logits=True))

UPDATES = "titan_hydra.train.optimizer"
for optimizer in (
    OptimizerKind("adamw", f"{UPDATES}:adamw", AdamW, splits_masters=True),
    OptimizerKind("muon", f"{UPDATES}:muon", MuonAndAdamW, lambda config: 1, needs_float32=True),
    OptimizerKind("sgd", f"{UPDATES}:sgd", SGD, lambda config: int(config.sgd_momentum > 0)),
):
    register(optimizer)
for rate in (
    LrScheduleKind("wsd", f"{UPDATES}:wsd", StableDecay),
    LrScheduleKind("cosine", f"{UPDATES}:cosine", Decay),
    LrScheduleKind("constant", f"{UPDATES}:constant"),
):
    register(rate)

register(TrackerKind("tensorboard", "titan_hydra.observe.trackers:TensorBoard"))
register(TrackerKind("wandb", "titan_hydra.observe.trackers:WandB"))

FLOAT8 = "titan_hydra.parallel.formats.float8"
register(
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
    )
)
register(Format("mxfp8", "titan_hydra.parallel.formats.mxfp8:convert", 32, tensor_parallel=False))
