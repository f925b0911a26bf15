"""The number of samples in one pass over the data. The launcher counts it for steps=epoch, and the job holds it as
data.samples, with the number of steps that follows from it. Ranks and resumed runs only read the two numbers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import Fault, divisors, fault_at
from titan_hydra.core.job.config.load import to_dict
from titan_hydra.core.job.config.registry import DATA_SOURCES, OBJECTIVES, resolve
from titan_hydra.core.job.config.schema import EPOCH, UNCOUNTED, Job
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.inputs import inputs_of, look_at
from titan_hydra.core.job.rules import checks

from . import samples_of, wanted_by

_counted: dict[str, int | str] = {}  # the number, or the error, of the jobs of this process that read the same samples


def samples_in_pass(job: Job) -> int:
    """Return the number of samples in one pass; UNCOUNTED if the job has a fault, which the rules report."""
    probe = copy.deepcopy(job)
    probe.data.samples = None
    # without the rules of techniques and of the machine, which a plan need not pass
    if checks.check(probe, (checks.KEYS, checks.RANKS, checks.VALUES, checks.LAYOUT, checks.FILES)) or any(faults(job)):
        return UNCOUNTED
    return _count(job)


def faults(job: Job) -> Iterator[Fault]:
    """Yield why a job with steps=epoch cannot make one pass. The job has no other fault."""
    if reason := _objection(job):
        yield Fault("steps", EPOCH, reason)
        return
    try:
        samples = _count(job)
    except ConfigError as error:
        yield Fault("steps", EPOCH, f"the samples cannot be counted: {error}")
        return
    if samples % job.data.global_batch and not _counts_nothing(job):
        reason = f"{samples:,} samples do not fill whole steps, and objective={job.objective.name} has no sample that does not count"
        yield fault_at(job, "data.global_batch", reason, *divisors(samples))


def _objection(job: Job) -> str | None:
    """Return the first reason why a job has no single pass; None if it has one."""
    typed = "type the number of steps"
    names = [source.name for source in data_sources(job.data).values()]
    endless = [name for name in names if DATA_SOURCES[name].documents]
    if job.data.name == "mixture":
        return f"the sources of a mixture end at different steps; {typed}"
    if endless:
        return (
            f"data={endless[0]} gives each slot of the batch a text of its own, without a common end; `titan data encode` "
            f"makes files for data=tokens, which can be read once, or {typed}"
        )
    if job.fault_tolerance.name != "off":
        return (
            f"fault_tolerance={job.fault_tolerance.name} leaves out the rows of a replica group that is gone; {typed}"
        )
    if job.search.name != "off":
        return f"search={job.search.name} trains its trials for several numbers of steps; {typed}"
    return None


def _count(job: Job) -> int:
    """Count the samples, or return what was counted for another cell with the same. Raises ConfigError."""
    key = _key_of_samples(job)
    if key not in _counted:
        try:
            _counted[key] = _samples_in_epoch(job)
        except ConfigError as error:
            _counted[key] = str(error)
    number = _counted[key]
    if isinstance(number, str):
        raise ConfigError(number)
    return number


def _key_of_samples(job: Job) -> str:
    """Return a text that is the same for jobs with the same samples, whatever their layout and batch."""
    keys = to_dict(job)
    data = {key: value for key, value in keys["data"].items() if key not in ("local_batch", "global_batch", "samples")}
    digests = [stored.digest for path in inputs_of(job) if (stored := look_at(path))]
    return json.dumps([data, *(keys[name] for name in ("model", "objective", "tokenizer", "seed")), digests])


def _samples_in_epoch(job: Job) -> int:
    uncounted = copy.deepcopy(job)
    uncounted.data.samples = None
    samples = samples_of(wanted_by(uncounted, "train", range(0)), job.seed)
    in_epoch = getattr(samples, "in_epoch", None)
    if in_epoch is None:
        raise ConfigError(f"data={job.data.name} has no end; type the number of steps")
    if not (number := in_epoch()):
        raise ConfigError("there is none that can be used")
    return number


def _counts_nothing(job: Job) -> bool:
    """Whether no element of the objective's blank sample counts."""
    objective = resolve(OBJECTIVES[job.objective.name].build)(job)
    return not objective.count(objective.example(1).tensors).item()
