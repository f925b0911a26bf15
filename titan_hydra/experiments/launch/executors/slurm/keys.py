"""The keys of `cluster` that the executor slurm adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.operation import Cluster
from titan_hydra.core.job.config.ranges import ANY, COUNT, DEGREE, NATURAL, PATH, WORD, Interval


@dataclass
class SlurmCluster(Cluster):
    partition: str | None = key(None, "SLURM partition", WORD, identity=False)
    account: str | None = key(None, "SLURM account", WORD, identity=False)
    qos: str | None = key(None, "SLURM quality of service", WORD, identity=False)
    constraint: str | None = key(None, "features that nodes must have", WORD, identity=False)
    exclude: list[str] = key(list, "nodes never to use", WORD, identity=False)
    reservation: str | None = key(None, "SLURM reservation", WORD, identity=False)
    comment: str | None = key(None, "sbatch --comment", identity=False)
    cpus_per_task: int | None = key(
        None,
        "CPU cores of a rank (a node's cores / gpus_per_node); null: SLURM's default, often 1",
        Interval(1, 100_000),
        identity=False,
    )
    sbatch: dict[str, Any] = key(
        dict,
        "further sbatch flags, such as {mail-user: me@site, exclusive: true}; a flag set to null is left out",
        ANY,
        identity=False,
    )
    srun: list[str] = key(list, "further srun arguments, such as --container-image=IMAGE", identity=False)
    setup: list[str] = key(list, "shell lines before the ranks start: module load, source", identity=False)
    environment: dict[str, str] = key(
        dict, "environment variables of the ranks, added to those of the batch script", ANY, identity=False
    )
    python: str | None = key(
        None, "Python interpreter of the ranks (a path); null: that of launch.py", PATH, identity=False
    )
    max_requeues: int = key(
        100, "number of times that a preempted or timed-out job is requeued before it fails", NATURAL, identity=False
    )

    nodes_min: int | None = key(
        None, "smallest number of nodes for which elastic=[auto] plans a layout; null: 1", DEGREE, identity=False
    )
    grow_minutes: int | None = key(
        None,
        "minutes between two checks of an elastic job for free nodes; if a larger layout would fit on them, the run saves a "
        "checkpoint and is requeued, at most cluster.max_requeues times in addition to the other requeues; null: no checks, so the "
        "run grows only if it is requeued for another reason",
        COUNT,
        identity=False,
    )

    def warning_seconds(self, minutes: int | None) -> int:
        """Return how many seconds before the end of a job its ranks are asked to stop. `minutes` is the job's time
        limit; None if it has none.
        """
        return self.stop_seconds if minutes is None else min(self.stop_seconds, 30 * minutes)
