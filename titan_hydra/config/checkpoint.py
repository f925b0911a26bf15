"""Rules for checkpoints: when they are due, and where a run starts from."""
from __future__ import annotations

from collections.abc import Iterator

from .fault import Fault
from .files import expand, similar
from .schema import Job

PARTS = ("optimizer", "data", "lr_scheduler")  # of a checkpoint, beside the weights


def checkpoints_are_due_at_times_that_come(job: Job) -> Iterator[Fault]:
    """Parts have names, minutes pass, and a run of weeks must not find out at its end that it never saved."""
    config = job.checkpoint
    for part in config.exclude_from_loading:
        if part not in PARTS:
            yield Fault("checkpoint.exclude_from_loading", config.exclude_from_loading, f"a checkpoint has no {part}", legal=PARTS)
    if config.interval_minutes is not None and not config.interval_minutes > 0:
        yield Fault("checkpoint.interval_minutes", config.interval_minutes, "must be positive, or null", legal=(1,))
    if config.name not in ("off", "seed") and config.interval == 0 and config.interval_minutes is None and not config.last_step:
        yield Fault("checkpoint.interval", 0, "nothing would be saved; checkpoint=off says so", legal=(100,))
    if config.name == "off" and config.export_dtype:
        yield Fault("checkpoint.export_dtype", config.export_dtype, "checkpoint=off writes nothing", legal=("null",))


def initial_weights_are_there(job: Job) -> Iterator[Fault]:
    """A run that should start from given weights must not start from random ones, and not from less than was asked for."""
    path, left_out = job.checkpoint.initial_load_path, job.checkpoint.exclude_from_loading
    if not path:
        return
    steps = [".", "step-*", "checkpoints/step-*"]
    if not any(expand(f"{path}/{step}/.metadata") for step in steps) and not expand(f"{path}/*.safetensors"):
        yield Fault("checkpoint.initial_load_path", path, "no complete checkpoint folder, no run with one, and no *.safetensors",
                    legal=similar(path))
    elif not set(PARTS) <= set(left_out) and not any(expand(f"{path}/{step}/rank_*.json") for step in steps):
        yield Fault("checkpoint.exclude_from_loading", left_out, f"{path} holds weights alone", legal=(f"[{','.join(PARTS)}]",))
