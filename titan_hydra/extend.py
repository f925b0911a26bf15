"""What a module of `train.imports`, and every other file of a user, imports from this package: docs/extend.md.

These names stay as they are when the package behind them changes. Each is imported when it is first used, so that this
module imports no torch, and a module that only describes its parts needs none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; tests/test_extend.py compares it with PLACES
    from titan_hydra.core.base.errors import ConfigError
    from titan_hydra.core.data import Wanted
    from titan_hydra.core.data.batch import Batch, Dims
    from titan_hydra.core.data.items import Numbered, Synthetic, TokenFiles
    from titan_hydra.core.data.loader import Sample, Samples
    from titan_hydra.core.data.shards import BadRow, BadShard
    from titan_hydra.core.data.tokenizer import Tokenizer
    from titan_hydra.core.job.config.family import (
        Family,
        Linear,
        Stack,
        causal_keys,
        decoder_blocks,
        decoder_flops,
        decoder_linears,
        decoder_modules,
        decoder_parameters,
        decoder_role,
    )
    from titan_hydra.core.job.config.fault import Fault, divisors, multiples_around
    from titan_hydra.core.job.config.field import key
    from titan_hydra.core.job.config.files import expand
    from titan_hydra.core.job.config.model import Model
    from titan_hydra.core.job.config.operation import Cluster
    from titan_hydra.core.job.config.ranges import (
        ADDRESS,
        ANY,
        BELOW_ONE,
        COUNT,
        DEGREE,
        LINE,
        NAME,
        NATURAL,
        NOT_NEGATIVE,
        NOTE,
        PATH,
        POSITIVE,
        SHARE,
        WIDTH,
        WORD,
        Interval,
        Text,
    )
    from titan_hydra.core.job.config.registry import (
        ActivationCheckpointKind,
        AdapterKind,
        DataSourceKind,
        ExecutorKind,
        Format,
        LrScheduleKind,
        ObjectiveKind,
        OptimizerKind,
        ParametrizationKind,
        PipelineScheduleKind,
        RotationKind,
        TrackerKind,
        register,
    )
    from titan_hydra.core.job.config.schema import (
        ActivationCheckpoint,
        Adapter,
        Job,
        LrSchedule,
        Optimizer,
        Parallelism,
        Parametrization,
        PipelineSchedule,
        Precision,
    )
    from titan_hydra.core.job.config.schema import Objective as ObjectiveKeys
    from titan_hydra.core.job.config.source import DigestedSource, FileSource, Source
    from titan_hydra.core.job.parametrization import RateFactors, Rules, Start
    from titan_hydra.core.job.ranks import processes, world_size
    from titan_hydra.core.job.run.failure import Failure
    from titan_hydra.core.job.run.layout import JOB_LOG
    from titan_hydra.core.job.run.run import Run
    from titan_hydra.core.kernels.attention import SDPA
    from titan_hydra.core.kernels.documents import document_mask, document_offsets
    from titan_hydra.core.models.hf import (
        DECODER,
        EXPERTS,
        HuggingFace,
        decoder_from_config,
        decoder_to_config,
        only_these,
        only_values,
    )
    from titan_hydra.core.models.init import Normal
    from titan_hydra.core.models.layers import Attention, Block, Decoder, FeedForward, TiedOutput, rotate
    from titan_hydra.core.models.llama3.config import Llama3Config
    from titan_hydra.core.models.llama3.model import Llama3
    from titan_hydra.core.models.llama3.sharding import plan as llama3_plan
    from titan_hydra.core.models.moe import MoE, set_experts
    from titan_hydra.core.models.qwen3.config import Qwen3Config
    from titan_hydra.core.models.qwen3.model import Qwen3
    from titan_hydra.core.models.qwen3.sharding import plan as qwen3_plan
    from titan_hydra.core.models.qwen3_moe.config import Qwen3MoeConfig
    from titan_hydra.core.models.qwen3_moe.model import Qwen3Moe
    from titan_hydra.core.models.qwen3_moe.sharding import plan as qwen3_moe_plan
    from titan_hydra.core.models.sparse import SparseModel
    from titan_hydra.core.parallel.formats.select import report_linears, select_linears
    from titan_hydra.core.parallel.mesh import Mesh, local_part
    from titan_hydra.core.parallel.plans import Linears, Plan, with_experts
    from titan_hydra.core.parallel.whole import Norm
    from titan_hydra.core.train.objectives import Objective, Tensors
    from titan_hydra.core.train.objectives.language import IGNORED, Language, packed
    from titan_hydra.core.train.worker import Place, run_rank
    from titan_hydra.experiments.launch.cell import Cell
    from titan_hydra.experiments.launch.executor import ClusterSite, Executor, SiteOption
    from titan_hydra.experiments.launch.executors.local import Processes
    from titan_hydra.experiments.launch.main import launch_script
    from titan_hydra.experiments.runs.queue import Owner, Queue, QueuedJob
    from titan_hydra.experiments.runs.rundir import State, claim
    from titan_hydra.experiments.runs.view import RunRow
    from titan_hydra.instruments.verify.subject import Subject

__all__ = [
    "ADDRESS",
    "ANY",
    "BELOW_ONE",
    "COUNT",
    "DECODER",
    "DEGREE",
    "EXPERTS",
    "IGNORED",
    "JOB_LOG",
    "LINE",
    "NAME",
    "NATURAL",
    "NOTE",
    "NOT_NEGATIVE",
    "PATH",
    "POSITIVE",
    "SDPA",
    "SHARE",
    "WIDTH",
    "WORD",
    "ActivationCheckpoint",
    "ActivationCheckpointKind",
    "Adapter",
    "AdapterKind",
    "Attention",
    "BadRow",
    "BadShard",
    "Batch",
    "Block",
    "Cell",
    "Cluster",
    "ClusterSite",
    "ConfigError",
    "DataSourceKind",
    "Decoder",
    "DigestedSource",
    "Dims",
    "Executor",
    "ExecutorKind",
    "Failure",
    "Family",
    "Fault",
    "FeedForward",
    "FileSource",
    "Format",
    "HuggingFace",
    "Interval",
    "Job",
    "Language",
    "Linear",
    "Linears",
    "Llama3",
    "Llama3Config",
    "LrSchedule",
    "LrScheduleKind",
    "Mesh",
    "MoE",
    "Model",
    "Norm",
    "Normal",
    "Numbered",
    "Objective",
    "ObjectiveKeys",
    "ObjectiveKind",
    "Optimizer",
    "OptimizerKind",
    "Owner",
    "Parallelism",
    "Parametrization",
    "ParametrizationKind",
    "PipelineSchedule",
    "PipelineScheduleKind",
    "Place",
    "Plan",
    "Precision",
    "Processes",
    "Queue",
    "QueuedJob",
    "Qwen3",
    "Qwen3Config",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "RateFactors",
    "RotationKind",
    "Rules",
    "Run",
    "RunRow",
    "Sample",
    "Samples",
    "SiteOption",
    "Source",
    "SparseModel",
    "Stack",
    "Start",
    "State",
    "Subject",
    "Synthetic",
    "Tensors",
    "Text",
    "TiedOutput",
    "TokenFiles",
    "Tokenizer",
    "TrackerKind",
    "Wanted",
    "causal_keys",
    "claim",
    "decoder_blocks",
    "decoder_flops",
    "decoder_from_config",
    "decoder_linears",
    "decoder_modules",
    "decoder_parameters",
    "decoder_role",
    "decoder_to_config",
    "divisors",
    "document_mask",
    "document_offsets",
    "expand",
    "key",
    "launch_script",
    "llama3_plan",
    "local_part",
    "multiples_around",
    "only_these",
    "only_values",
    "packed",
    "processes",
    "qwen3_moe_plan",
    "qwen3_plan",
    "register",
    "report_linears",
    "rotate",
    "run_rank",
    "select_linears",
    "set_experts",
    "with_experts",
    "world_size",
]

PLACES = {  # where the names stand; MEMBER:NAME has another name here, as it is not unique or not clear alone
    "core.base.errors": "ConfigError",
    "core.data": "Wanted",
    "core.data.batch": "Batch Dims",
    "core.data.items": "Numbered Synthetic TokenFiles",
    "core.data.loader": "Sample Samples",
    "core.data.shards": "BadRow BadShard",
    "core.data.tokenizer": "Tokenizer",
    "core.job.config.family": (
        "Family Linear Stack causal_keys decoder_blocks decoder_flops decoder_linears "
        "decoder_modules decoder_parameters decoder_role"
    ),
    "core.job.config.fault": "Fault divisors multiples_around",
    "core.job.config.field": "key",
    "core.job.config.files": "expand",
    "core.job.config.model": "Model",
    "core.job.config.operation": "Cluster",
    "core.job.config.ranges": (
        "ADDRESS ANY BELOW_ONE COUNT DEGREE LINE NAME NATURAL NOTE NOT_NEGATIVE PATH POSITIVE "
        "SHARE WIDTH WORD Interval Text"
    ),
    "core.job.config.registry": (
        "ActivationCheckpointKind AdapterKind DataSourceKind ExecutorKind Format LrScheduleKind "
        "ObjectiveKind OptimizerKind ParametrizationKind PipelineScheduleKind RotationKind "
        "TrackerKind register"
    ),
    "core.job.config.schema": (
        "ActivationCheckpoint Adapter Job LrSchedule Objective:ObjectiveKeys Optimizer "
        "Parallelism Parametrization PipelineSchedule Precision"
    ),
    "core.job.config.source": "DigestedSource FileSource Source",
    "core.job.parametrization": "RateFactors Rules Start",
    "core.job.ranks": "processes world_size",
    "core.job.run.layout": "JOB_LOG",
    "core.job.run.failure": "Failure",
    "core.job.run.run": "Run",
    "core.kernels.attention": "SDPA",
    "core.kernels.documents": "document_mask document_offsets",
    "core.models.hf": "DECODER EXPERTS HuggingFace decoder_from_config decoder_to_config only_these only_values",
    "core.models.init": "Normal",
    "core.models.layers": "Attention Block Decoder FeedForward TiedOutput rotate",
    "core.models.llama3.config": "Llama3Config",
    "core.models.llama3.model": "Llama3",
    "core.models.llama3.sharding": "plan:llama3_plan",
    "core.models.moe": "MoE set_experts",
    "core.models.qwen3.config": "Qwen3Config",
    "core.models.qwen3.model": "Qwen3",
    "core.models.qwen3.sharding": "plan:qwen3_plan",
    "core.models.qwen3_moe.config": "Qwen3MoeConfig",
    "core.models.qwen3_moe.model": "Qwen3Moe",
    "core.models.qwen3_moe.sharding": "plan:qwen3_moe_plan",
    "core.models.sparse": "SparseModel",
    "core.parallel.formats.select": "report_linears select_linears",
    "core.parallel.mesh": "Mesh local_part",
    "core.parallel.whole": "Norm",
    "core.parallel.plans": "Linears Plan with_experts",
    "core.train.objectives": "Objective Tensors",
    "core.train.objectives.language": "IGNORED Language packed",
    "core.train.worker": "Place run_rank",
    "experiments.launch.cell": "Cell",
    "experiments.launch.executor": "ClusterSite Executor SiteOption",
    "experiments.launch.executors.local": "Processes",
    "experiments.launch.main": "launch_script",
    "experiments.runs.queue": "Owner Queue QueuedJob",
    "experiments.runs.rundir": "State claim",
    "experiments.runs.view": "RunRow",
    "instruments.verify.subject": "Subject",
}


def __getattr__(name: str) -> Any:
    """Import the module in which a name stands, and return what the name means there."""
    for module, members in PLACES.items():
        for member, _, other in (entry.partition(":") for entry in members.split()):
            if name == (other or member):
                return getattr(importlib.import_module(f"titan_hydra.{module}"), member)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; docs/extend.md lists its names")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
