"""How a global batch is cut into what a rank takes at a time."""
from titan_hydra.config.fault import divisors
from titan_hydra.config.registry import PIPELINE_SCHEDULES
from titan_hydra.config.schema import Job

from .pipeline import read_schedule, stage_count


def microbatches(job: Job) -> int:
    """Return the microbatches of a local batch: 1 without a pipeline, else as configured, or the largest legal number up to twice the
    stages; 0 if none is legal.
    """
    if job.parallelism.pp == 1:
        return 1
    if job.pp_schedule.microbatches is not None:
        return job.pp_schedule.microbatches
    choices = legal_microbatches(job)
    return max((number for number in choices if number <= 2 * stage_count(job)), default=min(choices, default=0))


def legal_microbatches(job: Job) -> list[int]:
    """Return the numbers of microbatches that divide the local batch and that the schedule accepts."""
    return [number for number in divisors(job.data.local_batch) if microbatch_objection(job, number) is None]


def microbatch_objection(job: Job, number: int) -> str | None:
    """Return why the schedule does not accept this number of microbatches; None if it does."""
    schedule = job.pp_schedule
    if reason := PIPELINE_SCHEDULES[schedule.name].objection(number, stage_count(job), job.parallelism.pp):
        return f"{schedule.name} {reason}"
    if schedule.name == "csv" and number != (written := 1 + max(microbatch for _, _, microbatch in read_schedule(schedule.csv)[0])):
        return f"{schedule.csv} schedules {written}"
    return None
