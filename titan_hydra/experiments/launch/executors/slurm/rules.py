"""Checks of SLURM's keys. They find what sbatch or srun would refuse, and what would prevent the ranks from starting."""

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

from titan_hydra.core.job.config.fault import Fault, fault_at, suggest
from titan_hydra.core.job.config.field import elements
from titan_hydra.core.job.config.ranges import PATH
from titan_hydra.core.job.config.schema import Job

from .keys import SlurmCluster

# flags of sbatch that the layout determines or that the batch script needs, each with the key that sets it. A site may
# leave out one of these flags by setting it to null.
OURS = {
    "nodes": "the layout",
    "ntasks": "the layout",
    "ntasks-per-node": "the layout",
    "array": "the cells of a sweep",
    "job-name": "name",
    "output": "paths.runs",
    "error": "paths.runs",
    "signal": "cluster.stop_seconds",
    "requeue": "cluster.max_requeues",
    "time": "cluster.time_minutes",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "reservation": "cluster.reservation",
    "comment": "cluster.comment",
    "cpus-per-task": "cluster.cpus_per_task",
}
# flags with which sbatch does not submit a job, or submits another one, each with what it does
UNUSABLE = {
    "test-only": "sbatch would check the job and submit nothing; launch.mode=dry checks it",
    "wait": "sbatch would return only when the job has ended; launch.wait=true waits for all cells",
    "chdir": "relative paths would mean other files on the node; jobs start in the folder in which the line is typed",
    "wrap": "sbatch would run it in place of the ranks",
    "help": "sbatch would print a page and submit nothing",
    "usage": "sbatch would print a page and submit nothing",
    "version": "sbatch would print its version and submit nothing",
}
# keys whose values stand in #SBATCH lines of the batch script
SBATCH = ("partition", "account", "qos", "constraint", "exclude", "reservation", "comment", "sbatch")
# START: seconds that ranks may need until their first step; EARLY: how many seconds too early SLURM's signal may come
START, EARLY = (
    60,
    60,
)
SRUN_OURS = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--kill-on-bad-exit", "-K", "--wait", "-W")
READ_ONLY = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")


def faults(job: Job) -> Iterator[Fault]:
    """Yield the faults in the keys of a job on SLURM."""
    cluster: Any = job.cluster
    yield from environment_has_legal_names(cluster)
    yield from flags_are_the_sites(cluster)
    yield from text_reaches_the_script_as_it_is(cluster, job.paths.runs)
    yield from time_suffices_to_start_and_stop(cluster)
    yield from keys_of_elastic_jobs_have_an_effect(job)


def environment_has_legal_names(cluster: SlurmCluster) -> Iterator[Fault]:
    """Each environment variable has a name that a shell can export; another name would make the batch script fail at
    once.
    """
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault("cluster.environment", name, "not the name of an environment variable (letters, digits and _)")
        elif name in READ_ONLY:
            yield Fault("cluster.environment", name, "bash lets nobody set it, so the batch script would end there")


def flags_are_the_sites(cluster: SlurmCluster) -> Iterator[Fault]:
    """Additional flags of sbatch and srun are none of the flags that the launcher sets. Each additional argument of
    srun begins with a dash, because srun would take any other argument for the program to run.
    """
    for flag, value in cluster.sbatch.items():
        name = flag.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            close = suggest(name.lstrip("-"), OURS)
            yield Fault(
                "cluster.sbatch",
                flag,
                "not a flag's long name, without dashes before it, as in {mail-user: me@site}",
                close,
            )
        elif name in OURS and value is not None:
            yield Fault("cluster.sbatch", flag, f"follows from {OURS[name]}")
        elif name in UNUSABLE and value not in (None, False):
            yield Fault("cluster.sbatch", flag, UNUSABLE[name])
    for argument in cluster.srun:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            yield Fault(
                "cluster.srun", argument, "srun would take it for the program to run; write --flag=value as one word"
            )
        elif name in SRUN_OURS:
            yield Fault("cluster.srun", argument, "the launcher sets it, from the layout")


def text_reaches_the_script_as_it_is(cluster: SlurmCluster, folder: str) -> Iterator[Fault]:
    """Text in #SBATCH lines has no backslash, as sbatch drops backslashes. The path of the runs also has no control
    characters, such as a line feed.
    """
    for key in SBATCH:
        for text in elements(getattr(cluster, key)):
            if isinstance(text, str) and "\\" in text:
                yield Fault(f"cluster.{key}", text, "sbatch drops the backslash")
    runs = os.path.abspath(os.path.expanduser(folder))
    if (reason := PATH.objection(runs)) or "\\" in runs:
        yield Fault("paths.runs", runs, reason or "sbatch drops the backslash")


def time_suffices_to_start_and_stop(cluster: SlurmCluster) -> Iterator[Fault]:
    """A job has time for at least one step before it is asked to stop; otherwise it would be requeued for ever. SLURM
    may send the stop signal up to a minute too early.
    """
    minutes = cluster.time_minutes
    if minutes:
        enough = next(some for some in itertools.count(1) if 60 * some - cluster.warning_seconds(some) - EARLY >= START)
        if minutes < enough:
            stop = f"{cluster.warning_seconds(minutes)} s, and SLURM may signal {EARLY} s early"
            yield Fault(
                "cluster.time_minutes", minutes, f"too short to start ({START} s) and to stop ({stop})", legal=(enough,)
            )


def keys_of_elastic_jobs_have_an_effect(job: Job) -> Iterator[Fault]:
    """nodes_min and grow_minutes are set only for jobs on which they have an effect."""
    cluster: Any = job.cluster
    if cluster.grow_minutes is not None and not job.elastic:
        yield fault_at(job, "cluster.grow_minutes", "only a job with elastic=[...] can grow", None)
    if cluster.nodes_min is not None and "auto" not in job.elastic:
        yield fault_at(
            job,
            "cluster.nodes_min",
            "the planner's layouts begin with this number of nodes, and elastic has no auto",
            None,
        )
