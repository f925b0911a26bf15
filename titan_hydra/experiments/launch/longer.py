"""Continue a run up to another number of steps, as a new run: choose the checkpoint to start from, and the overrides."""

from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import as_value, bad_value
from titan_hydra.core.job.config.registry import DATA_SOURCES
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.run import checkpoints, layout


def not_extended(job: Job) -> str | None:
    """Return why `titan resume RUN steps=N` refuses a run; None if it does not."""
    if job.fault_tolerance.name != "off":
        return (
            f"a run with fault_tolerance={job.fault_tolerance.name} cannot be extended: the state that its replica groups "
            "share is not copied"
        )
    if job.adapter.name != "none" and not job.checkpoint.initial_load_path:
        return (
            f"a run with adapter={job.adapter.name} and checkpoint.initial_load_path=null cannot be extended: its checkpoints "
            "hold only the adapters, and the weights beside them were drawn from the seed. Start a new run with another `steps`"
        )
    if job.data.samples is not None:
        return "a run with steps=epoch cannot be extended: its last batch is filled up. Start a new run with a number of steps"
    return None


def is_worth_extending(job: Job) -> bool:
    """Whether `titan resume RUN steps=N` accepts a run, and further steps on its data make sense: samples of the model
    that the run started from are stale after it.
    """
    kinds = (DATA_SOURCES[source.name] for source in data_sources(job.data).values())
    return not_extended(job) is None and not any(kind.sampled for kind in kinds)


def origin(directory: Path, old: Job, new: Job, wanted: int | None) -> tuple[Path, str]:
    """Return the checkpoint to continue from, and a remark to print. Raises ConfigError if there is no such checkpoint."""
    steps = {checkpoints.step_of(path): path for path in checkpoints.complete(layout.CHECKPOINTS.of(directory))}
    if not steps:
        raise ConfigError(f"{directory.name}: has no complete checkpoint to continue from")
    early = [step for step in steps if step < new.steps]
    if not early:
        raise ConfigError(
            f"steps={new.steps}: {directory.name} has no checkpoint before step {new.steps}; its first is {min(steps)}"
        )
    same = steps_of_same_rates(old, new)
    part = f"the learning rates of {old.steps} and {new.steps} steps differ from step {same + 1} on"
    if wanted is not None:
        if wanted not in early:
            raise bad_value("--step", wanted, "there is no such checkpoint", *tuple(early))
        return steps[
            wanted
        ], f"; {part}: it does not learn what a run of {new.steps} steps learns" if wanted > same else ""
    if not (fits := [step for step in early if step <= same]):
        raise ConfigError(
            f"{directory.name}: {part}, and its first checkpoint is that of step {min(steps)}; "
            f"--step {max(early)} continues from that step with the new rates. checkpoint.keep_every=N keeps earlier ones"
        )
    return steps[max(fits)], ""


def steps_of_same_rates(old: Job, new: Job) -> int:
    """Return the last step up to which both jobs have the same learning rates."""
    from titan_hydra.core.train.optimizer import lr_factor as factor

    last = min(old.steps, new.steps)
    for step in range(1, last + 1):
        if factor(step, old.steps, old.lr_scheduler) != factor(step, new.steps, new.lr_scheduler):
            return step - 1
    return last


def longer_overrides(before: list[str], values: list[str], step: Path) -> list[str]:
    """Return the overrides with which `python launch.py` starts the new run: the first run's overrides, with the new
    values.
    """
    after = [*values, f"checkpoint.initial_load_path={as_value(str(step))}", "checkpoint.exclude_from_loading=[]"]
    keys = {override.partition("=")[0] for override in after}
    return [override for override in before if override.partition("=")[0] not in keys] + after
