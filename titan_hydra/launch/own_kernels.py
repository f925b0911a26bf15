"""Refuse a ring for a family that brings an attention kernel of its own, before its ranks would (parallel/context.py)."""

import json
import os
import subprocess
import sys

from titan_hydra.config import Fault, Job, to_dict
from titan_hydra.config.family import family_of
from titan_hydra.config.registry import CP_ROTATIONS

LIMIT = 120  # seconds for building the model on the meta device in another process, which imports torch


def under_a_ring(jobs: list[Job]) -> list[Fault]:
    """Return a fault for each job whose ring would replace a kernel of the user's by torch's. The model is built in
    another process, once for each family; where that fails, as without torch, the ranks will tell.
    """
    found: dict[str, list[str]] = {}
    faults = []
    for job in jobs:
        rotation, family = CP_ROTATIONS[job.parallelism.cp_rotate], family_of(job.model)
        if job.parallelism.cp == 1 or not rotation.ring or family.config.__module__.startswith("titan_hydra."):
            continue
        if family.name not in found:
            found[family.name] = _own_kernels(job)
        if own := found[family.name]:
            reason = f"a ring replaces the attention kernel of {family.name}, {' and '.join(own)}, by torch's"
            faults.append(Fault("parallelism.cp_rotate", rotation.name, reason, legal=("ulysses",)))
    return faults


def _own_kernels(job: Job) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "titan_hydra.verify.own_kernels"]
    try:
        done = subprocess.run(
            command, input=json.dumps(to_dict(job)), env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        return json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
