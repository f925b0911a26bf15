"""Suggest what to try after a failure. Suggested overrides can be typed as they are: they are derived from the run's
config.json, and the rules of `core/job/rules` accept them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from titan_hydra.core.base.errors import ConfigError, Kind
from titan_hydra.core.job.config import Job, from_dict
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.core.job.config.load import picked_anew
from titan_hydra.core.job.config.registry import executor_named
from titan_hydra.core.job.recomputation import modes_that_keep_less
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.code import import_modules
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.core.job.run.run import group_at


def hint(failure: Failure) -> str:
    """Return what to try next after a failure. Return "" if there is no suggestion, or if the run's config.json cannot
    be used: it is missing, was written by another version, or names modules that are not imported here.
    """
    if failure.attempt is None:
        return ""
    directory, _ = group_at(failure.attempt.parent.parent)
    try:
        import_modules(directory)
        job = from_dict(Job, layout.CONFIG.read(directory))
        of_executor = executor_named(job.cluster.executor).hint(job, failure)
    except (KeyError, TypeError, AttributeError, OSError, ConfigError):
        return ""
    saved = any(checkpoints.complete(layout.CHECKPOINTS.of(directory)))
    again = f"launch.retry=failed {'goes on from the newest checkpoint' if saved else 'starts it from step 1'}"
    match failure.kind:
        case Kind.OUT_OF_MEMORY if failure.rank is None:
            return f"more memory of the host{f' for the job, as {of_executor},' if of_executor else ''} or a smaller data.prefetch"
        case Kind.OUT_OF_MEMORY:
            return next(
                less_memory(job),
                "more ranks that share the parameters (parallelism.dp_shard) or the layers (parallelism.tp)",
            )
        case Kind.HANG:
            return f"titan logs {quoted([str(directory)])} --hang"
        case Kind.NOT_FINITE:
            return f"a lower optimizer.lr than {job.optimizer.lr:g}, or debug=anomaly to see which operation it was"
        case Kind.TIME_LIMIT if job.cluster.time_minutes:
            return f"{again}; or cluster.time_minutes={2 * job.cluster.time_minutes}"
        case Kind.DISK:
            return f"room on the file system of {quoted([str(directory)])} (df -h, quota -s); then {again}"
        case Kind.PREEMPTED if of_executor:
            return f"{again}; or {of_executor}"
    return of_executor


def less_memory(job: Job) -> Iterator[str]:
    """Yield overrides with which the job needs less device memory: first those with more recomputation, then a smaller
    local batch.
    """
    faults = check(job)
    for name in modes_that_keep_less(job.ac.name):
        tried = copy.deepcopy(job)
        tried.ac = picked_anew(job.ac, name)
        if check(tried) == faults:
            yield f"ac={name}"
    tried = copy.deepcopy(job)
    tried.data.local_batch //= 2
    # the global batch stays the same, so that the run learns the same
    if tried.data.local_batch and check(tried) == faults:
        yield f"data.local_batch={tried.data.local_batch} data.global_batch={tried.data.global_batch}"
