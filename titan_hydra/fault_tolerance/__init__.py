"""Replica groups. The loop calls them through the interface of train/groups.py."""

from titan_hydra.observe.watchdog import Watchdog
from titan_hydra.runs.run import Run
from titan_hydra.train.groups import Groups
from titan_hydra.train.trainer import Trainer


def open_groups(trainer: Trainer, run: Run, watch: Watchdog) -> Groups:
    """Return the groups that the job's fault_tolerance names."""
    if trainer.job.fault_tolerance.name == "torchft":
        from .per_step import PerStep

        return PerStep(trainer, run, watch)
    from .replicas import Replicas

    return Replicas(trainer, run, watch)
