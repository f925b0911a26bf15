"""The rules of number formats: what Float8 and MXFP8 need, and what they cannot be combined with."""

from collections.abc import Iterator
from math import ceil, gcd
from typing import Any

from titan_hydra.core.job.batches import microbatch_size
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at, multiples_around
from titan_hydra.core.job.config.registry import FORMATS, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import converts, has_one_scale, is_opaque
from titan_hydra.core.job.ranks import sparse


def format_suits_the_job(job: Job) -> Iterator[Fault]:
    """The format's own rules hold, and `emulate` is set only with a format."""
    format = FORMATS.get(job.precision.converter)
    if format is None and job.precision.emulate:
        yield fault_at(job, "precision.emulate", "there is no number format to emulate", False)
    if format and format.faults:
        yield from resolve(format.faults)(job)


def float8_faults(job: Job) -> Iterator[Fault]:
    """FSDP can gather Float8 weights that have a single scale, and only FSDP2 has hooks for this gather. This package's
    own kernels cast whole rows and whole columns of a weight, so tensor parallelism must not split it.
    """
    precision: Any = job.precision
    if precision.float8_all_gather:
        reason = (
            "only tensorwise Float8 weights can be gathered, as they have one scale"
            if not has_one_scale(job)
            else f"parallelism.backend={job.parallelism.backend} gathers plain weights"
            if job.parallelism.backend != "fsdp2"
            else _without_rows(job)
        )
        if reason:
            yield fault_at(job, "precision.float8_all_gather", reason, False)
    if precision.kernels == "torchao":
        return
    if job.debug.nan_hunt or job.debug.trace_activations:
        reason = "they compute several modules in one, and the probes of debug hook modules inside the blocks"
        yield fault_at(job, "precision.kernels", reason, "torchao")
    if precision.recipe != "rowwise":
        yield fault_at(job, "precision.kernels", "such kernels exist only for precision.recipe=rowwise", "torchao")
    elif job.parallelism.tp > 1:
        reason = f"they cast whole rows, which parallelism.tp={job.parallelism.tp} splits"
        yield fault_at(job, "precision.kernels", reason, "torchao")


def mxfp8_faults(job: Job) -> Iterator[Fault]:
    """A model whose experts are converted has experts, and the experts' width is in whole blocks of scales."""
    if not converts(job, "experts"):
        return
    if not job.model.sparse:
        yield fault_at(job, "precision.converts", f"{job.model.family} has no experts", "linears")
    elif (width := sparse(job).expert_dim) % (step := FORMATS["mxfp8"].step):
        reason = f"experts in mxfp8 need multiples of {step}"
        yield Fault("model.expert_dim", width, reason, legal=multiples_around(width, step))


def nvfp4_faults(job: Job) -> Iterator[Fault]:
    """The kernels multiply bfloat16 tensors alone."""
    if not job.precision.emulate and job.precision.compute_dtype != "bfloat16":
        yield fault_at(job, "precision.compute_dtype", "NVFP4 kernels cast from bfloat16", "bfloat16")


def _without_rows(job: Job) -> str | None:
    """Return a reason if a rank would have no row of a linear that is gathered in Float8. On CUDA, torch cannot compute
    the largest value of an empty tensor.
    """
    step, shards = FORMATS["float8"].step, job.parallelism.dp_shard * job.parallelism.cp
    skipped = [part for name in job.precision.skip if (part := name.rpartition(".")[2])]
    for linear in sorted(
        family_of(job.model).linears(job.model), key=lambda linear: linear.share("outputs", job.parallelism.tp)
    ):
        if linear.inputs % step or linear.outputs % step or any(part in linear.name for part in skipped):
            continue
        rows = int(linear.share("outputs", job.parallelism.tp))
        each = ceil(rows / shards)
        return (
            f"{shards} ranks share {rows} rows of {linear.name}, and some would have none"
            if each * (shards - 1) >= rows
            else None
        )
    return None


def widths_suit_the_format(job: Job) -> Iterator[Fault]:
    """The model's width is a multiple of the format's step. Linears of any other width would not be converted."""
    format, dim = FORMATS.get(job.precision.converter), job.model.dim
    if format and dim % format.step:
        reason = f"{format.name} linears need multiples of {format.step}"
        yield Fault("model.dim", dim, reason, legal=multiples_around(dim, format.step))


def tokens_suit_the_format(job: Job) -> Iterator[Fault]:
    """A weight's gradient is a matmul that sums over the tokens of a microbatch. So the number of these tokens, like
    the widths, must be a multiple of the format's step.
    """
    format, precision = FORMATS.get(job.precision.converter), job.precision
    if format is None or precision.emulate or format.plain_gradients(precision):
        return
    each = format.step // gcd(format.step, microbatch_size(job)) * job.parallelism.cp
    if job.data.seq_len % each:
        reason = f"{format.name} matmuls over the tokens of a microbatch need multiples of {format.step}"
        yield fault_at(job, "data.seq_len", reason, *multiples_around(job.data.seq_len, each))


def emulation_is_eager(job: Job) -> Iterator[Fault]:
    """Emulation reproduces the numerics of a format, not its speed. A compiler would fuse the emulation's casts, and so
    round at other places. It cannot fuse those of this package's own kernels, which are therefore allowed.
    """
    if job.precision.emulate and job.compile.name != "off" and not is_opaque(job):
        yield fault_at(job, "precision.emulate", f"compile={job.compile.name} would round in other places", False)


def tensor_parallel_takes_the_format(job: Job) -> Iterator[Fault]:
    """With tp and one scale for each tensor, an input that several linears of a block share is gathered in the format.
    So all of these linears must be converted.
    """
    precision, format = job.precision, FORMATS.get(job.precision.converter)
    if job.parallelism.tp == 1 or format is None:
        return
    if not format.tensor_parallel and converts(job, "linears"):
        yield fault_at(job, "parallelism.tp", f"{format.name} linears are not split over ranks; FSDP shards them", 1)
    if has_one_scale(job) and not precision.emulate and precision.skip != ["output"]:
        reason = f"under tp the linears of a block share an input in {format.name}"
        yield fault_at(job, "precision.skip", reason, "[output]")


RULES = [
    format_suits_the_job,
    widths_suit_the_format,
    tokens_suit_the_format,
    emulation_is_eager,
    tensor_parallel_takes_the_format,
]
