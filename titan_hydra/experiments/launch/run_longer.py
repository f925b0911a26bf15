"""`titan resume RUN steps=N`: start a new run that continues from the checkpoint of an old run, up to another number of steps.

It continues from the newest checkpoint up to which the old and the new number of steps give the same learning rates. So
the result equals that of a run that has the new number of steps from the start. With lr_scheduler=wsd, this checkpoint
is from before the decay; with a constant rate, it is the last checkpoint.
"""

import dataclasses
import sys

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import bad_value, fault_at
from titan_hydra.core.job.config.operation import Launch, Paths, Sweep
from titan_hydra.core.job.config.schema import EPOCH
from titan_hydra.core.job.run import checkpoints, inputs
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.compose.change import change
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.layouts import checked_layouts, with_one_layout
from titan_hydra.experiments.launch.longer import longer_overrides, not_extended, origin
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.find import RunCell

WEIGHTS = "checkpoint.initial_load_path"


def run_longer(run: RunCell, values: list[str], wanted: int | None) -> int:
    """Start the new run, from the checkpoint of the step `wanted` if it is given, and return the exit status of launch.py."""
    old = load_job(run.directory)
    old = dataclasses.replace(
        with_one_layout(old),
        launch=Launch(require_proof=old.launch.require_proof),
        sweep=Sweep(),
        paths=Paths(str(run.directory.parent)),
    )
    if f"steps={EPOCH}" in values:
        raise bad_value("steps", EPOCH, "a run is continued up to a number of steps", 2 * old.steps)
    new = change(old, values, experiment=("steps",))
    if new.steps == old.steps:
        raise fault_at(new, "steps", "the run has this number of steps already").error
    if reason := not_extended(old):
        raise ConfigError(f"{run.directory.name}: {reason}")
    step, note = origin(run.directory, old, new, wanted)
    new.checkpoint.initial_load_path, new.checkpoint.exclude_from_loading = str(step), []
    layouts, faults = checked_layouts(new)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    cell = Cell(1, longer_overrides(run.overrides, values, step), new, rundir.directory_of(new), 1, layouts=layouts)
    print(
        f"{cell.directory.name}: continues from step {checkpoints.step_of(step)} of {run.directory.name}{note}",
        flush=True,
    )
    with inputs.at_first_folder(new, run.directory):
        # the new run goes on with the data of the old one; its initial weights are another checkpoint
        if faults := inputs.check_files({run.directory: new}, cell.runs, without=WEIGHTS):
            print(*faults, sep="\n", file=sys.stderr)
            return Exit.CONFIG
        return dispatch.begin([cell])
