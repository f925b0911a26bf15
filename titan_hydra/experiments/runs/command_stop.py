"""`titan stop`: stop running and queued runs, each through its executor. Ranks finish their step, save and stop.

Each stopped attempt gets a file `cancelled` with the user and the time; a batch script that finds this file does not
requeue its job.
"""

import argparse
import sys
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import counted
from titan_hydra.experiments.runs.queue import executor_of, name_of, silent
from titan_hydra.experiments.runs.view import RunRow, add_target, choose, look, owner_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def main(args: argparse.Namespace) -> int:
    """Stop all running and queued cells. Returns 0 if all running cells were asked to stop."""
    selection = choose(args.target, args.runs)
    rows, queues = look(selection.cells)
    unknown = silent(queues)  # executors of these runs that did not answer
    for line in unknown.values():
        print(line, file=sys.stderr)
    live, executors = [], {}
    for row in rows:
        name = name_of(owner_of(row))
        try:
            executor: Any = executor_of(row.directory, owner_of(row)) if row.state.active else None
        except ConfigError as error:  # a user's own executor, which may not be imported here
            print(error, file=sys.stderr)
            unknown[name] = str(error)
            continue
        if row.state.active and (name not in unknown or executor.cancels_unseen):
            live.append(row)
            executors[name] = executor
    if not live:
        print("nothing was stopped" if unknown else f"{selection.name}: nothing runs or waits")
        return Exit.BUG if unknown else Exit.DONE
    many = counted(len(live), "cell")
    for row in live:
        print(f"{row.hash}  {row.cell}: {row.state.kind}{f' on {row.where}' if row.where else ''}")
    if not args.yes and not asked(f"stop {many}? [y/N] "):
        print("nothing was stopped")
        return Exit.DONE
    by_executor: dict[str, list[RunRow]] = {}
    for row in live:
        by_executor.setdefault(name_of(owner_of(row)), []).append(row)
    faults = [
        fault for name, some in by_executor.items() for fault in executors[name].cancel(some, len(selection.cells) > 1)
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    return Exit.BUG if faults or unknown else Exit.DONE


def asked(question: str) -> bool:
    """Ask the user a yes/no question. Raises ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal on which to confirm; --yes does it without asking")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
