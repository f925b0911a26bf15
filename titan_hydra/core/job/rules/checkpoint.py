"""The rules for checkpoints: when they are written, and which one a run starts from."""

from collections.abc import Iterator

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.files import home, similar
from titan_hydra.core.job.config.operation import LOADED
from titan_hydra.core.job.config.registry import resolve
from titan_hydra.core.job.config.schema import Job


def checkpoints_are_due_at_times_that_come(job: Job) -> Iterator[Fault]:
    """A run that keeps checkpoints saves at least once. Otherwise a run of weeks could end without a checkpoint."""
    config = job.checkpoint
    if config.name != "off" and config.interval == 0 and config.interval_minutes is None and not config.last_step:
        yield Fault("checkpoint.interval", 0, "nothing would be saved; choose that with checkpoint=off", legal=(100,))
    if config.name == "off" and config.export_dtype:
        yield Fault("checkpoint.export_dtype", config.export_dtype, "checkpoint=off writes nothing", legal=("null",))
    if config.keep_best and job.validation.name == "off":
        yield fault_at(
            job, "checkpoint.keep_best", "the lowest held-out loss is measured only with validation=on", False
        )


def weights_fit_the_job(job: Job) -> Iterator[Fault]:
    """Yield a warning if the initial weights were trained under another tokenizer than that of the job's data, or with
    other rotary positions, which some change on purpose for longer samples.
    """
    if job.checkpoint.initial_load_path:
        yield from resolve("titan_hydra.core.checkpoint.carried:warnings_of_weights")(job)
        yield from resolve("titan_hydra.core.checkpoint.carried:other_positions")(job)


def initial_weights_are_there(job: Job) -> Iterator[Fault]:
    """The checkpoint that initial_load_path names exists, with every part that is not excluded. Otherwise the run would
    start from random weights. And its weights belong to the function that the job's model computes.
    """
    path, left_out = job.checkpoint.initial_load_path, job.checkpoint.exclude_from_loading
    if not path:
        return
    folder = home(path)
    if not folder.is_dir():
        yield Fault("checkpoint.initial_load_path", path, "no such folder", legal=similar(path))
        return
    steps = ("", "step-*/", "checkpoints/step-*/")
    if not any(any(folder.glob(f"{step}.metadata")) for step in steps) and not any(folder.glob("*.safetensors")):
        yield Fault(
            "checkpoint.initial_load_path", path, "no complete checkpoint folder, no run with one, and no *.safetensors"
        )
    elif not set(LOADED) <= set(left_out) and not any(any(folder.glob(f"{step}rank_*.json")) for step in steps):
        yield Fault(
            "checkpoint.exclude_from_loading", left_out, f"{path} holds only weights", legal=(f"[{','.join(LOADED)}]",)
        )
    else:
        yield from resolve("titan_hydra.core.checkpoint.carried:faults_of_weights")(job)
