"""Reduce a job to a size that a few CPU ranks can train, and keep every technique of its layout. Imports no torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.batches import local_batches, microbatch_size
from titan_hydra.core.job.config import Job, from_dict, identity, to_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.load import picked_anew
from titan_hydra.core.job.config.operation import (
    Checkpoint,
    Debug,
    Hardware,
    Launch,
    Metrics,
    Profiling,
    Sweep,
    Validation,
)
from titan_hydra.core.job.config.parts import HubSource
from titan_hydra.core.job.config.registry import DATA_SOURCES, PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import (
    ActivationCheckpoint,
    Compile,
    Loss,
    Parallelism,
    PipelineSchedule,
    Precision,
    Tokenizer,
)
from titan_hydra.core.job.dtypes import has_one_scale
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.pipeline import stage_count
from titan_hydra.core.job.ranks import DEGREES, data_parallel, world_size
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run.records import flat

from .case import BF16, EIGHT_BITS, EXACT, SAMPLES, Case

AT_ONCE = 3  # maximum number of degrees above 1 in one reduced job: three degrees of two make eight ranks
STEPS_OF_PROOF = 6
# The upper limit of each size of a reduced model. The number of heads follows from the degrees (`_small_model`).
SIZES = {
    "dim": 64,
    "vocab_size": 512,
    "n_experts": 8,
    "experts_per_token": 2,
    "expert_dim": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
RATES = {"adamw": 2e-3, "muon": 2e-3, "sgd": 0.05}  # learning rates with which a few steps move the weights
# Keys that `reduced_keys` leaves out, as they change neither what is computed nor how.
BESIDE = (
    "name",
    "notes",
    "checkpoint.",
    "cluster.",
    "hardware.",
    "launch.",
    "sweep.",
    "paths.",
    "metrics.",
    "validation.",
    "profiling.",
)
# With one Float8 scale for a whole tensor, all rounded weights differ as soon as the largest element differs.
ONE_SCALE = {"loss": 1e-4, "norm": 5e-4, "gradients": 0.25, "weights": 0.5}


@dataclass(frozen=True)
class JobPair:
    """A reduced job in one number format, the same training in one process, and the case that bounds their difference."""

    case: Case
    job: Job
    alone: Job


def reduced(job: Job, most: int) -> list[Job]:
    """Return the job reduced to at most `most` ranks or, if its techniques need more, to eight. A job with more than
    three degrees above 1 becomes several jobs, one for each combination of three of these degrees. Raises ConfigError
    for a job that has no reduced form.
    """
    if job.objective.name != "language":
        reason = "one process and several are compared for language alone; titan verify has cases of this objective"
        raise bad_value("objective", job.objective.name, reason, "language")
    if job.fault_tolerance.name != "off":
        reason = "replica groups that come and go do not learn what one process learns"
        raise bad_value("fault_tolerance", job.fault_tolerance.name, reason, "off")
    jobs = [_reduced_to(job, degrees) for degrees in _degrees(job, most)]
    for small in jobs:
        if faults := check(small):
            raise ConfigError("\n".join(f"the job at a reduced size breaks a rule: {fault}" for fault in faults))
    return jobs


def _degrees(job: Job, most: int) -> Iterator[dict[str, int]]:
    """Yield the degrees of each reduced job."""
    # a schedule that is read from a file needs the number of pipeline ranks for which the file was written
    written = PIPELINE_SCHEDULES[job.pp_schedule.name].from_file
    degrees_of_job = {name: degree for name in DEGREES if (degree := getattr(job.parallelism, name)) > 1}
    for names in itertools.combinations(degrees_of_job, min(len(degrees_of_job), AT_ONCE)):
        degrees = {name: degrees_of_job[name] for name in names}
        while math.prod(degrees.values()) > max(most, 2 ** len(degrees)):
            name = max((name for name in names if not (written and name == "pp")), key=degrees.get, default=None)
            if name is None or degrees[name] == 2:
                raise bad_value(
                    "pp_schedule",
                    job.pp_schedule.name,
                    f"its file is for {degrees['pp']} pipeline ranks, which are too many",
                )
            degrees[name] = degrees[name] // 2 if degrees[name] % 2 == 0 else 2
        yield degrees


def _reduced_to(job: Job, degrees: dict[str, int]) -> Job:
    """Return the job with these degrees, a small model, a small batch of synthetic tokens, and no tasks beside
    training.
    """
    small = copy.deepcopy(job)
    layout, several = small.parallelism, local_batches(job) > 1
    for name in DEGREES:
        setattr(layout, name, degrees.get(name, 1))
    layout.ep, layout.async_tp = _experts(job, layout), False
    small.gpus = world_size(small)
    _small_pipeline(job, small)
    _small_model(job, small)
    small.data = picked_anew(small.data, "synthetic")
    small.data.seq_len = 64 if layout.cp > 1 else 32
    small.data.document_mask = False  # the case has its own documents instead (Case.documents)
    small.data.mixture, small.data.shuffle_buffer, small.data.samples = {}, 0, None
    parallel = data_parallel(small) * (2 if several else 1)
    if layout.pp == 1:
        small.data.local_batch = max(min(job.data.local_batch, 2), SAMPLES // parallel)
    small.data.global_batch = small.data.local_batch * parallel
    small.tokenizer = Tokenizer()
    small.lr_scheduler.warmup_steps = min(job.lr_scheduler.warmup_steps, 2)
    small.optimizer.lr = RATES.get(job.optimizer.name, job.optimizer.lr)
    if job.compile.name != "off":
        small.compile.backend = "aot_eager"
        # compiled code rounds an emulated format at other places
        small.precision = _without_format(small.precision)
    elif job.precision.converter:
        small.precision.emulate = True
    small.steps, small.notes = STEPS_OF_PROOF, ""
    return freeze(_beside_training(small))


def _without_format(precision: Precision) -> Precision:
    """Return a precision section with the same dtypes, but without a number format for linears."""
    plain: Precision = picked_anew(precision, None)
    plain.emulate = False
    return plain


def _experts(job: Job, layout: Parallelism) -> int:
    """Return the reduced expert-parallel degree. If the job's degree is dp_shard x cp x tp, so is the reduced degree;
    else it is two.
    """
    inside = {name: getattr(job.parallelism, name) for name in ("dp_shard", "cp", "tp")}
    ranks = layout.dp_shard * layout.cp * layout.tp
    return min(ranks, ranks if job.parallelism.ep == math.prod(inside.values()) else 2) if job.parallelism.ep > 1 else 1


def _small_pipeline(job: Job, small: Job) -> None:
    """Keep the schedule and the number of stages per rank. The number of microbatches becomes the number of pipeline
    ranks, or twice this number if the job has at least two microbatches per pipeline rank; it is never below the number
    of stages.
    """
    if small.parallelism.pp == 1:
        small.pp_schedule = from_dict(PipelineSchedule, {"name": "1f1b"})
        return
    if PIPELINE_SCHEDULES[job.pp_schedule.name].from_file:
        small.data.local_batch = job.pp_schedule.microbatches or job.data.local_batch
        return
    small.pp_schedule.layers_per_stage, small.pp_schedule.split = None, []
    stages = stage_count(small)
    rounds = max(1, min(2, (job.pp_schedule.microbatches or stages) // job.parallelism.pp))
    small.pp_schedule.microbatches = job.pp_schedule.microbatches and max(rounds * small.parallelism.pp, stages)
    small.data.local_batch = small.pp_schedule.microbatches or 2 * stages


def _small_model(job: Job, small: Job) -> None:
    """Reduce the model's sizes and keep its features: grouped queries, experts, latents, an odd vocabulary."""
    model, layout = small.model, small.parallelism
    for name, size in SIZES.items():
        if getattr(model, name, 0):
            setattr(model, name, min(getattr(model, name), size))
    grouped = job.model.n_heads > job.model.n_kv_heads
    keys = job.model.n_kv_heads if job.model.n_kv_heads < 4 else max(4, layout.tp * layout.cp)
    model.n_heads, model.n_kv_heads = max(4, layout.tp * layout.cp) * (2 if grouped else 1), keys
    if grouped and keys < 4:
        model.n_heads = 8
    model.head_dim = 16 if job.model.head_dim else None
    model.ffn_dim = 192
    model.n_layers = max(stage_count(small) if layout.pp > 1 else 2, getattr(model, "first_k_dense_replace", 0) + 1)
    model.vocab_size -= 1 if job.model.vocab_size % job.parallelism.tp else 0
    model.attention = "auto"
    model.reduce()


def _beside_training(small: Job) -> Job:
    """Return the job for training on local ranks, without any other task: all keys that do not change the result have
    their defaults.
    """
    small.validation, small.profiling, small.launch, small.sweep = Validation(), Profiling(), Launch(), Sweep()
    small.metrics, small.hardware = from_dict(Metrics, {"name": "console", "trackers": [], "log_every": 1}), Hardware()
    saving = "sync" if small.checkpoint.name == "off" else small.checkpoint.name
    small.checkpoint = Checkpoint(saving, interval=0, keep_latest_k=0)
    small.debug = Debug(deterministic=small.debug.deterministic, balance_experts=small.debug.balance_experts)
    small.cluster = picked_anew(small.cluster, "local")
    small.cluster.name, small.cluster.time_minutes, small.cluster.max_parallel = "local", None, 0
    small.cluster.gpus_per_node, small.cluster.device_memory_gib = None, None
    small.comm.name, small.comm.rank = "default", 0
    return small


def job_pairs(job: Job, small: Job, name: str) -> Iterator[JobPair]:
    """Yield a reduced job's pairs: one in float32, with narrow bounds; one in bfloat16 if the job computes in bfloat16;
    one in the number format of its linears, with everything outside the linears in float32, as one additional rounding
    before the linears would change 8-bit values. Of a family with a float64 reference of its own, the matrix has no case:
    one process is compared with that reference, too.
    """
    foreign = family_of(small.model).exact is not None  # its blocks are not known: they may have experts
    sparse, muon = small.model.sparse or foreign, small.optimizer.name == "muon"
    loose = {"loss": 1e-4, "norm": 1e-4, "weights": 0.5, "routing": False} if muon else {}
    # AdamW moves a bias of keys that is not rotated (glm4), although its gradient is nothing but rounding
    exact = {"gradients": 5e-5 if sparse else 1e-5} | ({"weights": 2e-2} if foreign else {}) | loose
    plain = copy.deepcopy(small)
    plain.precision = from_dict(Precision, {"name": "fp32", "compute_dtype": "float32", "param_dtype": "float32"})
    plain.optimizer.masters = "whole"
    variants: list[tuple[str, Job, dict[str, Any]]] = [("float32", plain, exact)]
    if small.precision.compute_dtype != "float32":
        half = copy.deepcopy(small)
        half.precision = _without_format(small.precision)
        # From the second step on, a token near the border between two experts may choose the other one: with gpt-oss, that
        # moves the norm by 1.4e-2 in five of sixteen runs, on fsdp 2 as on cp 2, and turns the update of one bias of four.
        # On tp 2, at 0.4 of the measured band: 9.3e-4 of the loss, and 0.3 of the gradient of a router's bias of gpt-oss.
        coarse = BF16 | {
            "loss": 2e-3 if foreign else BF16["loss"],
            "norm": 5e-2 if foreign else 2e-3,
            "gradients": 0.5 if foreign else 0.2 if sparse else 2e-2,
            "weights": 0.7 if foreign else 0.5 if muon else 0.3,
            "routing": not sparse,
        }
        variants.append(("bfloat16", half, coarse))
    if job.precision.converter:
        format = copy.deepcopy(small)
        format.precision, format.compile = copy.deepcopy(job.precision), Compile()
        format.precision.emulate, format.precision.compute_dtype = True, "float32"
        format.optimizer.masters = "whole"
        variants.append((job.precision.converter, format, _bounds_of_format(job, foreign) | {"routing": not sparse}))
    for kind, variant, bounds in variants:
        reference, microbatch = alone(variant), None
        if variant.precision.converter and variant.parallelism.cp == 1:
            reference.data.local_batch = microbatch = microbatch_size(variant)
        if kind == "bfloat16":
            reference.loss = variant.loss  # one process uses the same loss: a loss in chunks rounds in other places
        options: dict[str, Any] = bounds | {"base": (identity(reference),), "documents": job.data.document_mask}
        case = Case(f"{name}, {kind}", world_size(variant), (), uneven_mask=True, microbatch=microbatch, **options)
        yield JobPair(case, variant, reference)
    if foreign:
        yield _against_float64(alone(plain), job.data.document_mask, loose)


def _bounds_of_format(job: Job, foreign: bool) -> dict[str, Any]:
    """Return the bounds of a job in its number format. With one scale for a tensor, last bits move a scale under tp; under
    cp, it follows from a rank's part of a sequence, which no process alone has.
    """
    if not has_one_scale(job) or job.parallelism.tp * job.parallelism.cp == 1:
        return EIGHT_BITS
    # gemma3: on tp 2, a third of the measured band, 5.6e-4 of the loss, 1.2e-2 of the norm; on cp 2, 0.66 of a weight
    return ONE_SCALE | ({"loss": 2e-3, "norm": 5e-2, "gradients": 0.5, "weights": 0.8} if foreign else {})


def _against_float64(one_process: Job, documents: bool, loose: dict[str, Any]) -> JobPair:
    """Return the pair of a job in one process and the float64 reference. Two steps are compared, as later ones amplify
    rounding: with other last bits and another order of sums, the norm of glm4 moves by 5e-5 in the second step and by
    2.5e-3 in the fifth.
    """
    one_process.steps = 2
    bounds = EXACT | {"loss": 5e-6, "norm": 1e-4, "weights": 2e-2} | loose
    case = Case(
        "one process, float64", 1, (), (identity(one_process),), uneven_mask=True, documents=documents, **bounds
    )
    return JobPair(case, one_process, one_process)


def alone(job: Job) -> Job:
    """Return the same training in one process, with the global batch as one local batch and no technique."""
    single = copy.deepcopy(job)
    single.parallelism = from_dict(Parallelism, {"name": "single", "cp_rotate": "allgather"})
    single.pp_schedule = from_dict(PipelineSchedule, {"name": "1f1b"})
    single.ac, single.compile, single.loss = from_dict(ActivationCheckpoint, {"name": "none"}), Compile(), Loss()
    single.gpus, single.data.local_batch = 1, job.data.global_batch
    if hasattr(single.precision, "float8_all_gather"):
        single.precision.float8_all_gather = False
    return freeze(single)


def with_own_data(job: Job, small: Job) -> tuple[Job, str]:
    """Return the reduced job with the job's own source of data, and "". For a source on the network, return the reduced
    job as it is, and the reason.
    """
    sources = [job.data.name, *(part.name for part in job.data.mixture.values())]
    if hub := [name for name in sources if (kind := DATA_SOURCES.get(name)) and kind.config is HubSource]:
        return small, f"data={hub[0]} is on the network; synthetic tokens stand for it"
    combined = copy.deepcopy(small)
    combined.data = copy.deepcopy(job.data)
    combined.data.samples = None  # these are of the job's own length and batch
    combined.data.seq_len, combined.data.local_batch, combined.data.global_batch = (
        min(job.data.seq_len, 256),
        small.data.local_batch,
        small.data.global_batch,
    )
    combined.model.vocab_size, combined.tokenizer = job.model.vocab_size, job.tokenizer
    return combined, ""


def reduced_keys(job: Job, small: Job) -> dict[str, list[Any]]:
    """Return the dotted keys that the reduction has changed, each with its value before and after."""
    before, after = _leaves(job), _leaves(small)
    return {key: [before.get(key), after.get(key)] for key in {**before, **after} if before.get(key) != after.get(key)}


def _leaves(job: Job) -> dict[str, Any]:
    return {key: value for key, value in flat(to_dict(job)).items() if not key.startswith(BESIDE)}
