"""`titan cancel`: stop runs that are running or queued. Ranks save and stop at the end of their step; SLURM jobs are
cancelled by one scancel.

Each stopped attempt gets a file `cancelled` with the user and the time; with it a job's batch script does not requeue
the job.
"""

import argparse
import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config.fault import counted
from titan_hydra.launch.attach import stop
from titan_hydra.runs import layout, rundir, slurm
from titan_hydra.runs.records import alive
from titan_hydra.runs.view import RunRow, add_target, choose, jobs_of, look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def main(args: argparse.Namespace) -> int:
    """Cancel what runs or waits. Returns 0 if all running cells were asked to stop."""
    selection = choose(args.target, args.runs)
    rows, queue = look(selection.cells)
    live = [row for row in rows if row.state.active]
    if not queue.answers:  # SLURM is asked only if one of these runs may be in its queue
        print("SLURM does not answer: its jobs cannot be cancelled now", file=sys.stderr)
        live = [row for row in live if not _on_slurm(row)]
    if not live:
        print(f"{selection.name}: nothing runs or waits" if queue.answers else "nothing was cancelled")
        return Exit.DONE if queue.answers else Exit.BUG
    many = counted(len(live), "cell")
    for row in live:
        print(f"{row.hash}  {row.cell}: {row.state.kind}{f' on {row.where}' if row.where else ''}")
    if not args.yes and not asked(f"cancel {many}? [y/N] "):
        print("nothing was cancelled")
        return Exit.DONE
    faults = [
        *cancel_slurm([row for row in live if _on_slurm(row)]),
        *cancel_local([row for row in live if not _on_slurm(row)], whole=len(selection.cells) > 1),
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    return Exit.BUG if faults or not queue.answers else Exit.DONE


def _on_slurm(row: RunRow) -> bool:
    """Whether the run was submitted to SLURM."""
    return owner_of(row).get("executor") == "slurm"


def asked(question: str) -> bool:
    """Ask the user a yes/no question. Raises ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask at; --yes cancels without asking")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def mark(attempt: Path) -> None:
    """Record in the attempt that it is being cancelled, before it is."""
    layout.CANCELLED.write(attempt, {"by": getpass.getuser(), "time": time.time()})


def cancel_slurm(rows: list[RunRow]) -> Iterable[str]:
    """Cancel the jobs of exactly these cells with one scancel. Yields the reasons why some cannot be cancelled."""
    cells: list[Path] = []
    jobs: list[str] = []  # packed cells share theirs, and replica groups have one each
    for row in rows:
        owner, live = owner_of(row), [job for job in jobs_of(row.directory, row.state) if job[2].active]
        if cluster := slurm.elsewhere(owner):
            yield f"{row.cell}: is a job of the cluster {cluster}; cancel it there"
        elif any(state.job is None for _, _, state in live):
            yield f"{row.cell}: is being submitted right now; try again"
        elif others := sharing(owner, row, rows) if owner.get("packed") else []:
            yield (
                f"{row.cell}: shares the packed job {row.state.job.id} with {counted(len(others), 'other cell')} "
                f"({', '.join(others[:3])}); cancel the whole sweep, or scancel {row.state.job.id}"
            )
        else:
            cells.append(row.directory)
            for home, attempt, state in live:
                mark(layout.ATTEMPT.of(home, attempt))
                jobs.append(state.job.id)
    if not jobs:
        return
    try:
        done = subprocess.run(["scancel", *dict.fromkeys(jobs)], capture_output=True, text=True, timeout=slurm.LIMIT)
        said = done.stderr.strip() or (f"it ended with status {done.returncode}" if done.returncode else "")
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        yield f"scancel: {said}"
    else:
        print(f"cancelled {counted(len(cells), 'cell')} ({', '.join(ranges(jobs))})")


def ranges(jobs: list[str]) -> list[str]:
    """Return job ids as SLURM abbreviates them: 7_[0-2,5] for the tasks of an array, 7-9 for jobs with successive
    numbers.
    """
    arrays: dict[str, set[int]] = {}
    for job in jobs:
        array, _, task = job.rpartition("_")
        arrays.setdefault(array, set()).add(int(task))
    found = []
    for array, tasks in arrays.items():
        runs: list[list[int]] = []
        for task in sorted(tasks):
            if runs and task == runs[-1][-1] + 1:
                runs[-1][1:] = [task]
            else:
                runs.append([task])
        parts = ["-".join(map(str, run)) for run in runs]
        found += [f"{array}_[{','.join(parts)}]" if len(tasks) > 1 else f"{array}_{parts[0]}"] if array else parts
    return found


def sharing(owner: dict, row: RunRow, rows: list[RunRow]) -> list[str]:
    """List the other runs in the same packed job that are neither finished nor to be cancelled."""
    found = []
    for directory in {*row.directory.parent.iterdir()} - {row.directory for row in rows}:
        mine = [attempt for attempt in layout.ATTEMPT.all(directory).values() if layout.CLAIM.read(attempt).get("token") == owner["token"]]
        found += [directory.name for attempt in mine if not layout.EXIT.of(attempt).exists()]
    return found


def cancel_local(rows: list[RunRow], whole: bool) -> Iterable[str]:
    """Ask local ranks to stop, as Ctrl-C does. For a whole sweep its launcher is asked, so that it starts no further
    cell.
    """
    told = set()
    for row in rows:
        attempt = layout.ATTEMPT.of(row.directory, row.state.attempt)
        launcher = owner_of(row)
        if not row.state.here:
            yield f"{row.cell}: runs on {row.state.host}; cancel it there"
            continue
        mark(attempt)
        if whole and alive(launcher) and "ended" not in launcher:
            if launcher["pid"] not in told:  # a second signal kills
                os.kill(launcher["pid"], signal.SIGTERM)
                told.add(launcher["pid"])
            whom = "its launcher"
        else:
            whom = stop(attempt) if started(attempt) else None
        print(f"{row.cell}: asked {whom} to save and stop at the end of this step" if whom else f"{row.cell}: ended by itself")


def started(attempt: Path, seconds: float = 15) -> bool:
    """Wait until ranks can be signalled. Returns False if the attempt ended before."""
    deadline = time.monotonic() + seconds
    while not rundir.running_ranks(attempt) and not alive(layout.RANKS.read(attempt)):
        if time.monotonic() > deadline or rundir.host_of_running(attempt) is None:
            return False
        time.sleep(0.1)
    return True


def owner_of(row: RunRow) -> dict:
    """Return the record of who claimed a row's attempt."""
    return layout.CLAIM.read(layout.ATTEMPT.of(row.directory, row.state.attempt))
