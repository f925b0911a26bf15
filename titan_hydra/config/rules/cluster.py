"""The rules of a job's executor: what every executor needs, and the executor's own rules."""

from collections.abc import Iterator

from titan_hydra.config.fault import Fault
from titan_hydra.config.registry import EXECUTORS, resolve
from titan_hydra.config.schema import Job


def nodes_can_be_counted(job: Job) -> Iterator[Fault]:
    """For a job on another machine, the cluster's file must give the number of devices of a node. On this machine the
    devices are counted.
    """
    executor = job.cluster.executor
    if not EXECUTORS[executor].here and job.cluster.gpus_per_node is None:
        yield Fault("cluster.gpus_per_node", None, f"cluster.executor={executor} needs it: the number of nodes follows from it")


def executor_takes_its_keys(job: Job) -> Iterator[Fault]:
    """Values of the executor's own keys fit together."""
    if faults := resolve(EXECUTORS[job.cluster.executor].faults):
        yield from faults(job)


RULES = [nodes_can_be_counted, executor_takes_its_keys]
