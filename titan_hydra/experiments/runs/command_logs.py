"""`titan logs`: print a rank's log. -f prints new lines as they come, and goes on with the next attempt after a
requeue. --guilty prints why the run failed. --hang prints for which rank the others wait in a hang.
"""

import argparse
import codecs
import re
import sys
import time
import weakref
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.plain import open_plain
from titan_hydra.core.base.text import printable, with_colours
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.hang import verdict
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.hints import hint
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import add_runs, choose_one, jobs_of

POLL = 0.2  # seconds between two reads of the log
ASK, ASK_QUEUE = 1.0, 15.0  # seconds between two checks of the run's state: for local processes, and for batch jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cell", metavar="CELL", help="a run directory, a cell of the newest sweep, or the start of a hash"
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="N",
        help="rank whose log is printed (default: 0, the rank that prints the metrics)",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="attempt whose log is printed (default: the newest)")
    parser.add_argument("-n", "--lines", type=_number, metavar="N", help="print only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--guilty", action="store_true", help="print instead the last lines of the rank that made the run fail"
    )
    choice.add_argument(
        "--hang",
        action="store_true",
        help="print instead, in or after a hang, for which rank the others wait, and in which operation",
    )
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Print the log to stdout, and titan's own messages to stderr."""
    directory = choose_one(args.cell, args.runs).directory
    if args.hang:
        return _hang(directory, args.attempt)
    state = rundir.inspect(directory)
    if args.guilty:
        return _guilty(directory, state)
    if state.groups:  # each replica group is a job, and each job counts its ranks from 0
        group, args.rank = divmod(args.rank, layout.CONFIG.read(directory).get("gpus") or 1)
        if group >= len(state.groups):
            raise ConfigError(f"--rank: {directory.name} has {len(state.groups)} replica groups")
        directory, _, state = jobs_of(directory, state)[group]
    number = args.attempt or state.attempt
    if args.follow and args.attempt is None:
        return _follow(directory, state, args.rank, args.lines)
    log = log_of(directory, number, args.rank)
    if log is None:
        raise ConfigError(_missing(directory, state, number, args.rank))
    Tail(log, args.lines).more()
    return Exit.DONE


def _number(text: str) -> int:
    """Parse a number of lines. Raises ValueError, which argparse reports, if the text is not 0 or a positive integer."""
    if not text.isdigit():
        raise ValueError
    return int(text)


def _guilty(directory: Path, state: State) -> int:
    """Print which rank made the run fail, its error, and where its log is."""
    failure = state.failure
    if failure is None:
        raise ConfigError(f"{directory.name}: {state.kind}, and no rank is at fault")
    print(f"{failure.kind}: {failure.line}")
    if failure.host:
        print(f"on {failure.host}")
    print(
        f"\n{failure.detail or (layout.last_lines(failure.log) if failure.log else '') or 'there is no further message'}\n"
    )
    if failure.log:
        print(f"log: {failure.log}")
    if advice := hint(failure):
        print(f"try: {advice}")
    return Exit.DONE


def _hang(directory: Path, number: int | None) -> int:
    """Print a paragraph for each replica group in which ranks are waiting for a late rank."""
    attempt = layout.ATTEMPT.of(directory, number or newest_attempt(directory))
    groups = {0: attempt, **layout.REPLICA.all(attempt)}
    for group, home in layout.REPLICA.all(
        directory
    ).items():  # a replica group on SLURM is a job, with its own attempts
        if newest := newest_attempt(home):
            groups[group] = layout.ATTEMPT.of(home, number or newest)
    verdicts = {group: late for group, folder in groups.items() if (late := verdict(folder))}
    if not verdicts:
        raise ConfigError(f"{attempt}: no rank has written its flight recorder; kill -USR1 PID makes a rank do so")
    for group, late in verdicts.items():
        if len(groups) > 1:
            print(f"group {group}:", end=" ")
        print(late.text)
    return Exit.DONE


def _follow(directory: Path, state: State, rank: int, lines: int | None) -> int:
    """Print the log as it grows, then the next attempt's log if there is one, until the run ends."""
    number, tail, asked = state.attempt, None, time.monotonic()
    if not state.active and log_of(directory, number, rank) is None:
        raise ConfigError(_missing(directory, state, number, rank))
    say(f"{directory.name}: {state.kind}, attempt {number}")
    while True:
        log = log_of(directory, number, rank)
        if log and (tail is None or tail.path != log):  # rank 0's log replaces the job's log once it exists
            tail = Tail(log, lines)
        if tail:
            tail.more()
        if not state.may_change:
            break
        if time.monotonic() - asked > (ASK_QUEUE if state.job else ASK):
            state, asked = rundir.state(directory), time.monotonic()
        if (newest := newest_attempt(directory)) != number:
            if tail:
                tail.more()
            number, tail, lines = newest, None, None
            say(f"--- attempt {number}")
        time.sleep(POLL)
    if tail:
        tail.more()
    say(f"{directory.name}: {state.failure.line if state.failure else state.kind}")
    return Exit.DONE


class Tail:
    """Prints a log (all of it, or only its last lines), and then whatever is appended to it."""

    def __init__(self, path: Path, lines: int | None = None) -> None:
        """Open a log; with `lines`, print its last lines and go on behind them."""
        self.path, self.file = path, open_plain(path)
        weakref.finalize(self, self.file.close)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        if lines is not None:
            shown = layout.last_lines(path, lines, 1 << 24) if lines else ""
            self.file.seek(0, 2)
            if shown:
                print(with_colours(shown), flush=True)

    def more(self) -> None:
        """Print what has been written since the last call."""
        while block := self.file.read(1 << 16):
            sys.stdout.write(
                with_colours(printable(re.sub("\r+\n?", "\n", self.decode(block))))
            )  # a progress bar ends its lines with \r
        sys.stdout.flush()


def log_of(directory: Path, attempt: int, rank: int) -> Path | None:
    """Return a rank's log. As long as rank 0 has no log of its own, return the job's log. None if there is no log yet."""
    folder = layout.ATTEMPT.of(directory, attempt)
    candidates = [layout.LOG.of(folder, rank), *([layout.JOB_LOG.of(folder)] if rank == 0 else [])]
    for log in candidates:
        # the job's log counts only if it is not empty
        if log.is_file() and (log.stat().st_size or log is candidates[0]):
            return log
    return None


def _missing(directory: Path, state: State, attempt: int, rank: int) -> str:
    """Return a sentence that explains why this rank has no log in this attempt, and which logs exist."""
    attempts = list(layout.ATTEMPT.all(directory))
    if attempt not in attempts:
        return f"--attempt={attempt}: {directory.name} has {between(attempts, 'attempt')}"
    ranks = list(layout.LOG.all(layout.ATTEMPT.of(directory, attempt)))
    if not ranks:
        return f"{directory.name}: {state.kind}, and no rank has printed anything yet; -f waits for output"
    return f"--rank={rank}: attempt {attempt} of {directory.name} has {between(ranks, 'rank')}"


def between(numbers: list[int], noun: str) -> str:
    """Format a list of numbers, for example `ranks 0 to 7`."""
    if not numbers:
        return f"no {noun} yet"
    if len(numbers) == 1:
        return f"only {noun} {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers))}"


def say(text: str) -> None:
    """Print one of titan's own messages to stderr."""
    print(text, file=sys.stderr, flush=True)
