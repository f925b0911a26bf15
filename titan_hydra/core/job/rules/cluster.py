"""The rules of a job's executor: what every executor needs, and the executor's own rules."""

import os
from collections.abc import Iterator

from titan_hydra.core.job.config.fault import Fault, counted, fault_at, multiples_around
from titan_hydra.core.job.config.registry import EXECUTORS, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import devices_here, runs_here

from .replicas import too_many


def nodes_can_be_counted(job: Job) -> Iterator[Fault]:
    """For a job on another machine, the cluster's file must give the number of devices of a node. On this machine the
    devices are counted.
    """
    executor = job.cluster.executor
    if not EXECUTORS[executor].here and job.cluster.gpus_per_node is None:
        yield fault_at(
            job, "cluster.gpus_per_node", f"cluster.executor={executor} needs it: the number of nodes follows from it"
        )


def executor_takes_its_keys(job: Job) -> Iterator[Fault]:
    """Values of the executor's own keys fit together."""
    if faults := resolve(EXECUTORS[job.cluster.executor].faults):
        yield from faults(job)


def ranks_find_their_code(job: Job) -> Iterator[Fault]:
    """Ranks in processes of their own import the copy of the code that lies in the folder of runs. PYTHONPATH, by which
    they find it, cannot name a folder with a colon.
    """
    runs = os.path.abspath(os.path.expanduser(job.paths.runs))
    if os.pathsep in runs and not EXECUTORS[job.cluster.executor].single:
        reason = "PYTHONPATH, by which the ranks find the code in this folder, separates folders by colons"
        yield Fault("paths.runs", runs, reason, legal=(runs.replace(os.pathsep, "-"),))


def environment_leads_to_the_code(job: Job) -> Iterator[Fault]:
    """No environment variable of the user's replaces what the launcher sets, or what Python needs to find the code."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME"):
        if name in getattr(job.cluster, "environment", {}):
            reason = "the launcher sets it; a line of cluster.setup may add to PYTHONPATH"
            yield Fault("cluster.environment", name, reason)


def ranks_fit_the_cluster(job: Job) -> Iterator[Fault]:
    """Whole nodes are allocated: the ranks fit on one node, or are a multiple of a node's devices."""
    if job.comm.name == "fake":  # a job with comm=fake is a single process
        if not 0 <= job.comm.rank < job.gpus:
            yield fault_at(job, "comm.rank", f"the world has {counted(job.gpus, 'rank')}", 0, job.gpus - 1)
        return
    executor = job.cluster.executor
    if EXECUTORS[executor].single and job.gpus != 1:
        yield fault_at(job, "gpus", f"cluster.executor={executor} runs one rank in this process; use local for more", 1)
    node = job.cluster.gpus_per_node or (devices_here() if runs_here(job) else None)
    if not node:
        return
    if not runs_here(job):
        if job.gpus > node and job.gpus % node:
            yield fault_at(job, "gpus", f"not whole nodes of {node}", *multiples_around(job.gpus, node))
    elif job.gpus * job.fault_tolerance.replicas > node:
        yield too_many(job, node)


def elastic_jobs_can_change_their_nodes(job: Job) -> Iterator[Fault]:
    """An elastic run changes its layout by a restart, so the executor must be able to restart it on another number of
    nodes. Replica groups handle a lost node in another way: the remaining groups go on without a restart.
    """
    if not job.elastic:
        return
    executor = job.cluster.executor
    if not EXECUTORS[executor].elastic:
        legal = [name for name, kind in EXECUTORS.items() if kind.elastic]
        yield fault_at(
            job,
            "elastic",
            f"cluster.executor={executor} starts a run on one number of devices, and {' or '.join(legal)} on those that it "
            "gets; here, titan resume RUN gpus=N changes the layout of a run that was stopped",
            [],
        )
    if job.fault_tolerance.name != "off":
        yield fault_at(
            job,
            "elastic",
            f"fault_tolerance={job.fault_tolerance.name}: the replica groups that are left go on without a start, and the "
            "state that they share is not cut anew",
            [],
        )
    if job.launch.packed:
        yield fault_at(job, "launch.packed", "an elastic run has a job of its own", False)
    if job.comm.name == "fake":
        yield fault_at(job, "elastic", "comm=fake runs one process, whatever the layout", [])


def failures_end_only_lines_here(job: Job) -> Iterator[Fault]:
    """launch.py sees a failed cell end only where it waits for the cells: on this machine."""
    if job.launch.stop_at_failure and not runs_here(job):
        reason = f"cluster.executor={job.cluster.executor} starts cells that do not depend on each other"
        yield fault_at(job, "launch.stop_at_failure", reason, False)


RULES = [
    nodes_can_be_counted,
    ranks_find_their_code,
    environment_leads_to_the_code,
    executor_takes_its_keys,
    elastic_jobs_can_change_their_nodes,
    failures_end_only_lines_here,
]


def executors_warn(job: Job) -> Iterator[Fault]:
    """Yield the warnings of the job's executor. They are no faults."""
    if warnings := resolve(EXECUTORS[job.cluster.executor].warnings):
        yield from warnings(job)
