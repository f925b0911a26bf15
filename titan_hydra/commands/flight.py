"""`titan flight`: after or during a hang, print which rank the others wait for, and in which operation."""
import argparse

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.runs import layout
from titan_hydra.runs.hang import verdict
from titan_hydra.runs.rundir import newest_attempt
from titan_hydra.runs.view import add_runs, choose_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="RUN", help="a run directory, a cell of the newest sweep, or the start of a hash")
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt (default: the newest)")
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Print the paragraph about the late rank."""
    directory = choose_one(args.cell, args.runs).directory
    attempt = layout.ATTEMPT.of(directory, args.attempt or newest_attempt(directory))
    said = verdict(attempt)
    if said is None:
        raise ConfigError(f"{attempt}: no rank has written its flight recorder; kill -USR1 PID makes a rank do so")
    print(said.text)
    return Exit.DONE
