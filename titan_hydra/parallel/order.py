"""The actions of each pipeline rank in order, from torch's own schedules and without a process group.

    python -m titan_hydra.parallel.order config.json ...

prints them as JSON, for programs that do not import torch: for each configuration a list of ranks, each a list of [stage, one of F B I W,
microbatch]; null if the file of a schedule or configuration is gone.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from titan_hydra.config import Job, from_dict
from titan_hydra.config.registry import PIPELINE_SCHEDULES, resolve
from titan_hydra.config.rules import pipeline as layout
from titan_hydra.config.rules.pipeline import Action

KINDS = ("F", "B", "I", "W")  # what is left out is communication


def actions_of_ranks(job: Job) -> list[list[Action]]:
    """Return the computations of every pipeline rank of a job, in order."""
    schedule = job.pp_schedule
    if schedule.name == "csv":
        return layout.read_schedule(schedule.csv)
    if schedule.name in ("gpipe", "1f1b"):
        return [_one_stage(rank, job) for rank in range(job.parallelism.pp)]
    stages = [_stage(index, job) for index in layout.stages_of_ranks(job)[0]]
    order = resolve(PIPELINE_SCHEDULES[schedule.name].schedule)(stages, n_microbatches=layout.microbatches(job)).pipeline_order
    return [[action for step in order[rank] if step for action in _computations(step)] for rank in sorted(order)]


def _one_stage(rank: int, job: Job) -> list[Action]:
    """Return the actions of ScheduleGPipe and Schedule1F1B. torch's own table of 1F1B has wrong microbatches on the last rank (2.13)."""
    number = layout.microbatches(job)
    ahead = number if job.pp_schedule.name == "gpipe" else min(number, job.parallelism.pp - rank)
    forward, backward = [(rank, "F", index) for index in range(number)], [(rank, "B", index) for index in range(number)]
    alternating = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return [*forward[:ahead], *alternating, *backward[number - ahead:]]


def _computations(step) -> list[Action]:
    """Return the computations of a step in torch's table; a step that overlaps a forward with a backward has both."""
    parts = [(part.stage_index, part.computation_type.value, part.microbatch_index) for part in step.sub_actions or (step,)]
    return [part for part in parts if part[1] in KINDS]


def _stage(index: int, job: Job) -> SimpleNamespace:
    """Return a stand-in for a stage of rank 0 with the attributes that a schedule reads before it runs."""
    return SimpleNamespace(stage_index=index, num_stages=layout.stage_count(job), group_size=job.parallelism.pp, group_rank=0, group=None,
                           is_first=index == 0, is_last=index == layout.stage_count(job) - 1, submod=None, has_backward=True)


def _read(config: str) -> list[list[Action]] | None:
    try:
        return actions_of_ranks(from_dict(Job, json.loads(Path(config).read_text())))
    except OSError:
        return None


if __name__ == "__main__":
    json.dump([_read(config) for config in sys.argv[1:]], sys.stdout)
