"""Command-line arguments for the model and its dtype, which all commands that load a model share."""

import argparse
from pathlib import Path

from titan_hydra.core.job.config.user_code import require_user_modules
from titan_hydra.core.job.run.checkpoints import asked_for
from titan_hydra.experiments.runs.view import add_runs, place_of


def add_model(parser: argparse.ArgumentParser, further: str = "") -> None:
    """Add the arguments that choose a model and its dtype. `further` names what the argument RUN may be in addition."""
    parser.add_argument(
        "cell",
        metavar="RUN",
        help=f"run directory, start of a run's hash, a cell's name, a checkpoint's "
        f"folder{further and f', or {further}'}",
    )
    add_step(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights (default: float32)"
    )
    parser.set_defaults(imports=[])
    if further:  # the model takes text, and may be one of a Hugging Face folder
        add_tokenizer(parser)
        add_imports(parser)
    add_runs(parser)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the model's tokenizer.json or tokenizer.model (default: the one that the run or the folder has)",
    )


def add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of your own that defines the family of a Hugging Face folder's model; may be repeated "
        "(a run names its own modules)",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step",
        metavar="S",
        help="step of the run's checkpoint, or best, the checkpoint with the lowest held-out loss (default: the newest checkpoint)",
    )


def model_at(args: argparse.Namespace) -> Path:
    """Return the run, checkpoint or Hugging Face folder that RUN and --step name. The modules of --imports are imported,
    as one of them may define the family. Raises ConfigError if a module cannot be imported.
    """
    require_user_modules(args.imports, "--imports")
    return asked_for(place_of(args.cell, args.runs), args.step)


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Return the checkpoint that RUN and --step name. Raises ConfigError if there is no such checkpoint."""
    from titan_hydra.core.job.run.checkpoints import find_checkpoint

    return find_checkpoint(model_at(args))
