"""The entry point of a rank of a pod: python -m titan_hydra.experiments.launch.executors.kubernetes.rank RUN ATTEMPT JOB"""

import sys

from titan_hydra.core.train.worker import Place, run_rank

from .manifest import NAME

VARIABLES = ("TITAN_RANK", "TITAN_RANKS", "TITAN_LOCAL_RANK", "TITAN_LOCAL_RANKS")


if __name__ == "__main__":
    directory, attempt, job = sys.argv[1:]
    # the namespace's Service gives the pod of rank 0 this name
    run_rank(directory, int(attempt), Place.of(VARIABLES, job=job, host=f"{job}-0.{NAME}"))
