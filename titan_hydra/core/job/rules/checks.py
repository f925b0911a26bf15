"""The rules that a cell must satisfy before it may reach a device: one small function each, with its reason.

A rule examines a job that `freeze` has filled in, and yields a `Fault` for each violation. `check` stops after the
first group of rules with faults, because the rules of later groups rely on what the earlier ones have established.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm

from titan_hydra.core.base import redact
from titan_hydra.core.job.batches import samples_at_once
from titan_hydra.core.job.config import user_code
from titan_hydra.core.job.config.attention import call_of, kernel_fault
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, counted, divisors, fault_at, multiples_around, required
from titan_hydra.core.job.config.load import to_dict, values_are_what_the_schema_takes
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import splits_backward
from titan_hydra.core.job.ranks import DEGREES, data_parallel, has_ring, rotation, world_size
from titan_hydra.core.job.recomputation import mode_of

from . import (
    adapter,
    checkpoint,
    cluster,
    compile,
    data,
    experts,
    memory,
    objective,
    optimizer,
    parametrization,
    pipeline,
    precision,
    replicas,
)

Rule = Callable[[Job], Iterator[Fault]]
KEYS: list[Rule] = [values_are_what_the_schema_takes]
RANKS: list[Rule] = []  # the degrees; the batch and other values follow from them
VALUES: list[Rule] = []  # keys whose values must satisfy more than a range
LAYOUT: list[Rule] = []  # whether degrees, model and batch fit together
RECIPE: list[Rule] = []  # whether techniques can be combined
PLACE: list[Rule] = []  # the machine and its files
FILES: list[Rule] = [*data.PLACE]  # of the place, the files of data
INPUT: list[Rule] = [*objective.VALUES]  # of the values, whether the model takes what the objective gives it
PASS: list[Rule] = [data.one_pass_is_counted]  # what only the whole data can tell


def check(job: Job, groups: Sequence[list[Rule]] = (KEYS, RANKS, VALUES, LAYOUT, RECIPE, PLACE, PASS)) -> list[Fault]:
    """Apply groups of rules to a filled-in job, one after another, and return the faults of the first group that finds
    any. A fault's code is its rule's name.
    """
    for group in groups:
        faults = [replace(fault, code=rule.__name__) for rule in group for fault in rule(job)]
        if faults:
            return faults
    return []


def rule(group: list[Rule]) -> Callable[[Rule], Rule]:
    """Add the decorated rule to a group."""

    def add(function: Rule) -> Rule:
        group.append(function)
        return function

    return add


# --- the degrees ------------------------------------------------------------------------------------------------------


@rule(RANKS)
def degrees_fill_the_ranks(job: Job) -> Iterator[Fault]:
    """The product of the degrees is the number of ranks, as each rank has one place in the mesh. One degree may be -1;
    it becomes the number of ranks divided by the other degrees.
    """
    free = [name for name in ("dp_replicate", "dp_shard") if getattr(job.parallelism, name) == -1]
    if len(free) == 2:
        yield Fault("parallelism.dp_replicate", -1, "only one degree can take what the others leave, and dp_shard does")
    elif free:
        fixed = -world_size(job)
        yield fault_at(
            job,
            "gpus",
            f"cannot be divided by {fixed}, the product of the other degrees",
            *multiples_around(job.gpus, fixed),
        )
    elif world_size(job) != job.gpus:
        product = " x ".join(
            f"{name} {getattr(job.parallelism, name)}" for name in DEGREES if getattr(job.parallelism, name) > 1
        )
        ranks = world_size(job)
        yield fault_at(job, "gpus", f"the degrees need {counted(ranks, 'rank')} ({product or 'all are 1'})", ranks)


# --- keys with conditions beyond their range --------------------------------------------------------------------------

VALUES.extend(data.VALUES)


@rule(VALUES)
def secrets_stay_out(job: Job) -> Iterator[Fault]:
    """The configuration holds no secret, because every run directory and report shows the configuration. Ranks get
    secrets from the launcher's environment, which they inherit.
    """
    # a copy of the environment, made once for all texts
    for key, secret in redact.secrets_in(to_dict(job), dict(os.environ)):
        yield Fault(
            key,
            "...",
            f"{secret}, and would be written to the run directory; export it in the shell that runs launch.py, or "
            "`source` a file in cluster.setup",
        )


VALUES.extend(objective.VALUES)
VALUES.append(experts.dense_models_have_no_expert_ranks)


@rule(VALUES)
def user_modules_are_those_of_the_run(job: Job) -> Iterator[Fault]:
    """The sources of the user's modules are part of the experiment: a run never continues with edited modules."""
    if fault := user_code.edited_sources(job.train):
        yield fault


@rule(VALUES)
def cells_belong_to_a_sweep(job: Job) -> Iterator[Fault]:
    """The names of a cell and of a baseline are for the report of a sweep; a run outside a sweep must not set them."""
    for key in ("cell", "baseline"):
        if job.sweep.name is None and (value := getattr(job.sweep, key)) is not None:
            yield Fault(f"sweep.{key}", value, "this run belongs to no sweep; -m and +sweeps=NAME make one")


@rule(VALUES)
def family_takes_its_own_keys(job: Job) -> Iterator[Fault]:
    """A family has rules for its own keys, beside their ranges, and for what it can be combined with."""
    yield from job.model.faults()
    yield from family_of(job.model).faults(job)


VALUES.append(compile.compiler_is_one_that_torch_knows)
VALUES.append(checkpoint.checkpoints_are_due_at_times_that_come)
VALUES.extend(cluster.RULES)


# --- degrees, model and batch against each other ----------------------------------------------------------------------


@rule(LAYOUT)
def family_can_be_split_over_tensor_ranks(job: Job) -> Iterator[Fault]:
    """Tensor parallelism needs a plan for the family's modules, which only the family can give."""
    if job.parallelism.tp > 1 and family_of(job.model).sharding is None:
        yield fault_at(job, "parallelism.tp", f"family {job.model.family} has no tensor-parallel sharding", 1)


@rule(LAYOUT)
def family_can_be_cut_into_stages(job: Job) -> Iterator[Fault]:
    """A stage of a pipeline passes only one tensor to the next, so blocks with two outputs cannot be split into stages."""
    if job.parallelism.pp > 1 and not family_of(job.model).pipeline:
        yield fault_at(job, "parallelism.pp", f"family {job.model.family} cannot be cut into stages", 1)


@rule(LAYOUT)
def heads_divide_over_tensor_ranks(job: Job) -> Iterator[Fault]:
    """Each tensor-parallel rank holds whole query heads and whole key/value heads (Megatron-LM, section 3)."""
    tp, model = job.parallelism.tp, job.model
    if model.n_heads % tp or model.n_kv_heads % tp:
        heads = counted(model.n_kv_heads, "key/value head") if model.n_kv_heads % tp else counted(model.n_heads, "head")
        legal = tuple(degree for degree in divisors(model.n_kv_heads) if model.n_heads % degree == 0)
        yield Fault("parallelism.tp", tp, f"{heads} cannot be split over it", legal=legal)


@rule(LAYOUT)
def feed_forward_divides_over_tensor_ranks(job: Job) -> Iterator[Fault]:
    """Each TP rank holds a column slice of w1/w3 and the matching row slice of w2. These are local tensors, and must have
    the same size on all ranks.
    """
    width, tp = job.model.ffn_width, job.parallelism.tp
    if width % tp:
        yield Fault(
            "model.ffn_dim",
            width,
            f"a feed-forward of this width cannot be split over parallelism.tp={tp}",
            legal=multiples_around(width, tp),
        )


@rule(LAYOUT)
def heads_share_key_value_heads_evenly(job: Job) -> Iterator[Fault]:
    """Grouped-query attention gives each key/value head the same number of query heads, and heads share the width
    evenly.
    """
    model = job.model
    if model.n_heads % model.n_kv_heads:
        yield fault_at(
            job,
            "model.n_kv_heads",
            f"{counted(model.n_heads, 'head')} cannot share it evenly",
            *divisors(model.n_heads),
        )
    if model.head_dim and model.head_dim % 2:
        yield fault_at(
            job, "model.head_dim", "must be even (RoPE rotates pairs)", model.head_dim - 1, model.head_dim + 1
        )
    elif not model.head_dim and (model.dim % model.n_heads or model.dim // model.n_heads % 2):
        legal = tuple(heads for heads in divisors(model.dim) if model.dim // heads % 2 == 0)
        yield fault_at(
            job,
            "model.n_heads",
            f"width {model.dim} must split into heads of an even width (RoPE rotates pairs)",
            *legal,
        )


@rule(LAYOUT)
def sequence_divides_over_its_ranks(job: Job) -> Iterator[Fault]:
    """Context parallelism cuts a sequence into cp parts, each of two chunks if the ring is balanced. Sequence
    parallelism cuts each of these parts into tp parts.
    """
    seq_len, cp, tp = job.data.seq_len, job.parallelism.cp, job.parallelism.tp
    parts = lcm(job.parallelism.sequence_parts, cp * (tp if job.parallelism.sequence_parallel else 1))
    if seq_len % parts:
        yield Fault(
            "data.seq_len",
            seq_len,
            f"cannot be cut into {parts} parts (cp {cp}, tp {tp})",
            legal=multiples_around(seq_len, parts),
        )
    if seq_len > job.model.max_seq_len:
        yield Fault(
            "data.seq_len",
            seq_len,
            f"longer than model.max_seq_len {job.model.max_seq_len}",
            legal=(job.model.max_seq_len,),
        )


LAYOUT.extend([pipeline.pipeline_is_laid_out, *experts.LAYOUT])


@rule(LAYOUT)
def heads_divide_over_ulysses_ranks(job: Job) -> Iterator[Fault]:
    """With some rotations (Ulysses), a tensor-parallel rank's heads are distributed, as whole heads, over
    context-parallel ranks.
    """
    cp, tp, model = job.parallelism.cp, job.parallelism.tp, job.model
    if not rotation(job).splits_heads or model.n_heads % tp or model.n_kv_heads % tp:
        return
    if model.n_heads // tp % cp or model.n_kv_heads // tp % cp:
        legal = tuple(degree for degree in divisors(model.n_kv_heads // tp) if model.n_heads // tp % degree == 0)
        yield Fault(
            "parallelism.cp",
            cp,
            f"{job.parallelism.cp_rotate} gives each of cp x tp = {cp * tp} ranks whole heads, but there are {model.n_heads} and "
            f"{model.n_kv_heads} for keys and values; allgather and alltoall have no such limit",
            legal=legal,
        )


@rule(LAYOUT)
def global_batch_is_whole_local_batches(job: Job) -> Iterator[Fault]:
    """global batch = local batch x data-parallel ranks (of all replica groups) x accumulation steps."""
    ranks = data_parallel(job) * job.fault_tolerance.replicas
    batch, local, once = job.data.global_batch, job.data.local_batch, samples_at_once(job)
    if once > 0 and batch % once:
        smaller = [samples for samples in divisors(batch // ranks) if samples < local] if batch % ranks == 0 else []
        hint = f"; it is one with data.local_batch={smaller[-1]}" if smaller and job.parallelism.pp == 1 else ""
        reason = f"not a multiple of {once} (local_batch {local} x {ranks} data-parallel ranks){hint}"
        yield Fault("data.global_batch", batch, reason, legal=multiples_around(batch, once))


# --- techniques against each other ------------------------------------------------------------------------------------


@rule(RECIPE)
def ring_attention_is_causal_and_fused(job: Job) -> Iterator[Fault]:
    """The ring merges the results of fused kernels, and supports no mask of documents. Ulysses can run any attention, as
    it has whole sequences.
    """
    if not has_ring(job):
        return
    ring = f"the ring of cp_rotate={job.parallelism.cp_rotate}"
    if job.data.document_mask:
        yield fault_at(
            job, "data.document_mask", f"{ring} cannot mask documents, parallelism.cp_rotate=ulysses can", False
        )
    if mode_of(job).budget:
        yield fault_at(job, "ac.name", f"the compiler cannot estimate the memory of {ring}", "op", "lean")


@rule(RECIPE)
def attention_kernel_computes_the_job(job: Job) -> Iterator[Fault]:
    """The kernel that the job names can compute this attention on a CPU or on a GPU. Checks that depend on the GPU are
    made by the ranks.
    """
    if fault := kernel_fault(job.model.attention, *(call_of(job, device) for device in ("cpu", "cuda"))):
        yield fault


@rule(RECIPE)
def zero_bubble_schedules_keep_parameters_gathered(job: Job) -> Iterator[Fault]:
    """Zero-bubble schedules split the backward in two. With a split backward, and with parameters that are resharded
    after the forward, torch computes wrong gradients without an error.
    """
    if job.parallelism.pp == 1 or not splits_backward(job):
        return
    if job.parallelism.reshard_after_forward == "always":
        yield Fault(
            "parallelism.reshard_after_forward",
            "always",
            f"{job.pp_schedule.name} would compute wrong gradients",
            legal=("never",),
        )
    name = job.pp_schedule.name
    each = "torch would recompute a block for each of its weights"  # 2.13, ac=full: 11 times, ten held at once
    yield from required(
        job,
        ("ac.name", "none", f"{name} computes weight gradients separately, and {each}"),
        ("compile.name", "off", f"{name} splits the backward, which compiled blocks refuse"),
    )


RECIPE.extend(objective.RULES + precision.RULES + adapter.RULES + replicas.RULES + experts.RECIPE + compile.RECIPE)
RECIPE.extend([*parametrization.RULES, *optimizer.RULES, pipeline.old_torch_splits_only_plain_backwards])


@rule(RECIPE)
def simple_fsdp_has_no_resharding(job: Job) -> Iterator[Fault]:
    """SimpleFSDP keeps gathered parameters until the backward. Only with ac=full are they freed and gathered again."""
    if job.parallelism.backend == "simple_fsdp" and job.parallelism.reshard_after_forward != "default":
        yield fault_at(
            job,
            "parallelism.reshard_after_forward",
            "simple_fsdp keeps what it gathers until the backward; ac=full frees it",
            "default",
        )


@rule(RECIPE)
def recorded_steps_are_made(job: Job) -> Iterator[Fault]:
    """The first profiled step is a step of the run; otherwise the run would end without a trace."""
    if job.profiling.name == "on" and job.profiling.first_step > job.steps:
        yield fault_at(job, "profiling.first_step", f"the run has {counted(job.steps, 'step')}", job.steps)


@rule(RECIPE)
def probes_see_modules(job: Job) -> Iterator[Fault]:
    """Probes hook modules. A compiled block has no modules at run time."""
    for key in [key for key in ("nan_hunt", "trace_activations") if getattr(job.debug, key)]:
        reason = f"debug.{key}=true hooks modules inside the blocks"
        if job.compile.name != "off":
            yield fault_at(job, "compile.name", reason, "off")


# --- the machine and its files ----------------------------------------------------------------------------------------


PLACE += [
    cluster.ranks_fit_the_cluster,
    memory.ranks_fit_the_memory,
    memory.cells_side_by_side_fit,
    *data.PLACE,
    checkpoint.initial_weights_are_there,
]


# --- what is legal, but probably a mistake ----------------------------------------------------------------------------


def warnings(job: Job) -> Iterator[Fault]:
    """Yield a warning for what is legal but probably a mistake in a job without faults. Warnings are printed before the
    start.
    """
    if job.lr_scheduler.warmup_steps > job.steps:
        yield fault_at(job, "lr_scheduler.warmup_steps", f"more than steps={job.steps}: optimizer.lr is never reached")
    yield from checkpoint.weights_fit_the_job(job)
    yield from data.corpus_fills_a_step(job)
    yield from data.sources_find_little_wrong(job)
    yield from cluster.executors_warn(job)
