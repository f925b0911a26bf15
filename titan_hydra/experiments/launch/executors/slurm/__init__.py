"""The executor slurm: it submits job arrays through submitit and sbatch, and reads their states from squeue and sacct."""

from titan_hydra.core.job.config.registry import ExecutorKind, register

from .keys import SlurmCluster

register(
    ExecutorKind(
        "slurm",
        f"{__package__}.executor:Slurm",
        SlurmCluster,
        here=False,
        faults=f"{__package__}.rules:faults",
        elastic=True,
        site=f"{__package__}.init:SITE",
    )
)
