"""The entry point of a rank that srun has started: python -m titan_hydra.launch.executors.slurm.rank RUN ATTEMPT"""

import os
import sys

from titan_hydra.launch.worker import Place, run_rank

VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def job_id() -> str:
    """Return the job of this rank, as squeue writes it: 123, or 123_4 in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]), Place.of(VARIABLES, job=job_id()))
