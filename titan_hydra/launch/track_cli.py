"""`titan track`: give a tracker what runs have recorded, once they are over. The same classes track runs that are under way."""
from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from titan_hydra.config import Job
from titan_hydra.config.change import change
from titan_hydra.config.run import Run
from titan_hydra.config.status import ConfigError, Exit
from titan_hydra.train import trackers

from . import rundir
from .view import add_runs, choose
from .worker import load_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `titan track`."""
    parser.add_argument("target", metavar="TARGET", help="a sweep, a cell, a run directory, a folder of runs, or the start of a hash")
    parser.add_argument("--to", required=True, choices=sorted(trackers.TRACKERS), help="tensorboard: event files in the run directory; "
                        "wandb: offline files there, which titan sync sends; either replaces those that are there")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="other values for this copy: metrics.wandb_project=mine, "
                        "metrics.wandb_tags=[a,b], notes='...'")
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Exit status 0 when the tracker has taken all of them, else 1."""
    selection = choose(args.target, args.runs)
    jobs = [(cell.directory, change(load_job(cell.directory), args.values)) for cell in selection.cells]
    failed = [copy(directory, job, args.to) for directory, job in jobs].count(False)
    if failed == len(jobs):
        return Exit.BUG
    if args.to == "tensorboard":
        print(f"  look: tensorboard --logdir {shlex.quote(str(jobs[0][0].parent))}")
    elif jobs[0][1].metrics.wandb_mode == "offline":
        print(f"  send: titan sync {shlex.quote(args.target)}")
    return Exit.BUG if failed else Exit.DONE


def copy(directory: Path, job: Job, name: str) -> bool:
    """Copy one run; False, and a line that says why, where that is not possible."""
    state = rundir.state(directory)
    if state.kind == "running":
        raise ConfigError(f"{directory.name}: is running; track it when it is over")
    if not any(directory.glob("metrics.jsonl")):
        print(f"{directory.name}: has recorded nothing yet", file=sys.stderr)
        return False
    if name == "tensorboard":
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    try:
        trackers.open_tracker(name, job, Run(directory, directory / "attempts" / str(state.attempt))).close()
    except Exception as error:  # a tracker's own, of any kind
        print(f"{directory.name}: {name} took nothing: {error}", file=sys.stderr)
        return False
    print(f"{directory.name}: copied to {name}")
    return True
