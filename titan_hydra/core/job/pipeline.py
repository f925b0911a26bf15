"""The stages of a pipeline: which stage holds which modules, which rank holds which stages; a schedule from a file."""

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

from titan_hydra.core.job.config.family import family_of, places_of_blocks
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import Job

# (stage, kind, microbatch); kinds: F forward, B backward, I and W the halves of a backward for inputs and for weights
Action = tuple[int, str, int]


def stage_count(job: Job) -> int:
    """Return the number of stages of the whole pipeline."""
    return job.parallelism.pp * job.pp_schedule.stages_per_rank


def stages_of_ranks(job: Job) -> list[list[int]]:
    """Return the stages of each pipeline rank, ascending. They are distributed in a loop, in a V, or as in the csv
    schedule.
    """
    pp, stages, schedule = job.parallelism.pp, stage_count(job), job.pp_schedule
    if written := written_schedule(job):
        return [sorted({stage for stage, _, _ in actions}) for actions in written]
    if PIPELINE_SCHEDULES[schedule.name].v_shaped:
        return [[rank, stages - 1 - rank] for rank in range(pp)]
    return [list(range(rank, stages, pp)) for rank in range(pp)]


def modules_of_stages(job: Job) -> list[list[str]]:
    """Return the names of the modules of each stage, split by explicit names, by a number of blocks, or balanced."""
    names = family_of(job.model).modules(job.model)
    if job.pp_schedule.split:
        firsts = [names.index(name) for name in job.pp_schedule.split]
    else:
        blocks, first = blocks_of_stages(job), places_of_blocks(names)[0]
        firsts = [first + sum(blocks[: stage + 1]) for stage in range(len(blocks) - 1)]
    return [names[first:last] for first, last in zip([0, *firsts], [*firsts, len(names)], strict=True)]


def blocks_of_stages(job: Job) -> list[int]:
    """Return the number of blocks of each stage: `layers_per_stage` (the last stage gets the rest) or, if it is null,
    balanced numbers.

    The embedding and the head count as one block each, so that the paper's 126 blocks on 16 stages divide evenly. Each
    block is assigned to the stage with the least work; if several stages have the least, to an inner stage.
    """
    stages, layers, per_stage = stage_count(job), job.model.n_layers, job.pp_schedule.layers_per_stage
    if per_stage:
        return [min(per_stage, layers - stage * per_stage) for stage in range(stages)]
    return list(_balanced(layers, stages))


@cache
def _balanced(layers: int, stages: int) -> tuple[int, ...]:
    ends = (0, stages - 1)
    blocks = [1] * stages  # a stage without a block would compute nothing
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: (blocks[stage] + (stage in ends), stage in ends, stage))
        blocks[lightest] += 1
    return tuple(blocks)


def splits_backward(job: Job) -> bool:
    """Whether the schedule runs a stage's backward in two halves: one for the inputs' gradients, one for the weights'.
    Several techniques cannot be combined with a split backward.
    """
    if written := written_schedule(job):
        return any(kind == "W" for actions in written for _, kind, _ in actions)
    return PIPELINE_SCHEDULES[job.pp_schedule.name].splits_backward


def written_schedule(job: Job) -> list[list[Action]] | None:
    """Return the actions of each rank if the schedule is in a file, else None. Raises what `read_schedule` raises."""
    schedule: Any = job.pp_schedule
    return read_schedule(schedule.csv) if PIPELINE_SCHEDULES[schedule.name].from_file else None


@cache
def read_schedule(path: str) -> list[list[Action]]:
    """Read the actions of the ranks, a line per rank. 2F0 is stage 2, forward, microbatch 0; an empty cell is idle.

    A cell (0F5;3B2)OVERLAP_F_B is two actions. Raises OSError, or ValueError with the cell that cannot be read.
    """
    with Path(path).open(newline="") as file:
        return [[action for cell in row for action in _actions(cell.strip())] for row in csv.reader(file)]


def _actions(cell: str) -> list[Action]:
    """Parse a cell of a schedule's CSV file, such as `2F0` or `(0F1;1B0)OVERLAP_F_B`, into (stage, kind, microbatch)."""
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
    actions = []
    for text in overlapped[1].split(";") if overlapped else [cell] if cell else []:
        if not (match := re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text)):
            raise ValueError(f"{text!r} is not an action; one is written like 2F0, with F, B, I or W")
        actions.append((int(match[1]), match[2], int(match[3])))
    return actions
