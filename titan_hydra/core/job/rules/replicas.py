"""The rules for replica groups: what Local SGD, DiLoCo and torchft need of a job."""

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from titan_hydra.core.job.config.fault import Fault, counted, divisors, fault_at, required
from titan_hydra.core.job.config.registry import EXECUTORS
from titan_hydra.core.job.config.schema import Job


def fragments_are_whole_layers(job: Job) -> Iterator[Fault]:
    """A fragment is a set of layers. Within sync_every steps each fragment is synchronized once, at even intervals."""
    config = job.fault_tolerance
    if config.name not in ("local_sgd", "diloco"):
        return
    if config.sync_every % config.fragments:
        yield Fault(
            "fault_tolerance.fragments",
            config.fragments,
            f"sync_every={config.sync_every} steps cannot be divided by it",
            legal=divisors(config.sync_every),
        )
    if config.fragments > job.model.n_layers:
        yield Fault(
            "fault_tolerance.fragments",
            config.fragments,
            f"the model has {counted(job.model.n_layers, 'layer')}",
            legal=(job.model.n_layers,),
        )


def torchft_is_there(job: Job) -> Iterator[Fault]:
    """torchft is installed in this Python, which the ranks of replica groups use too."""
    if job.fault_tolerance.name == "torchft" and not PathFinder.find_spec("torchft", sys.path):
        yield Fault(
            "fault_tolerance.name",
            "torchft",
            "is not installed: pip install -e '.[torchft]'",
            legal=("local_sgd", "diloco"),
        )


def replica_groups_are_processes(job: Job) -> Iterator[Fault]:
    """When a replica group dies, the other groups must survive. So each group is a job of its own, or consists of
    processes on this machine.
    """
    if job.fault_tolerance.name == "off":
        return
    if EXECUTORS[executor := job.cluster.executor].single and job.fault_tolerance.replicas > 1:
        yield Fault(
            "cluster.executor",
            executor,
            "runs one process, and each replica group needs at least one",
            legal=("local",),
        )
    yield from required(
        job,
        ("launch.packed", False, "replica groups are jobs of their own, which run at the same time"),
        ("comm.name", "default", "replica groups need real processes, and fake process groups run one rank"),
    )


def too_many(job: Job, node: int) -> Fault:
    """Return the fault of a job that needs more devices than this machine has."""
    groups = job.fault_tolerance.replicas
    if groups > node:
        return Fault("fault_tolerance.replicas", groups, f"this machine has {counted(node, 'device')}", legal=(node,))
    of_groups = f", for {groups} replica groups" if groups > 1 else ""
    return fault_at(job, "gpus", f"this machine has {counted(node, 'device')}{of_groups}", node // groups)


RULES = [fragments_are_whole_layers, torchft_is_there, replica_groups_are_processes]
