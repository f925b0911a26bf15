"""The sizes from which memory and time are computed: which rank holds which part of the model, and how many tokens a
rank computes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from titan_hydra.core.job.adapter import adapted, expert_adapter
from titan_hydra.core.job.batches import local_batches, microbatch_size, microbatches
from titan_hydra.core.job.config.family import Linear, Stack, family_of
from titan_hydra.core.job.config.registry import ADAPTERS, FORMATS, Format, states_per_parameter
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import SIZE, converts, gathers_in_format, gradient_dtype, has_one_scale, is_opaque
from titan_hydra.core.job.pipeline import blocks_of_stages, modules_of_stages, stages_of_ranks
from titan_hydra.core.job.ranks import sparse
from titan_hydra.core.job.recomputation import EXCHANGE, mode_of, recomputed_share, saves

from .experts import ExpertShape, experts_of, lighter, shared_width


class NotPredictable(ValueError):
    """Raised if a value that the prediction needs is missing. The message has the form `key=value: reason`."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a job on one rank. Numbers of parameters are those of a tensor-parallel rank, before sharding."""

    job: Job
    linears: tuple[Linear, ...]  # the linears of a block
    # parameters of a block. Experts may be sharded over another number of ranks than `shards`, so their parameters are
    # counted times `shards` / (number of ranks that shard experts). Then `block` / `shards` is the right number per
    # rank.
    block: float
    dense: tuple[int, ...]  # number of dense blocks of each stage, in a model with experts
    lighter: float  # how many parameters `block` has more than a dense block
    embedding: float
    head: float  # parameters of the head; 0 if it is tied to the embedding
    layers: tuple[int, ...]  # number of blocks of each stage
    stages: list[list[int]]  # stages of each pipeline rank
    microbatches: int  # microbatches of a local batch
    samples: int  # samples of a microbatch
    tokens: float  # tokens of a microbatch on a context-parallel rank
    rounds: int  # local batches per step (gradient accumulation)
    shards: int  # ranks over which each parameter is sharded
    wrapped: bool  # whether FSDP wraps the model
    experts: ExpertShape | None
    # properties of other trainers: whether Transformer Engine computes the experts, in the number format and as fast
    # as other linears, and whether exchanges of rows overlap with the computation of another microbatch
    transformer_engine: bool = False
    hidden_exchange: bool = False
    # whether the matmuls of weights' gradients add to earlier gradients, in no further time, as Megatron's do
    adds_in_matmuls: bool = False
    whole_blocks: bool = False  # whether activation checkpointing treats compiled blocks with experts as a whole
    captured: bool = False  # whether CUDA graphs start the kernels of a block, as in some of Megatron's recipes
    stack: Stack | None = None  # the family's description of these blocks, if they do not belong to a decoder
    # the shapes of the stacks of blocks that run, on the first stage, before these blocks
    before: tuple[Shape, ...] = ()

    @property
    def causal(self) -> bool:
        """Whether a token sees only earlier tokens in attention."""
        return self.stack is None and self.job.model.causal

    @cached_property
    def sequence(self) -> int:
        """The number of ranks over which sequence parallelism splits the residual stream."""
        return self.job.parallelism.tp if self.job.parallelism.sequence_parallel else 1

    @cached_property
    def whole_again(self) -> float:
        """The fraction of the blocks of which the backward recomputes the whole forward."""
        return recomputed_share(self.job)

    @property
    def recomputes(self) -> bool:
        """Whether the backward recomputes anything."""
        return self.whole_again > 0 or mode_of(self.job).contexts is not None

    @property
    def stored(self) -> int:
        """The bytes of one element of a parameter in the optimizer's dtype."""
        return SIZE[self.job.precision.param_dtype]

    @cached_property
    def gradient(self) -> int:
        """The bytes of one element of a gradient in the dtype that the optimizer reads."""
        return SIZE[gradient_dtype(self.job)]

    @cached_property
    def used(self) -> int:
        """The bytes of one element of an activation."""
        return SIZE[self.job.precision.compute_dtype]

    @property
    def reduced(self) -> int:
        """The bytes of one element of a gradient in the dtype in which ranks sum it."""
        return SIZE[self.job.precision.reduce_dtype]

    @property
    def gathered(self) -> int:
        """The bytes of one element of a block's parameter in the dtype in which FSDP gathers it."""
        return self.format.bytes if self.format and gathers_in_format(self.job) and self.shards > 1 else self.used

    @property
    def format(self) -> Format | None:
        """The number format of the linears; None if they have none, or if the format is emulated in the compute dtype."""
        return None if self.job.precision.emulate else FORMATS.get(self.job.precision.converter)

    @property
    def fast_linears(self) -> bool:
        """Whether linears multiply in the number format."""
        return self.format is not None and converts(self.job, "linears")

    @property
    def fast_experts(self) -> bool:
        """Whether experts do, in the forward and for their rows' gradients."""
        return self.format is not None and self.experts is not None and converts(self.job, "experts")

    @property
    def fused_casts(self) -> bool:
        """Whether the package's own kernels cast to the number format; they also compute the norms and the activation."""
        return self.format is not None and is_opaque(self.job)

    @property
    def one_scale(self) -> bool:
        """Whether the number format has one scale per tensor; then ranks can cast a tensor before they gather it."""
        return self.format is not None and has_one_scale(self.job)

    @property
    def sent(self) -> int:
        """The bytes of one element of an activation in the dtype in which tensor-parallel ranks gather it."""
        return self.format.bytes if self.one_scale else self.used

    @property
    def moments(self) -> int:
        """The number of state tensors, each as large as a parameter, that the optimizer keeps for it."""
        return states_per_parameter(self.job.optimizer)

    @cached_property
    def residual(self) -> float:
        """The number of elements in a token's residual stream on this rank."""
        return self.job.model.dim / self.sequence

    @cached_property
    def queries(self) -> float:
        """The number of elements in a token's queries on this rank."""
        return self.job.model.n_heads * self.job.model.head_width / self.job.parallelism.tp

    @cached_property
    def keys(self) -> float:
        """The number of elements in a token's keys on this rank, and also in its values."""
        return self.job.model.n_kv_heads * self.job.model.head_width / self.job.parallelism.tp

    @cached_property
    def values(self) -> float:
        """The number of elements in a token's attention outputs on this rank."""
        return self.job.model.n_heads * self.job.model.value_width / self.job.parallelism.tp

    @cached_property
    def latents(self) -> float:
        """The number of elements in a token's latents, from which this rank's queries, keys and values are computed."""
        return sum(linear.outputs for linear in self.linears if linear.whole)

    @cached_property
    def ffn_width(self) -> float:
        """The width of a token's hidden activation in the feed-forward on this rank, routed experts excluded."""
        return (shared_width(self.job) if self.experts else self.job.model.ffn_width) / self.job.parallelism.tp

    @property
    def vocabulary(self) -> float:
        """The number of a token's logits on this rank."""
        split = self.job.parallelism.tp if self.job.parallelism.loss_parallel or self.fused_loss else 1
        return self.job.model.vocab_size / split

    @property
    def halves(self) -> int:
        """In how many of a block's two halves (attention, feed-forward) tensor-parallel ranks gather the input. Routed
        experts do not gather their input: the tokens stay split over the ranks.
        """
        return 1 if self.experts and not sparse(self.job).n_shared_experts else 2

    @property
    def fused_loss(self) -> bool:
        """Whether head and loss are fused, so that they are computed in chunks of tokens."""
        return self.job.loss.name == "linear_cross_entropy"

    @property
    def compiled(self) -> bool:
        """Whether the loss and the blocks (or the whole model) are compiled."""
        return self.job.compile.name != "off"

    def parameters(self, stage: int) -> float:
        """Return the parameters of a stage on a tensor-parallel rank."""
        last = len(self.layers) - 1
        blocks = self.layers[stage] * self.block - self.dense[stage] * self.lighter
        earlier = sum(stack.layers[0] * stack.block for stack in self.before) if stage == 0 else 0
        return blocks + earlier + self.embedding * (stage == 0) + self.head * (stage == last)

    @cached_property
    def more(self) -> float:
        """How many parameters a gathered sparse block has more than `block`, as it holds all experts of an ep rank."""
        return self.experts.parameters * (1 - self.shards / self.experts.shards) if self.experts else 0.0

    @cached_property
    def whole(self) -> float:
        """The number of parameters of a block that a rank holds after the all-gather."""
        return self.block + self.more

    @property
    def alone(self) -> float:
        """The number of parameters of a sparse block's experts if these are not sharded, and so never gathered; else 0."""
        return self.experts.parameters if self.experts and self.experts.shards == 1 else 0.0

    def gathered_parameters(self, stages: list[int]) -> float:
        """Return the number of parameters of some stages that a rank holds after the all-gather."""
        return sum(self.parameters(stage) + (self.layers[stage] - self.dense[stage]) * self.more for stage in stages)

    @cached_property
    def adapter(self) -> float:
        """The trained parameters of a block's adapters on a tensor-parallel rank. It is 0 for a job without adapters,
        which trains all parameters.
        """
        tp = self.job.parallelism.tp
        count = ADAPTERS[self.job.adapter.name].parameters
        of_linears = sum(
            count(self.job.adapter, linear.share("inputs", tp), linear.share("outputs", tp))
            for linear in adapted(self.job)
        )
        return of_linears + self.expert_adapters

    @cached_property
    def expert_adapters(self) -> float:
        """The part of `adapter` that is in a block's experts."""
        return self.experts.number * expert_adapter(self.job) / self.job.parallelism.tp if self.experts else 0.0

    @cached_property
    def learned(self) -> float:
        """The fraction of a block's parameters that have gradients."""
        return self.adapter / self.block if self.adapter else 1.0

    def trained(self, stages: list[int]) -> float:
        """Return the number of trained parameters of some stages on a tensor-parallel rank."""
        if not self.adapter:
            return sum(map(self.parameters, stages))
        return sum(self.layers[stage] * self.adapter - self.dense[stage] * self.expert_adapters for stage in stages)

    @cached_property
    def sizes(self) -> list[float]:
        """For each matmul of a block on this rank, input width times output width: half of the matmul's FLOPs per
        token. The matmuls are in the order of computation.
        """
        experts = self.experts
        routed = (
            [experts.number * experts.dim / experts.sequence, *[experts.rows * experts.dim * experts.width] * 3]
            if experts
            else []
        )
        sizes = [linear.size(self.job.parallelism.tp) for linear in self.linears]
        return [*sizes[: self.after], *routed, *sizes[self.after :]]

    @cached_property
    def kept(self) -> list[bool]:
        """For each matmul of `sizes`, whether selective activation checkpointing keeps its output, so that it is not
        computed again.
        """
        linears = saves(self.job, *(("aten._scaled_mm",) if self.fast_linears else ("aten.mm", "aten.addmm")))
        routed = [linears, *[saves(self.job, "titan_hydra.grouped_matmul")] * 3] if self.experts else []
        listed = [*[linears] * self.after, *routed, *[linears] * (len(self.linears) - self.after)]
        every, rest = mode_of(self.job).matmuls, len(self.linears) - self.after
        parts = [self.after, 1, 3, rest] if self.in_parts else [len(listed)]
        indices = [index for part in parts for index in range(part)]
        kept = [is_saved and index % every == 0 for index, is_saved in zip(indices, listed, strict=True)]
        if self.received or self.in_parts:
            kept[self.after + 3] = True
        if self.in_parts:  # the result of a part is not computed again
            kept[self.after - 1] = True
            kept[-1] = True if rest else kept[-1]
        return kept

    @property
    def in_parts(self) -> bool:
        """Whether selective activation checkpointing treats each compiled part of a block with experts separately."""
        apart = self.compiled and not self.whole_blocks
        return self.experts is not None and apart and mode_of(self.job).contexts is not None

    @property
    def received(self) -> bool:
        """Whether selective activation checkpointing keeps the rows that other ranks have computed, instead of the output
        of the experts' last matmul, which it then does not compute again either.
        """
        return self.experts is not None and self.experts.ep > 1 and saves(self.job, EXCHANGE)

    @cached_property
    def after(self) -> int:
        """The number of a block's linears that come before its feed-forward."""
        return 1 + [linear.column for linear in self.linears].index(False)

    def outputs(self, rows: int) -> list[float]:
        """Return the elements per token in the outputs of a block's matmuls on this rank, in the order of computation.
        Outputs of row-parallel linears are split over `rows` ranks.
        """
        widths = [
            linear.tokens * linear.share("outputs", self.job.parallelism.tp) / (1 if linear.column else rows)
            for linear in self.linears
        ]
        return [*widths[: self.after], *(self.experts.outputs if self.experts else ()), *widths[self.after :]]


def shape_of(job: Job) -> Shape:
    """Return the shape of a frozen job: that of its decoder or, if it has none, that of its last stack of blocks.
    Raises NotPredictable if the model's family lacks formulas.
    """
    family = family_of(job.model)
    stacks = family.stacks(job) if family.stacks else ()
    if family.parameters is None or (family.flops is None and not stacks):
        lacks = "parameters" if family.parameters is None else "flops"
        raise NotPredictable(
            f"model.family={job.model.family}: has no formula for its {lacks} (Family({lacks}=...)), so nothing can be predicted"
        )
    if stacks and not family.linears(job.model):
        return _of_stacks(job, stacks)
    if family.takes != "tokens" and not stacks:
        raise NotPredictable(
            f"model.family={job.model.family}: takes {family.takes}, and predictions know models of tokens alone"
        )
    return _of_decoder(job, stacks)


def _of_decoder(job: Job, stacks: tuple[Stack, ...]) -> Shape:
    """Return the shape of a decoder, and of the towers before it."""
    family, degrees, model = family_of(job.model), job.parallelism, job.model
    linears, experts = family.linears(model), experts_of(job)
    towers = sum(stack.depth * stack.parameters for stack in stacks)
    ends = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    table = model.vocab_size * model.dim / degrees.tp
    pp = degrees.pp > 1
    number = model.n_layers + model.predictions - 1
    layers = _layers(job) if pp else (number,)
    less, dense = (lighter(job), experts.dense) if experts else (0, 0)
    # as if each block had experts; a rank's share follows below
    block = (family.parameters(model) - towers - ends + dense * less) / number
    # what tensor parallelism does not split
    whole = sum(stack.inputs * stack.outputs for stack in linears if stack.whole) + (
        experts.number * model.dim if experts else 0
    )
    block = (block - whole) / degrees.tp + whole
    samples, shards = microbatch_size(job), degrees.dp_shard * degrees.cp
    shape = Shape(
        job=job,
        linears=linears,
        block=block,
        dense=_dense(layers, dense),
        lighter=less / degrees.tp,
        embedding=table,
        head=0 if model.tie_embeddings else table,
        layers=layers,
        stages=stages_of_ranks(job) if pp else [[0]],
        microbatches=microbatches(job),
        samples=samples,
        tokens=samples * job.data.seq_len / degrees.cp,
        rounds=local_batches(job),
        shards=shards,
        wrapped=shards * degrees.dp_replicate * (degrees.tp if experts else 1) > 1,
        experts=experts,
    )
    return replace(shape, before=tuple(_of_tower(shape, stack) for stack in stacks))


def _of_tower(shape: Shape, stack: Stack) -> Shape:
    """Return the shape of a tower's blocks. A tower runs in eager mode without activation checkpointing, and each rank
    computes whole samples.
    """
    job = copy.copy(shape.job)
    for section, values in (
        ("model", stack.tower),
        ("data", {"seq_len": stack.tokens}),
        ("ac", {"name": "none"}),
        ("compile", {"name": "off"}),
        ("parallelism", {"tp": 1, "cp": 1}),
    ):
        setattr(job, section, copy.copy(getattr(job, section)))
        vars(getattr(job, section)).update(values)
    return replace(_of_stack(shape, stack), job=job, tokens=shape.samples * stack.tokens)


def _of_stack(shape: Shape, stack: Stack) -> Shape:
    """Return the shape of the blocks of a stack; the sizes of batches and shards are those of `shape`."""
    return replace(
        shape,
        linears=stack.linears,
        block=stack.parameters,
        layers=(stack.depth,),
        dense=(0,),
        embedding=0,
        head=0,
        experts=None,
        stack=stack,
    )


def _of_stacks(job: Job, stacks: tuple[Stack, ...]) -> Shape:
    """Return the shape of the last stack of a model without a decoder. Parameters outside the blocks count as an
    embedding, except those that modulate the output, which count as a head.
    """
    family, degrees, samples = family_of(job.model), job.parallelism, microbatch_size(job)
    shards = degrees.dp_shard * degrees.cp
    around = family.parameters(job.model) - sum(stack.depth * stack.parameters for stack in stacks)
    last = min(2 * job.model.dim**2, around)  # parameters of the output's modulation, which are counted as a head
    shape = Shape(
        job=job,
        linears=(),
        block=0,
        dense=(0,),
        lighter=0,
        embedding=around - last,
        head=last,
        layers=(0,),
        stages=[[0]],
        microbatches=1,
        samples=samples,
        tokens=samples * job.data.seq_len / degrees.cp,
        rounds=local_batches(job),
        shards=shards,
        wrapped=shards * degrees.dp_replicate > 1,
        experts=None,
    )
    *first, end = (_of_stack(shape, stack) for stack in stacks if stack.depth)
    return replace(end, embedding=shape.embedding, head=last, before=tuple(first))


def _dense(layers: tuple[int, ...], dense: int) -> tuple[int, ...]:
    """Return for each stage how many of its blocks belong to the model's first `dense` blocks."""
    ends = accumulate(layers)
    return tuple(min(max(dense - end + size, 0), size) for size, end in zip(layers, ends, strict=True))


def _layers(job: Job) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    if job.pp_schedule.split:
        return tuple(sum("." in name for name in names) for names in modules_of_stages(job))
    return tuple(blocks_of_stages(job))
