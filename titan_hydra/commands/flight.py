"""`titan flight`: after or during a hang, print which rank the others wait for, and in which operation."""

import argparse

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.runs import layout
from titan_hydra.runs.hang import verdict
from titan_hydra.runs.run import newest_attempt
from titan_hydra.runs.view import add_runs, choose_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="RUN", help="a run directory, a cell of the newest sweep, or the start of a hash")
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt (default: the newest)")
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Print the paragraph about the late rank, of each replica group that has one."""
    directory = choose_one(args.cell, args.runs).directory
    attempt = layout.ATTEMPT.of(directory, args.attempt or newest_attempt(directory))
    groups = {0: attempt, **layout.REPLICA.all(attempt)}
    # A group that is a job of its own has its own attempts.
    groups |= {
        group: layout.ATTEMPT.of(home, args.attempt or newest)
        for group, home in layout.REPLICA.all(directory).items()
        if (newest := newest_attempt(home))
    }
    said = {group: found.text for group, folder in groups.items() if (found := verdict(folder))}
    if not said:
        raise ConfigError(f"{attempt}: no rank has written its flight recorder; kill -USR1 PID makes a rank do so")
    for group, text in said.items():
        print(*[f"group {group}:"] * (len(groups) > 1), text)
    return Exit.DONE
