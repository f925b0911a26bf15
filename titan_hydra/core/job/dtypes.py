"""The dtypes of a job's numbers, and how many bytes they take."""

from titan_hydra.core.job.config.registry import FORMATS
from titan_hydra.core.job.config.schema import Job

from .batches import local_batches

GIB = 2**30
SIZE = {"float32": 4, "bfloat16": 2}  # bytes of a number


def gradient_dtype(job: Job) -> str:
    """Return the dtype in which the optimizer gets the gradients.

    With split masters, this is the dtype in which gradients are summed over ranks or, without FSDP, the dtype of the
    backward. If the gradients of several local batches are accumulated, it is float32.
    """
    if job.optimizer.masters == "whole":
        return job.precision.param_dtype
    layout = job.parallelism
    if local_batches(job) > 1:
        return "float32"
    # FSDP sums the gradients over ranks in this dtype; in a pipeline, it does so after the last microbatch
    if layout.dp_replicate * layout.dp_shard * layout.cp > 1:
        return job.precision.reduce_dtype
    return "float32" if layout.pp > 1 or job.model.tie_embeddings else job.precision.compute_dtype


def has_one_scale(job: Job) -> bool:
    """Whether the job's format has one scale for a whole tensor."""
    format = FORMATS.get(job.precision.converter)
    return format is not None and format.one_scale(job.precision)


def converts(job: Job, what: str) -> bool:
    """Whether the job's format is that of `what`: of its "linears", or of its "experts"."""
    format = FORMATS.get(job.precision.converter)
    return format is not None and what in format.parts(job.precision)


def gathers_in_format(job: Job) -> bool:
    """Whether FSDP gathers weights in the job's format."""
    format = FORMATS.get(job.precision.converter)
    return format is not None and format.gathered(job.precision)


def is_opaque(job: Job) -> bool:
    """Whether a kernel of the job's format computes several modules at once, which hides them from compilers and hooks."""
    format = FORMATS.get(job.precision.converter)
    return format is not None and format.opaque(job.precision)
