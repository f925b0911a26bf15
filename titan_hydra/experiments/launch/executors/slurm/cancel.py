"""Cancel runs that are jobs of SLURM. One scancel for all jobs asks their ranks to save and stop."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner
from titan_hydra.experiments.runs.view import RunRow, jobs_of, owner_of

from . import squeue


def cancel_jobs(rows: list[RunRow]) -> Iterable[str]:
    """Cancel only the jobs of these cells, with one scancel. Yield a line for each cell that cannot be cancelled."""
    cells: list[Path] = []
    # job ids: all cells of a packed job have the same id, and a cell with replica groups has an id for each group
    jobs: list[str] = []
    for row in rows:
        owner, live = owner_of(row), [job for job in jobs_of(row.directory, row.state) if job[2].active]
        if cluster := squeue.elsewhere(owner):
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
                rundir.mark_cancelled(layout.ATTEMPT.of(home, attempt))
                jobs.append(state.job.id)
    if not jobs:
        return
    try:
        done = subprocess.run(["scancel", *dict.fromkeys(jobs)], capture_output=True, text=True, timeout=squeue.LIMIT)
        error_text = done.stderr.strip() or (f"it ended with status {done.returncode}" if done.returncode else "")
    except (OSError, subprocess.TimeoutExpired) as error:
        error_text = str(error)
    if error_text:
        yield f"scancel: {error_text}"
    else:
        print(f"cancelled {counted(len(cells), 'cell')} ({', '.join(ranges(jobs))})")


def ranges(jobs: list[str]) -> list[str]:
    """Abbreviate job ids as SLURM does: 7_[0-2,5] for the tasks of an array, 7-9 for jobs with successive numbers."""
    arrays: dict[str, set[int]] = {}
    for job in jobs:
        array, _, task = job.rpartition("_")
        arrays.setdefault(array, set()).add(int(task))
    shortened = []
    for array, tasks in arrays.items():
        runs: list[list[int]] = []
        for task in sorted(tasks):
            if runs and task == runs[-1][-1] + 1:
                runs[-1][1:] = [task]
            else:
                runs.append([task])
        parts = ["-".join(map(str, run)) for run in runs]
        shortened += [f"{array}_[{','.join(parts)}]" if len(tasks) > 1 else f"{array}_{parts[0]}"] if array else parts
    return shortened


def sharing(owner: Owner, row: RunRow, rows: list[RunRow]) -> list[str]:
    """Return the names of all runs that have not ended and run in the same packed job as `row`, but are not in `rows`."""
    names = []
    for directory in {*row.directory.parent.iterdir()} - {row.directory for row in rows}:
        mine = [
            attempt
            for attempt in layout.ATTEMPT.all(directory).values()
            if layout.CLAIM.read(attempt).get("token") == owner["token"]
        ]
        names += [directory.name for attempt in mine if not layout.EXIT.of(attempt).exists()]
    return names
