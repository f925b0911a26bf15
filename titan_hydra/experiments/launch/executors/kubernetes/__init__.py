"""The executor kubernetes: it creates an Indexed Job for each cell by kubectl, and reads the states of Jobs and pods."""

from titan_hydra.core.job.config.registry import ExecutorKind, register

from .keys import KubernetesCluster

register(
    ExecutorKind(
        "kubernetes",
        f"{__package__}.executor:Kubernetes",
        KubernetesCluster,
        here=False,
        faults=f"{__package__}.rules:faults",
        warnings=f"{__package__}.rules:rights_beyond_the_level",
        site=f"{__package__}.init:SITE",
    )
)
