"""Proofs of layouts (`titan verify JOB`): to which layout and code a proof applies, where it is stored, what it contains.

A proof belongs to a layout, not to a run: runs that differ only in seed, steps, learning rate or data share one proof.
It is valid only for the code and the releases of torch and torchao with which it was made.
"""

from __future__ import annotations

import functools
import hashlib
import json
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import titan_hydra
from titan_hydra.core.job.config import Job, to_dict
from titan_hydra.core.job.config.load import changes_of, known_keys
from titan_hydra.core.job.config.user_code import digest_of_code
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import versions
from titan_hydra.core.job.run.records import flat
from titan_hydra.core.job.run.shapes import Fields, test_of

# Keys that the schema declares to change only what is learned, although they also change which code a step runs.
ALSO = ("optimizer.name", "data.global_batch", "train.sources")


@dataclass(frozen=True)
class Proof:
    """What `titan verify JOB` has found; the content of proof.json. `passed` in a part is None if it was not done."""

    passed: bool
    name: str
    layout: str  # layout_hash of the job
    identity: str  # hash of the job's run
    overrides: list[str]
    gpus: int
    degrees: dict[str, int]  # degrees above one
    rules: int  # number of rules that the job keeps
    warnings: list[str]
    prediction: dict[str, Any]  # of the job at full size, in the form of `titan plan --cell --json`
    # the jobs of reduced size: `ranks`, `identity`, `changes` (key: value before and after), `proofs` (cases of `titan
    # verify --json`)
    reduced: list[dict[str, Any]]
    not_shown: list[str]
    data: dict[str, Any]  # `passed`, `reason`, `source`, `steps`
    resume: dict[str, Any]  # `passed`, `reason`, `steps`, `killed_at_step`, `carried_on_from_step`, `first_other_bits`
    export: dict[str, Any]  # `passed`, `reason`, `tensors`, `differing`
    versions: dict[str, str]
    code: str  # digest of the package's Python files
    commit: str | None
    written: float
    seconds: float
    job: dict[str, Any]


def layout_hash(job: Job) -> str:
    """Return 8 hex digits that are equal for frozen jobs with the same layout. Here the layout means the values of all
    keys that change the technique or the work of a step.
    """
    known, values = known_keys(), flat(to_dict(job))
    chosen = {
        key: value
        for key, value in values.items()
        if key in ALSO
        or (
            (key not in known or known[key].metadata["identity"])
            and {*changes_of(key)[1].split()} & {"technique", "work"}
        )
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]


@functools.cache
def digest_of_package() -> str:
    """Return the digest of this package's Python files."""
    root = Path(titan_hydra.__file__).parent
    return digest_of_code({file.relative_to(root).as_posix(): file for file in root.rglob("*.py")})


def folder_of_proof(job: Job) -> Path:
    """Return the folder of the proof that a frozen job's layout has, or would have, with this code."""
    return layout.PROOFS.of(layout.runs_of(job)) / f"{layout_hash(job)}-{digest_of_package()}"


def read_proof(folder: Path) -> Proof | None:
    """Read the proof in a folder; None if there is none, or if it is damaged or of another version."""
    recorded = layout.PROOF.read(folder)
    intact = test_of(Fields(typing.get_type_hints(Proof)))
    return Proof(**{field.name: recorded[field.name] for field in fields(Proof)}) if intact(recorded) else None


def proof_of(job: Job) -> Proof | None:
    """Return the proof of a frozen job's layout that counts: it passed, with this code and this release of torch."""
    proof = read_proof(folder_of_proof(job))
    right = proof and (proof.layout, proof.code) == (layout_hash(job), digest_of_package())
    return proof if right and proof.passed and _released(proof.versions) == _released(versions()) else None


def _released(installed: dict[str, str]) -> list[str]:
    """Return the releases of torch and torchao. Builds of the same release for CPUs and for GPUs count as equal."""
    return [installed.get(package, "").partition("+")[0] for package in ("torch", "torchao")]
