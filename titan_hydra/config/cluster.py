"""The rules of cluster settings: what SLURM would refuse an hour later, or what would break the way in which ranks are started."""
from __future__ import annotations

import re
from collections.abc import Iterator

from .fault import Fault, suggest
from .schema import Job

# sbatch flags that follow from the layout, or that the batch script counts on; dropping one (null) is the site's business.
OURS = {
    "nodes": "the layout", "ntasks": "the layout", "ntasks-per-node": "the layout", "array": "the cells of a sweep",
    "job-name": "name", "output": "paths.runs", "error": "paths.runs", "signal": "cluster.stop_seconds", "requeue": "cluster.max_requeues",
    "time": "cluster.time_minutes", "partition": "cluster.partition", "account": "cluster.account", "qos": "cluster.qos",
    "constraint": "cluster.constraint", "exclude": "cluster.exclude", "reservation": "cluster.reservation", "comment": "cluster.comment",
    "cpus-per-task": "cluster.cpus_per_task",
}
SRUN_OURS = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--kill-on-bad-exit", "-K", "--wait", "-W")


def nodes_can_be_counted(job: Job) -> Iterator[Fault]:
    """On this machine devices are counted; on a cluster only its file knows how many a node has."""
    if job.cluster.executor == "slurm" and job.cluster.gpus_per_node is None:
        yield Fault("cluster.gpus_per_node", None, "cluster.executor=slurm needs it: the number of nodes follows from it")


def environment_has_legal_names(job: Job) -> Iterator[Fault]:
    """A name that the shell cannot export would end the batch script on its first lines."""
    for name in job.cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault("cluster.environment", name, "not the name of an environment variable (letters, digits and _)")


def flags_are_the_sites(job: Job) -> Iterator[Fault]:
    """Further flags of sbatch and srun must not be those that the launcher sets; srun takes a word without a dash for its program."""
    for flag, value in job.cluster.sbatch.items():
        name = flag.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            close = suggest(name.lstrip("-"), OURS)
            yield Fault("cluster.sbatch", flag, "not a flag's long name, without dashes before it, as in {mail-user: me@site}", close)
        elif name in OURS and value is not None:
            yield Fault("cluster.sbatch", flag, f"follows from {OURS[name]}")
    for argument in job.cluster.srun:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            yield Fault("cluster.srun", argument, "srun would take it for the program to run; write --flag=value in one")
        elif name in SRUN_OURS:
            yield Fault("cluster.srun", argument, "the launcher sets it, from the layout")


RULES = [nodes_can_be_counted, environment_has_legal_names, flags_are_the_sites]
