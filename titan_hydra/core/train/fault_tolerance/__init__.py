"""Replica groups. The training loop calls them through the interface in core/train/groups.py."""

from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.groups import Groups
from titan_hydra.core.train.observe.watchdog import Watchdog
from titan_hydra.core.train.trainer import Trainer


def open_groups(trainer: Trainer, run: Run, watch: Watchdog) -> Groups:
    """Return the implementation of `Groups` that the job's fault_tolerance names."""
    if trainer.job.fault_tolerance.name == "torchft":
        from .per_step import PerStep

        return PerStep(trainer, run, watch)
    from .replicas import Replicas

    return Replicas(trainer, run, watch)
