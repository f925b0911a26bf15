"""How a global batch is cut into local batches, and a local batch into microbatches."""

from titan_hydra.core.job.config.fault import counted, divisors
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import Job

from .pipeline import stage_count, written_schedule
from .ranks import data_parallel


def samples_at_once(job: Job) -> int:
    """Return the number of samples in one local batch on every data-parallel rank of all replica groups."""
    return job.data.local_batch * data_parallel(job) * job.fault_tolerance.replicas


def local_batches(job: Job) -> int:
    """Return the number of local batches of a rank in a step: the number of accumulation steps."""
    return job.data.global_batch // samples_at_once(job)


def pass_in_words(job: Job) -> str:
    """Return the numbers behind steps=epoch in a line."""
    return f"steps=epoch: {counted(job.steps, 'step')}, for {job.data.samples:,} samples, {job.data.global_batch:,} in a step"


def microbatches(job: Job) -> int:
    """Return the number of microbatches of a local batch: 1 without a pipeline, else the configured number, else the
    largest legal number up to twice the number of stages. If no number is legal, return 1; a rule refuses the job.
    """
    if job.parallelism.pp == 1:
        return 1
    if job.pp_schedule.microbatches is not None:
        return job.pp_schedule.microbatches
    choices = legal_microbatches(job)
    return max((number for number in choices if number <= 2 * stage_count(job)), default=min(choices, default=1))


def microbatch_size(job: Job) -> int:
    """Return the number of samples in a microbatch."""
    return job.data.local_batch // microbatches(job)


def legal_microbatches(job: Job) -> list[int]:
    """Return the numbers of microbatches that divide the local batch and that the schedule accepts."""
    return [number for number in divisors(job.data.local_batch) if microbatch_objection(job, number) is None]


def microbatch_objection(job: Job, number: int) -> str | None:
    """Return why the schedule does not accept this number of microbatches; None if it does."""
    schedule = job.pp_schedule
    if reason := PIPELINE_SCHEDULES[schedule.name].objection(number, stage_count(job), job.parallelism.pp):
        return f"{schedule.name} {reason}"
    written = written_schedule(job)
    if written and number != (scheduled := 1 + max(microbatch for _, _, microbatch in written[0])):
        return f"its file schedules {scheduled}"
    return None
