"""The entry point of a rank that srun has started: python -m titan_hydra.experiments.launch.executors.slurm.rank RUN ATTEMPT

SLURM's step daemon does here what executors/supervisor.py does elsewhere: only the daemon can bind each rank to its own
cores, memory and GPUs (tests/slurm/test_places.py).

If something kills the job's batch script, SLURM ends the job as FAILED and asks its ranks to stop, and the script cannot
requeue the job any more. So rank 0 has a child process that does this.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from titan_hydra.core.base.amounts import time_of_day
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import group_at
from titan_hydra.core.train.worker import Place, run_rank

VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
TRIES, SECONDS = 5, 0.5  # how often, and how long apart, the child asks SLURM why rank 0 is to stop
# What scontrol prints of a job whose batch script was ended by a signal. SLURM 23 has the second word.
KILLED = re.compile(r"Reason=(JobLaunchFailure|RaisedSignal)\b.* ExitCode=0:[1-9]", re.S)


def job_id() -> str:
    """Return the job of this rank, as squeue writes it: 123, or 123_4 in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def requeue_after_kill(job: str, attempt: Path, limit: int) -> None:
    """Requeue the job if its batch script was killed, unless somebody has cancelled the run or the job has been requeued
    `limit` times.
    """
    if layout.CANCELLED.of(attempt).exists() or int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= limit:
        return
    for _ in range(TRIES):
        try:
            asked = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, timeout=10)
            if KILLED.search(asked.stdout):
                subprocess.run(["scontrol", "requeue", job], check=True, timeout=10)
                print(f"{time_of_day()} the batch script was killed: the job is requeued", flush=True)
                return
        except FileNotFoundError:  # a container without SLURM's programs
            return
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{time_of_day()} {error}", flush=True)
        time.sleep(SECONDS)


def start_keeper(job: str, attempt: Path) -> None:
    """Fork the child of rank 0. It waits for SIGTERM, which SLURM sends to all processes of a step, and exits when its
    end of a pipe shows that rank 0 has ended.
    """
    limit = layout.CONFIG.read(group_at(attempt.parents[1])[0]).get("cluster", {}).get("max_requeues", 0)
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)  # rank 0 keeps the other end open until it ends; it is closed in programs that it starts
        return

    def asked(number: int, frame: FrameType | None) -> None:
        requeue_after_kill(job, attempt, limit)

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the ranks
    signal.signal(signal.SIGTERM, asked)
    os.close(write_end)
    os.read(read_end, 1)
    os._exit(0)


if __name__ == "__main__":
    place = Place.of(VARIABLES, job=job_id())
    if place.rank == 0:
        start_keeper(place.job, layout.ATTEMPT.of(Path(sys.argv[1]).absolute(), int(sys.argv[2])))
    run_rank(sys.argv[1], int(sys.argv[2]), place)
