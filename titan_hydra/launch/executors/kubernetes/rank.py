"""The entry point of a rank of a pod: python -m titan_hydra.launch.executors.kubernetes.rank RUN ATTEMPT JOB"""

import sys

from titan_hydra.launch.worker import Place, run_rank

VARIABLES = ("TITAN_RANK", "TITAN_RANKS", "TITAN_LOCAL_RANK", "TITAN_LOCAL_RANKS")


if __name__ == "__main__":
    directory, attempt, job = sys.argv[1:]
    # the Service, which has the same name as the Job, gives the pod of rank 0 this name
    run_rank(directory, int(attempt), Place.of(VARIABLES, job=job, host=f"{job}-0.{job}"))
