"""What the formulas of memory and time need of a job: who holds which part of the model, and how many tokens a rank
works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from titan_hydra.config.family import Linear, family_of
from titan_hydra.config.registry import ADAPTERS, FORMATS, OPTIMIZERS, Format
from titan_hydra.config.schema import Job
from titan_hydra.job.adapter import adapted
from titan_hydra.job.batches import local_batches, microbatch_size, microbatches
from titan_hydra.job.dtypes import SIZE, gathers_in_format, gradient_dtype, has_one_scale
from titan_hydra.job.experts import sparse
from titan_hydra.job.pipeline import blocks_of_stages, modules_of_stages, stages_of_ranks
from titan_hydra.job.recomputation import mode_of, recomputed_share

from .experts import ExpertShape, experts_of, lighter, shared_width


class NotPredictable(ValueError):
    """The prediction lacks something; the text is `key=value: reason`."""


@dataclass(frozen=True)
class Shape:
    """A job as one rank sees it. Parameters are those of a tensor-parallel rank, before they are sharded."""

    job: Job
    linears: tuple[Linear, ...]  # of a block
    block: float  # parameters; those of experts count by the ranks over which they are sharded
    dense: tuple[int, ...]  # blocks of each stage without experts, in a model with experts
    lighter: float  # parameters fewer of such a block
    embedding: float
    head: float  # 0 if it is the embedding's weight
    layers: tuple[int, ...]  # blocks of each stage
    stages: list[list[int]]  # of each pipeline rank
    microbatches: int  # of a local batch
    samples: int  # of a microbatch
    tokens: float  # of a microbatch on a context-parallel rank
    rounds: int  # local batches of a step
    shards: int  # ranks over which each parameter is sharded
    wrapped: bool  # whether FSDP wraps the model
    experts: ExpertShape | None

    @cached_property
    def sequence(self) -> int:
        """The ranks over which the residual stream is split beside context parallelism."""
        return self.job.parallelism.tp if self.job.parallelism.sequence_parallel else 1

    @cached_property
    def whole_again(self) -> float:
        """The share of the blocks that run again as a whole in the backward."""
        return recomputed_share(self.job)

    @property
    def recomputes(self) -> bool:
        """Whether anything runs again in the backward."""
        return self.whole_again > 0 or mode_of(self.job).contexts is not None

    @property
    def stored(self) -> int:
        """The bytes of a parameter as the optimizer holds it."""
        return SIZE[self.job.precision.param_dtype]

    @cached_property
    def gradient(self) -> int:
        """The bytes of a parameter's gradient as the optimizer gets it."""
        return SIZE[gradient_dtype(self.job)]

    @cached_property
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
        return self.format.bytes if self.format and gathers_in_format(self.job) and self.shards > 1 else self.used

    @property
    def format(self) -> Format | None:
        """The number format that the linears compute in; None: the compute dtype, or a format that is emulated in
        it.
        """
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

    @cached_property
    def residual(self) -> float:
        """The width of the residual stream of a token, or its share of it."""
        return self.job.model.dim / self.sequence

    @cached_property
    def queries(self) -> float:
        """The elements of a token's queries on this rank."""
        return self.job.model.n_heads * self.job.model.head_width / self.job.parallelism.tp

    @cached_property
    def keys(self) -> float:
        """The number of elements in a token's keys on this rank, which is also the number in its values."""
        return self.job.model.n_kv_heads * self.job.model.head_width / self.job.parallelism.tp

    @cached_property
    def values(self) -> float:
        """The elements of a token's attention outputs on this rank."""
        return self.job.model.n_heads * self.job.model.value_width / self.job.parallelism.tp

    @cached_property
    def latents(self) -> float:
        """The elements of a token's latents, from which this rank's queries, keys and values are computed."""
        return sum(one.outputs for one in self.linears if one.whole)

    @cached_property
    def ffn_width(self) -> float:
        """The elements of a token between the linears of the feed-forward on this rank, without routed experts."""
        return (shared_width(self.job) if self.experts else self.job.model.ffn_width) / self.job.parallelism.tp

    @property
    def vocabulary(self) -> float:
        """The logits of a token on this rank."""
        split = self.job.parallelism.tp if self.job.parallelism.loss_parallel or self.fused_loss else 1
        return self.job.model.vocab_size / split

    @property
    def halves(self) -> int:
        """The halves of a block, attention and feed-forward, whose input tensor-parallel ranks gather: routed experts
        take split tokens.
        """
        return 1 if self.experts and not sparse(self.job).n_shared_experts else 2

    @property
    def fused_loss(self) -> bool:
        """Whether head and loss are one, in chunks of tokens."""
        return self.job.loss.name == "linear_cross_entropy"

    @property
    def compiled(self) -> bool:
        """Whether blocks, or the whole model, and the loss are compiled."""
        return self.job.compile.name != "off"

    def parameters(self, stage: int) -> float:
        """Return the parameters of a stage on a tensor-parallel rank."""
        last = len(self.layers) - 1
        blocks = self.layers[stage] * self.block - self.dense[stage] * self.lighter
        return blocks + self.embedding * (stage == 0) + self.head * (stage == last)

    @cached_property
    def more(self) -> float:
        """By how many parameters a gathered sparse block has more than `block` counts: it has the experts of one ep
        rank.
        """
        return self.experts.parameters * (1 - self.shards / self.experts.shards) if self.experts else 0.0

    @cached_property
    def whole(self) -> float:
        """The parameters of a block that a rank has once they are gathered."""
        return self.block + self.more

    @property
    def alone(self) -> float:
        """The parameters of a sparse block's experts if no other rank has a shard of them, so that they are not
        gathered; else 0.
        """
        return self.experts.parameters if self.experts and self.experts.shards == 1 else 0.0

    def gathered_parameters(self, stages: list[int]) -> float:
        """Return the parameters of some stages that a rank has once they are gathered."""
        return sum(self.parameters(stage) + (self.layers[stage] - self.dense[stage]) * self.more for stage in stages)

    @cached_property
    def adapter(self) -> float:
        """The trained parameters of a block's adapters on a tensor-parallel rank; 0 without adapters, where all are
        trained.
        """
        tp = self.job.parallelism.tp
        count = ADAPTERS[self.job.adapter.name].parameters
        return sum(count(self.job.adapter, one.share("inputs", tp), one.share("outputs", tp)) for one in adapted(self.job))

    @cached_property
    def learned(self) -> float:
        """The share of a block's parameters that have gradients."""
        return self.adapter / self.block if self.adapter else 1.0

    def trained(self, stages: list[int]) -> float:
        """Return the parameters of some stages that are trained, on a tensor-parallel rank."""
        return sum(self.layers[stage] * self.adapter if self.adapter else self.parameters(stage) for stage in stages)

    @cached_property
    def sizes(self) -> list[float]:
        """The products of the widths of a block's matmuls on this rank, in running order: half the FLOPs of a token."""
        experts = self.experts
        routed = [experts.number * experts.dim / experts.sequence, *[experts.rows * experts.dim * experts.width] * 3] if experts else []
        sizes = [one.size(self.job.parallelism.tp) for one in self.linears]
        return [*sizes[: self.after], *routed, *sizes[self.after :]]

    @cached_property
    def after(self) -> int:
        """The number of linears of a block before its feed-forward."""
        return 1 + [one.column for one in self.linears].index(False)

    def outputs(self, rows: int) -> list[float]:
        """Return the widths of a token in the outputs of a block's matmuls on this rank, in running order; those of row
        linears are split over `rows` ranks.
        """
        widths = [one.share("outputs", self.job.parallelism.tp) / (1 if one.column else rows) for one in self.linears]
        return [*widths[: self.after], *(self.experts.outputs if self.experts else ()), *widths[self.after :]]


def shape_of(job: Job) -> Shape:
    """Return the shape of a frozen job. Raises NotPredictable if its family has no formulas for parameters and
    FLOPs.
    """
    family, degrees, model = family_of(job.model), job.parallelism, job.model
    if family.parameters is None or family.flops is None:
        lacks = "parameters" if family.parameters is None else "flops"
        raise NotPredictable(
            f"model.family={model.family}: has no formula for its {lacks} (Family({lacks}=...)), so nothing can be predicted"
        )
    if family.takes != "tokens":
        raise NotPredictable(f"model.family={model.family}: takes {family.takes}, and predictions know models of tokens alone")
    linears, experts = family.linears(model), experts_of(job)
    ends = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    table = model.vocab_size * model.dim / degrees.tp
    pp = degrees.pp > 1
    layers = _layers(job) if pp else (model.n_layers,)
    less, dense = (lighter(job), experts.dense) if experts else (0, 0)
    block = (family.parameters(model) - ends + dense * less) / model.n_layers
    whole = sum(one.inputs * one.outputs for one in linears if one.whole) + (experts.number * model.dim if experts else 0)
    block = (block - whole) / degrees.tp + whole
    samples, shards = microbatch_size(job), degrees.dp_shard * degrees.cp
    return Shape(
        job,
        linears,
        block,
        _dense(layers, dense),
        less / degrees.tp,
        table,
        0 if model.tie_embeddings else table,
        layers,
        stages_of_ranks(job) if pp else [[0]],
        microbatches(job),
        samples,
        samples * job.data.seq_len / degrees.cp,
        local_batches(job),
        shards,
        shards * degrees.dp_replicate * (degrees.tp if experts else 1) > 1,
        experts,
    )


def _dense(layers: tuple[int, ...], dense: int) -> tuple[int, ...]:
    """Return how many of each stage's blocks are among the model's `dense` first ones."""
    ends = accumulate(layers)
    return tuple(min(max(dense - end + size, 0), size) for size, end in zip(layers, ends, strict=True))


def _layers(job: Job) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    if job.pp_schedule.split:
        return tuple(sum("." in name for name in names) for names in modules_of_stages(job))
    return tuple(blocks_of_stages(job))
