"""Refuse a ring for a family that brings an attention kernel of its own, before its ranks would (core/parallel/context.py)."""

import json
import os
import subprocess
import sys

from titan_hydra.core.job.config import Fault, Job, to_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import fault_at
from titan_hydra.core.job.config.registry import CP_ROTATIONS

LIMIT = 120  # seconds for building the model on the meta device in another process, which imports torch


def under_a_ring(jobs: list[Job]) -> list[Fault]:
    """Return a fault for each job whose ring would replace a kernel of the user's by torch's. The models are built in
    other processes, one for each list of the user's modules; where that fails, as without torch, the ranks will tell.
    """
    rings = [
        job
        for job in jobs
        if _has_a_ring(job) and not family_of(job.model).config.__module__.startswith("titan_hydra.")
    ]
    of_modules: dict[str, dict[str, Job]] = {}  # each model is built once, for each list of modules
    for job in rings:
        of_modules.setdefault(_modules(job), {})[_model(job)] = job
    kernels_by_model = {
        (modules, model): kernels
        for modules, models in of_modules.items()
        for model, kernels in zip(models, _own_kernels(list(models.values())), strict=False)
    }
    faults = []
    for job in rings:
        if kernels := kernels_by_model.get((_modules(job), _model(job))):
            reason = f"a ring replaces the attention kernel of {job.model.family}, {' and '.join(kernels)}, by torch's"
            faults.append(fault_at(job, "parallelism.cp_rotate", reason, "ulysses"))
    return faults


def _has_a_ring(job: Job) -> bool:
    return job.parallelism.cp > 1 and CP_ROTATIONS[job.parallelism.cp_rotate].ring


def _modules(job: Job) -> str:
    """Return what the ranks of a job import of the user's, as a text."""
    return json.dumps([job.train.imports, job.train.sources])


def _model(job: Job) -> str:
    """Return all keys that a family gets when it builds a model, as a text."""
    return json.dumps([to_dict(job)["model"], job.data.seq_len], sort_keys=True)


def _own_kernels(jobs: list[Job]) -> list[list[str]]:
    """Return the names of the kernels of each job's model; [] if the models cannot be built."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "titan_hydra.core.train.own_kernels"]
    given = json.dumps([to_dict(job) for job in jobs])
    try:
        done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=LIMIT)
        return json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
