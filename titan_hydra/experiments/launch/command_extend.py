"""`titan extend`: start a new run that continues from the checkpoint of an old run, up to another number of steps.

It continues from the newest checkpoint up to which the old and the new number of steps give the same learning rates. So
the result equals that of a run that has the new number of steps from the start. With lr_scheduler=wsd, this checkpoint
is from before the decay; with a constant rate, it is the last checkpoint.
"""

import argparse
import dataclasses
import sys

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import fault_at
from titan_hydra.core.job.config.operation import Launch, Paths, Sweep
from titan_hydra.core.job.run import checkpoints, inputs
from titan_hydra.core.train.worker import load_job
from titan_hydra.experiments.compose.change import change
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.layouts import checked_layouts, with_one_layout
from titan_hydra.experiments.launch.longer import longer_overrides, not_extended, origin
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.view import add_runs, choose_one

WEIGHTS = "checkpoint.initial_load_path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="RUN", help="a run directory, the start of its hash, or a cell's name")
    parser.add_argument(
        "values",
        nargs="+",
        metavar="steps=N",
        help="the total number of steps, including those of the first run; then KEY=VALUE for keys outside the hash, "
        "such as checkpoint.interval=100 or launch.mode=dry",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="S",
        help="continue from this step's checkpoint, even if the learning rate has already decayed",
    )
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Start the new run, and return the exit status of launch.py."""
    run = choose_one(args.cell, args.runs)
    old = load_job(run.directory)
    old = dataclasses.replace(
        with_one_layout(old),
        launch=Launch(require_card=old.launch.require_card),
        sweep=Sweep(),
        paths=Paths(str(run.directory.parent)),
    )
    new = change(old, args.values, experiment=("steps",))
    if not any(value.startswith("steps=") for value in args.values):
        raise ConfigError("steps: how many? titan extend RUN steps=N")
    if new.steps == old.steps:
        raise ConfigError(str(fault_at(new, "steps", "the run has this number of steps already")))
    if reason := not_extended(old):
        raise ConfigError(f"{run.directory.name}: {reason}")
    step, note = origin(run.directory, old, new, args.step)
    new.checkpoint.initial_load_path, new.checkpoint.exclude_from_loading = str(step), []
    layouts, faults = checked_layouts(new)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    cell = Cell(
        1, longer_overrides(run.overrides, args.values, step), new, rundir.directory_of(new), 1, layouts=layouts
    )
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
