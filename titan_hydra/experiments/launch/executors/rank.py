"""The entry point of a rank that a supervisor (supervisor.py) has started:

python -m titan_hydra.experiments.launch.executors.rank RUN ATTEMPT [JOB HOST]
"""

import sys

from titan_hydra.core.train.worker import Place, run_rank

VARIABLES = ("TITAN_RANK", "TITAN_RANKS", "TITAN_LOCAL_RANK", "TITAN_LOCAL_RANKS")


if __name__ == "__main__":
    directory, attempt, *job_and_host = sys.argv[1:]
    run_rank(directory, int(attempt), Place.of(VARIABLES, False, *job_and_host))
