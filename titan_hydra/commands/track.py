"""`titan track`: copy the records of finished runs to a tracker, with the classes that track running ones."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit, RunError
from titan_hydra.config.change import change
from titan_hydra.config.registry import TRACKERS
from titan_hydra.launch.worker import load_job
from titan_hydra.observe import trackers
from titan_hydra.runs import layout, rundir
from titan_hydra.runs.run import Run
from titan_hydra.runs.view import add_runs, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a sweep, a cell, a run directory, a folder of runs, or the start of a hash")
    parser.add_argument(
        "--to",
        required=True,
        choices=sorted(TRACKERS),
        help="tensorboard: event files in the run directory; "
        "wandb: offline files there, which titan sync sends; either replaces those that are there",
    )
    parser.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help="other values for this copy: metrics.wandb_project=mine, metrics.wandb_tags=[a,b], notes='...'",
    )
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Copy the selected runs. Returns 0 if the tracker took all, 1 if it failed, 2 for a run that cannot be copied or a
    wrong value.
    """
    directories = [cell.directory for cell in choose(args.target, args.runs).cells]
    errors = [error for directory in directories if (error := copy(directory, args.values, args.to))]
    if len(errors) < len(directories):
        place = shlex.quote(str(directories[0].parent))
        print({"tensorboard": f"  look: tensorboard --logdir {place}", "wandb": f"  send what is offline: titan sync {place}"}[args.to])
    return max((error.status for error in errors), default=Exit.DONE)


def copy(directory: Path, values: list[str], name: str) -> RunError | None:
    """Copy one run and print the outcome. Returns the error, None if there was none."""
    try:
        job, state = change(load_job(directory), values), rundir.state(directory)
        if state.kind == "running":
            raise ConfigError("is running; track it when it is over")
        if not layout.METRICS.of(directory).is_file():
            raise ConfigError("has recorded nothing yet")
        if name == "tensorboard":
            shutil.rmtree(layout.TENSORBOARD.of(directory), ignore_errors=True)
        try:
            trackers.open_tracker(name, job, Run(directory, layout.ATTEMPT.of(directory, state.attempt))).close()
        except Exception as error:  # a tracker's own, of any kind
            raise RunError(f"{name} took nothing: {error}") from error
    except RunError as error:
        print(f"{directory.name}: {error}", file=sys.stderr)
        return error
    print(f"{directory.name}: copied to {name}")
    return None
