"""Shared by the commands that compute with one model in this process: options for the model and its number format."""

import argparse
from pathlib import Path

from titan_hydra.runs.checkpoints import asked_for
from titan_hydra.runs.view import add_runs, place_of


def add_model(parser: argparse.ArgumentParser, further: str = "") -> None:
    """Add the arguments that say which model is loaded, and in which number format. `further` names another kind of RUN
    that is taken.
    """
    parser.add_argument(
        "cell",
        metavar="RUN",
        help="directory of a run, start of its hash, a cell's name, or a checkpoint's folder" + f", or {further}" * bool(further),
    )
    add_step(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="number format of the weights (float32)")
    add_runs(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says which checkpoint of a run is loaded."""
    parser.add_argument("--step", metavar="S", help="the run's checkpoint of this step; best: of the lowest held-out loss (the newest)")


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Return the checkpoint that is named, by default a run's newest. Raises ConfigError."""
    from titan_hydra.checkpoint.convert import find_checkpoint

    return find_checkpoint(asked_for(place_of(args.cell, args.runs), args.step))
