"""What the formulas of memory and time need of a job: who holds which part of the model, and how many tokens a rank works on."""
from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.config.family import Linear, family_of
from titan_hydra.config.load import data_parallel
from titan_hydra.config.registry import FORMATS, OPTIMIZERS, Format
from titan_hydra.config.rules import pipeline
from titan_hydra.config.rules.adapter import adapted
from titan_hydra.config.rules.memory import SIZE
from titan_hydra.config.rules.precision import has_one_scale
from titan_hydra.config.schema import Job


class NotPredictable(ValueError):
    """The prediction lacks something; the text is `key=value: reason`."""


@dataclass(frozen=True)
class Shape:
    """A job as one rank sees it. Parameters are those of a tensor-parallel rank, before they are sharded."""

    job: Job
    linears: tuple[Linear, ...]  # of a block
    block: float  # parameters
    embedding: float
    head: float  # 0 if it is the embedding's weight
    layers: tuple[int, ...]  # blocks of each stage
    stages: list[list[int]]  # of each pipeline rank
    microbatches: int  # of a local batch
    samples: float  # of a microbatch
    tokens: float  # of a microbatch on a context-parallel rank
    rounds: int  # local batches of a step
    shards: int  # ranks over which each parameter is sharded
    wrapped: bool  # whether FSDP wraps the model

    @property
    def sequence(self) -> int:
        """The ranks over which the residual stream is split beside context parallelism."""
        return self.job.parallelism.tp if self.job.parallelism.sequence_parallel else 1

    @property
    def stored(self) -> int:
        """The bytes of a parameter as the optimizer holds it."""
        return SIZE[self.job.precision.param_dtype]

    @property
    def used(self) -> int:
        """The bytes of an activation."""
        return SIZE[self.job.precision.compute_dtype]

    @property
    def reduced(self) -> int:
        """The bytes of a gradient while it is summed over ranks."""
        return SIZE[self.job.precision.reduce_dtype]

    @property
    def gathered(self) -> int:
        """The bytes of a parameter of a block that FSDP gathers."""
        return self.format.bytes if self.job.precision.float8_all_gather and self.shards > 1 else self.used

    @property
    def format(self) -> Format | None:
        """The number format that the linears compute in; None: the compute dtype, or a format that is emulated in it."""
        return None if self.job.precision.emulate else FORMATS.get(self.job.precision.converter)

    @property
    def one_scale(self) -> bool:
        """Whether tensors have a single scale in that format, so that ranks cast before they gather."""
        return self.format is not None and has_one_scale(self.job)

    @property
    def sent(self) -> int:
        """The bytes of an activation that tensor-parallel ranks gather."""
        return self.format.bytes if self.one_scale else self.used

    @property
    def moments(self) -> int:
        """The numbers that the optimizer keeps for each parameter."""
        return OPTIMIZERS[self.job.optimizer.name].moments(self.job.optimizer)

    @property
    def residual(self) -> float:
        """The width of the residual stream of a token, or its share of it."""
        return self.job.model.dim / self.sequence

    @property
    def queries(self) -> float:
        """The numbers of a token's queries on this rank."""
        return self.job.model.n_heads * self.job.model.head_width / self.job.parallelism.tp

    @property
    def keys(self) -> float:
        """The numbers of a token's keys on this rank; it has as many values."""
        return self.job.model.n_kv_heads * self.job.model.head_width / self.job.parallelism.tp

    @property
    def ffn_width(self) -> float:
        """The numbers of a token between the linears of the feed-forward on this rank."""
        return self.job.model.ffn_width / self.job.parallelism.tp

    @property
    def vocabulary(self) -> float:
        """The logits of a token on this rank."""
        split = self.job.parallelism.tp if self.job.parallelism.loss_parallel or self.fused_loss else 1
        return self.job.model.vocab_size / split

    @property
    def fused_loss(self) -> bool:
        """Whether head and loss are one, in chunks of tokens."""
        return self.job.loss.name == "linear_cross_entropy"

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled."""
        return self.job.compile.name == "block"

    def parameters(self, stage: int) -> float:
        """Return the parameters of a stage on a tensor-parallel rank."""
        last = len(self.layers) - 1
        return self.layers[stage] * self.block + self.embedding * (stage == 0) + self.head * (stage == last)

    @property
    def adapter(self) -> float:
        """The trained parameters of a block's adapters on a tensor-parallel rank; 0 without adapters, where all are trained."""
        tp = self.job.parallelism.tp
        return self.job.adapter.rank * sum(one.inputs / (1 if one.column else tp) + one.outputs / (tp if one.column else 1)
                                           for one in adapted(self.job))

    @property
    def learned(self) -> float:
        """The share of a block's parameters that have gradients."""
        return self.adapter / self.block if self.adapter else 1.0

    def trained(self, stages: list[int]) -> float:
        """Return the parameters of some stages that are trained, on a tensor-parallel rank."""
        return sum(self.layers[stage] * self.adapter if self.adapter else self.parameters(stage) for stage in stages)

    def columns(self, what: str) -> float:
        """Return the summed widths of the `inputs` or `outputs` of a block's linears that a tensor-parallel rank holds."""
        tp = self.job.parallelism.tp
        return sum(getattr(one, what) / (tp if one.column is (what == "outputs") else self.sequence) for one in self.linears)


def shape_of(job: Job) -> Shape:
    """Return the shape of a frozen job. Raises NotPredictable if its family has no formulas for parameters and FLOPs."""
    family, degrees, model = family_of(job.model), job.parallelism, job.model
    if family.parameters is None or family.flops is None:
        lacks = "parameters" if family.parameters is None else "flops"
        raise NotPredictable(f"model.family={model.family}: has no formula for its {lacks} (Family({lacks}=...)), so nothing can be "
                             "predicted")
    if model.sparse:
        raise NotPredictable(f"model.name={model.name}: has experts, of which predictions know nothing yet")
    ends = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    table = model.vocab_size * model.dim / degrees.tp
    pp = degrees.pp > 1
    number = max(pipeline.microbatches(job), 1) if pp else 1
    samples = job.data.local_batch / number
    shards = degrees.dp_shard * degrees.cp
    locally = job.data.local_batch * data_parallel(job) * job.fault_tolerance.replicas
    return Shape(
        job, family.linears(model), (family.parameters(model) - ends) / model.n_layers / degrees.tp, table,
        0 if model.tie_embeddings else table, _layers(job) if pp else (model.n_layers,),
        pipeline.stages_of_ranks(job) if pp else [[0]], number, samples, samples * job.data.seq_len / degrees.cp,
        max(job.data.global_batch // locally, 1), shards, shards * degrees.dp_replicate > 1)


def _layers(job: Job) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    if job.pp_schedule.split:
        return tuple(sum("." in name for name in names) for names in pipeline.modules_of_stages(job))
    return tuple(pipeline.blocks_of_stages(job))
