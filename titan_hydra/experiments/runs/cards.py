"""Certificates of layouts (`titan certify`): to which layout and code a certificate applies, where it is stored, and
what it contains.

A certificate belongs to a layout, not to a run: runs that differ only in seed, steps, learning rate or data share one
certificate. It is valid only for the code and the releases of torch and torchao with which the layout was proven.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import titan_hydra
from titan_hydra.core.base.versions import versions
from titan_hydra.core.job.config import Job, to_dict
from titan_hydra.core.job.config.load import changes_of, known_keys
from titan_hydra.core.job.config.user_code import digest_of_code
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import flat

# Keys that the schema declares to change only what is learned, although they also change which code a step runs.
ALSO = ("optimizer.name", "data.global_batch", "train.sources")
MEASURED = (
    "steps",
    "final_loss",
    "validation_loss",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "goodput",
    "device",
    "world_size",
)


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


def folder_of_card(job: Job) -> Path:
    """Return the folder of the certificate that a frozen job's layout has, or would have, with this code."""
    runs = Path(job.paths.runs).expanduser().absolute()
    return layout.CARDS.of(runs) / f"{layout_hash(job)}-{digest_of_package()}"


def read_card(job: Job) -> dict[str, Any]:
    """Return the certificate of a frozen job's layout for this code and this release of torch; {} if there is none."""
    card = layout.CARD.read(folder_of_card(job))
    right = card.get("layout") == layout_hash(job) and card.get("code") == digest_of_package()
    return card if right and card["passed"] and released(card["versions"]) == released(versions()) else {}


def released(found: dict[str, str]) -> list[str]:
    """Return the releases of torch and torchao. Builds of the same release for CPUs and for GPUs count as equal."""
    return [found.get(package, "").partition("+")[0] for package in ("torch", "torchao")]


def measured_of(directory: Path) -> dict[str, Any]:
    """Return the figures that a finished run has measured; {} for a run that is not done."""
    result = layout.RESULT.read(directory)
    if result.get("status") != "done":
        return {}
    return {"run": directory.name, **{name: result.get(name) for name in MEASURED}}


def with_measured(card: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a card with a run's figures, which replace earlier figures of the same run."""
    others = [one for one in card["measured"] if one["run"] != measured["run"]]
    return {**card, "measured": [*others, measured]}


def same_code(card: dict[str, Any], directory: Path) -> bool:
    """Whether a run was started with the same commit and the same uncommitted changes as the card."""
    environment = layout.ENV.read(directory)
    return code_state(environment) == card["code_state"]


def code_state(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the commit in a recorded environment (env.json), and a digest of the uncommitted changes in it."""
    diff = environment.get("git_diff")
    return {"git_sha": environment.get("git_sha"), "git_diff": diff and hashlib.sha256(diff.encode()).hexdigest()[:16]}
