"""Fill in what follows from a job's keys."""

import copy
import math

from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.registry import DATA_SOURCES, EXECUTORS, resolve
from titan_hydra.core.job.config.schema import UNCOUNTED, Job
from titan_hydra.core.job.config.source import DigestedSource
from titan_hydra.core.job.config.user_code import digest

from .batches import samples_at_once
from .config.source import data_sources
from .inputs import digest_of_files
from .ranks import DEGREES, data_parallel, devices_here, runs_here


def freeze(job: Job) -> Job:
    """Return a copy of a job with every derived value filled in: ranks, the degree given as -1, the global batch, the
    digests of the user's modules and of rollouts, what a model's files say, the steps of steps=epoch.

    Values that do not divide evenly are left as they are; `check` reports them.
    """
    job = copy.deepcopy(job)
    if fill := family_of(job.model).fill:
        job.model = fill(job.model)
    if job.train.imports and job.train.sources is None:
        job.train.sources = digest(job.train.imports)
    for source in data_sources(job.data).values():
        if isinstance(source, DigestedSource) and source.digest is None and source.path:
            source.digest = digest_of_files(source.path, DATA_SOURCES[source.name].suffixes)
    degrees = job.parallelism
    free = [name for name in ("dp_replicate", "dp_shard") if getattr(degrees, name) == -1]
    fixed = math.prod(max(getattr(degrees, name), 1) for name in DEGREES)
    if job.gpus is None:
        node = 1 if EXECUTORS[job.cluster.executor].single else job.cluster.gpus_per_node or devices_here() or 1
        # the replica groups of a job on this machine share its devices
        groups = max(job.fault_tolerance.replicas, 1) if runs_here(job) else 1
        job.gpus = max(node // fixed // groups, 1) * fixed if free else fixed
    if len(free) == 1 and job.gpus % fixed == 0 and job.gpus:
        setattr(degrees, free[0], job.gpus // fixed)
    if job.data.global_batch is None and data_parallel(job) > 0 and job.data.local_batch > 0:
        job.data.global_batch = samples_at_once(job)
    if job.data.samples == UNCOUNTED and job.data.global_batch:
        job.data.samples = resolve("titan_hydra.core.data.epoch:samples_in_pass")(job)
    if job.data.samples and job.data.global_batch:
        job.steps = math.ceil(job.data.samples / job.data.global_batch)
    return job
