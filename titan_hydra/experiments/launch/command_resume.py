"""`titan resume`: bring runs further. Without KEY=VALUE, failed and interrupted cells run again; gpus=N or another layout
starts the next attempt of one run there; steps=N trains one run longer, as a new run.
"""

import argparse

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.launch.run_again import ONLY, run_again
from titan_hydra.experiments.launch.run_longer import run_longer
from titan_hydra.experiments.launch.run_relaid import refuse_state, run_relaid
from titan_hydra.experiments.runs.find import RunCell, Selection
from titan_hydra.experiments.runs.view import add_target, choose, choose_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help="for one run: gpus=N, parallelism=OPTION, pp_schedule=OPTION, ac=OPTION, compile=OPTION, their keys, "
        "data.local_batch=N: the same run in another layout; steps=N: a new run that goes on up to N steps in all; keys "
        "outside the hash, such as launch.mode=dry",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=ONLY,
        metavar="CLASS",
        help=f"cells to run again; the option may be given several times: {', '.join(ONLY)} (default: failed and "
        "interrupted)",
    )
    parser.add_argument(
        "--as-is", action="store_true", help="also run cells that ran out of memory or whose loss was not finite"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="S",
        help="with steps=N: continue from this step's checkpoint, even if the learning rate has already decayed",
    )


def main(args: argparse.Namespace) -> int:
    """Run the chosen cells again, or one run in another layout or longer. Returns the exit status of launch.py, or 0 if
    nothing is to run again.
    """
    longer = any(value.startswith("steps=") for value in args.values)
    if args.step is not None and not longer:
        raise ConfigError(f"--step {args.step}: goes with steps=N, which trains a run longer")
    if args.values and (args.only or args.as_is):
        raise ConfigError(f"{'--only' if args.only else '--as-is'}: goes without KEY=VALUE, here {args.values[0]}")
    if not args.values:
        selection = chosen(args)
        if args.target and not args.only and len(selection.cells) == 1:
            refuse_state(selection.cells[0].directory)
        return run_again(selection, args)
    chosen(args)
    run: RunCell = choose_one(args.target, args.runs)
    return run_longer(run, args.values, args.step) if longer else run_relaid(run, args.values, args.runs)


def chosen(args: argparse.Namespace) -> Selection:
    """Return the runs that the target selects. Raises ConfigError if there are none, and for a line without a target."""
    try:
        return choose(args.target, args.runs)
    except ConfigError as error:
        if "=" not in (args.target or ""):
            raise
        words = " ".join([args.target, *args.values])
        raise ConfigError(f"{error}; which run? titan resume RUN {words}") from error
