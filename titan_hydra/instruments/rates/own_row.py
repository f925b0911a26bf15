"""Describe a job of this trainer as a row in the form of the published measurements (benchmarks/planner/published.yaml)."""

from __future__ import annotations

import json
from typing import Any

from titan_hydra.core.job.batches import microbatch_size
from titan_hydra.core.job.config.load import leaves
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.ranks import data_parallel, world_size
from titan_hydra.experiments.compose.compose import compose_unchecked

from .published import Row, mode_of_row, overrides_of

READ = (
    "model",
    "parallelism",
    "pp_schedule",
    "ac",
    "precision",
    "compile",
    "loss",
    "optimizer",
    "adapter",
    "debug.balance_experts",
)
# further sections and keys on which a prediction depends, in addition to those that a row has keys for
READ += (
    "data.local_batch",
    "data.document_mask",
)


def row_of(job: Job, name: str) -> Row:
    """Return the row of a frozen job, without measurements. Properties of the job for which a row has no key are in the
    key `overrides`, so that the row and the job have the same prediction.
    """
    degrees = job.parallelism
    row: Row = {
        "id": name,
        "model": job.model.name,
        "hardware": job.hardware.name,
        "gpus": world_size(job),
        "dp": data_parallel(job),
        "dp_kind": "hsdp" if degrees.dp_replicate > 1 else "fsdp2",
        **{degree: getattr(degrees, degree) for degree in ("tp", "cp", "pp", "ep")},
        "micro_batch": microbatch_size(job),
        "global_batch": job.data.global_batch,
        "seq_len": job.data.seq_len,
        "precision": job.precision.name,
        "recompute": job.ac.name,
        "compile": job.compile.name != "off",
    }
    if degrees.pp > 1:
        row |= {"schedule": job.pp_schedule.name, "virtual_stages": job.pp_schedule.stages_per_rank}
    row["overrides"] = []
    for _ in range(3):  # three passes: options of config groups, then options of groups inside these, then values
        row["overrides"] += _differences(job, row)
    return row


def _differences(job: Job, row: Row) -> list[str]:
    """Return overrides that make the row's job more like `job`: options of config groups if these differ, else values."""
    job_of_row = freeze(compose_unchecked(*overrides_of(row, job.hardware.name, mode_of_row(row) or "none")))
    values_of_job, values_of_row = (
        {key: value for key, _, value, _ in leaves(compared) if key.startswith(READ)} for compared in (job, job_of_row)
    )
    changed = {
        key: value
        for key, value in values_of_job.items()
        if values_of_row.get(key, value) != value and key != "model.name"
    }
    options = {key.removesuffix(".name"): value for key, value in changed.items() if key.endswith(".name")}
    return [f"{key}={_text(value)}" for key, value in (options or changed).items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "").replace(" ", "")
