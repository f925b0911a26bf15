"""The rules of a job's executor: what every executor needs, and the executor's own rules."""

from collections.abc import Iterator

from titan_hydra.config.fault import Fault, counted, multiples_around
from titan_hydra.config.registry import EXECUTORS, resolve
from titan_hydra.config.schema import Job
from titan_hydra.job.ranks import devices_here, runs_here

from .replicas import too_many


def nodes_can_be_counted(job: Job) -> Iterator[Fault]:
    """For a job on another machine, the cluster's file must give the number of devices of a node. On this machine the
    devices are counted.
    """
    executor = job.cluster.executor
    if not EXECUTORS[executor].here and job.cluster.gpus_per_node is None:
        yield Fault(
            "cluster.gpus_per_node", None, f"cluster.executor={executor} needs it: the number of nodes follows from it"
        )


def executor_takes_its_keys(job: Job) -> Iterator[Fault]:
    """Values of the executor's own keys fit together."""
    if faults := resolve(EXECUTORS[job.cluster.executor].faults):
        yield from faults(job)


def ranks_fit_the_cluster(job: Job) -> Iterator[Fault]:
    """Whole nodes are allocated: the ranks fit on one node, or are a multiple of a node's devices."""
    if job.comm.name == "fake":  # one process, whatever the number of ranks
        if not 0 <= job.comm.rank < job.gpus:
            yield Fault(
                "comm.rank", job.comm.rank, f"the world has {counted(job.gpus, 'rank')}", legal=(0, job.gpus - 1)
            )
        return
    executor = job.cluster.executor
    if EXECUTORS[executor].single and job.gpus != 1:
        yield Fault(
            "gpus",
            job.gpus,
            f"cluster.executor={executor} runs one rank in this process; use local for more",
            legal=(1,),
        )
    node = job.cluster.gpus_per_node or (devices_here() if runs_here(job) else None)
    if not node:
        return
    if not runs_here(job):
        if job.gpus > node and job.gpus % node:
            yield Fault("gpus", job.gpus, f"not whole nodes of {node}", legal=multiples_around(job.gpus, node))
    elif job.gpus * job.fault_tolerance.replicas > node:
        yield too_many(job, node)


RULES = [nodes_can_be_counted, executor_takes_its_keys]
