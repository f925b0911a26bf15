"""The layout of a pipeline, computed before any rank starts: which stage holds which modules, which rank holds which stages, how many
microbatches run; and the rules for it. The trainer calls the same functions as the rules.
"""
import csv
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from titan_hydra.config.family import family_of, places_of_blocks
from titan_hydra.config.fault import Fault, counted, divisors
from titan_hydra.config.files import similar
from titan_hydra.config.registry import PIPELINE_SCHEDULES
from titan_hydra.config.schema import Job

TIME = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # duration of an action on one stage, in forwards
Action = tuple[int, str, int]  # stage, one of F (forward), B (whole backward), I (inputs' half), W (weights' half), microbatch


# --- the layout ---------------------------------------------------------------------------------------------------------------------

def stage_count(job: Job) -> int:
    """Return the number of stages of the whole pipeline."""
    return job.parallelism.pp * job.pp_schedule.stages_per_rank


def stages_of_ranks(job: Job) -> list[list[int]]:
    """Return the stages of each pipeline rank, ascending: in a loop, in a V, or as the csv schedule places them."""
    pp, stages, schedule = job.parallelism.pp, stage_count(job), job.pp_schedule
    if schedule.name == "csv":
        return [sorted({stage for stage, _, _ in actions}) for actions in read_schedule(schedule.csv)]
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
    """Return the number of blocks of each stage: `layers_per_stage` (the last stage takes the rest), or balanced.

    The embedding and the head count as one block each, so that the paper's 126 blocks on 16 stages divide evenly. Each block goes to the
    stage with the least work; among equals, an inner stage.
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


def microbatches(job: Job) -> int:
    """Return the microbatches of a local batch: 1 without a pipeline, else as configured, or the largest legal number up to twice the
    stages; 0 if none is legal.
    """
    if job.parallelism.pp == 1:
        return 1
    if job.pp_schedule.microbatches is not None:
        return job.pp_schedule.microbatches
    choices = legal_microbatches(job)
    return max((number for number in choices if number <= 2 * stage_count(job)), default=min(choices, default=0))


def legal_microbatches(job: Job) -> list[int]:
    """Return the numbers of microbatches that divide the local batch and that the schedule accepts."""
    return [number for number in divisors(job.data.local_batch) if microbatch_objection(job, number) is None]


def microbatch_objection(job: Job, number: int) -> str | None:
    """Return why the schedule does not accept this number of microbatches; None if it does."""
    schedule = job.pp_schedule
    if reason := PIPELINE_SCHEDULES[schedule.name].objection(number, stage_count(job), job.parallelism.pp):
        return f"{schedule.name} {reason}"
    if schedule.name == "csv" and number != (written := 1 + max(microbatch for _, _, microbatch in read_schedule(schedule.csv)[0])):
        return f"{schedule.csv} schedules {written}"
    return None


def splits_backward(job: Job) -> bool:
    """Whether the schedule runs a stage's backward in two halves (inputs, weights). Several techniques cannot be combined with that."""
    if job.pp_schedule.name == "csv":
        return any(kind == "W" for actions in read_schedule(job.pp_schedule.csv) for _, kind, _ in actions)
    return PIPELINE_SCHEDULES[job.pp_schedule.name].splits_backward


def actions_of_one_stage(rank: int, ranks: int, number: int, all_forwards: bool) -> list[Action]:
    """Return the actions of a pipeline rank with one stage for a number of microbatches: all forwards first (gpipe), or 1F1B."""
    ahead = number if all_forwards else min(number, ranks - rank)
    forward, backward = [(rank, "F", index) for index in range(number)], [(rank, "B", index) for index in range(number)]
    alternating = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return [*forward[:ahead], *alternating, *backward[number - ahead:]]


# --- a schedule from a file ---------------------------------------------------------------------------------------------------------

@cache
def read_schedule(path: str) -> list[list[Action]]:
    """Read the actions of each rank: a line a rank, cells like 2F0 (stage 2, forward, microbatch 0), empty ones idle.

    A cell (0F5;3B2)OVERLAP_F_B is two actions. Raises OSError, or ValueError with the cell that cannot be read.
    """
    with Path(path).open(newline="") as file:
        return [[action for cell in row for action in _actions(cell.strip())] for row in csv.reader(file)]


def _actions(cell: str) -> list[Action]:
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
    actions = []
    for text in overlapped[1].split(";") if overlapped else [cell] if cell else []:
        if not (match := re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text)):
            raise ValueError(f"{text!r} is not an action; one is written like 2F0, with F, B, I or W")
        actions.append((int(match[1]), match[2], int(match[3])))
    return actions


def wrong_with(ranks: list[list[Action]], job: Job) -> str | None:
    """Return why the actions are no schedule for the job's ranks and stages; None if they are.

    Every stage is on one rank, every microbatch runs its forward and its backward once on each stage, and no action waits for ever.
    """
    pp, per_rank = job.parallelism.pp, job.pp_schedule.stages_per_rank
    if len(ranks) != pp:
        return f"it is for {counted(len(ranks), 'rank')}, a line each, and parallelism.pp is {pp}"
    owned = [{stage for stage, _, _ in actions} for actions in ranks]
    if sorted(stage for stages in owned for stage in stages) != list(range(stage_count(job))):
        return f"every stage from 0 to {stage_count(job) - 1} must be on one rank"
    if any(len(stages) != per_rank for stages in owned):
        return f"not every rank has pp_schedule.stages_per_rank={per_rank} stages"
    done = [action for actions in ranks for action in actions]
    if len(done) != len(set(done)):
        return "an action occurs twice"
    for stage in range(stage_count(job)):
        of = {kind: {number for at, what, number in done if (at, what) == (stage, kind)} for kind in "FBIW"}
        if of["F"] != set(range(len(of["F"]))) or len(of["F"]) != sum(what == "F" for at, what, _ in done if at == 0):
            return f"stage {stage} does not run the forward of every microbatch"
        if of["I"] != of["W"] or of["B"] & of["I"] or of["B"] | of["I"] != of["F"]:
            return f"stage {stage} must run B, or I and W, for every microbatch once"
    last = [number for actions in ranks for stage, kind, number in actions if (stage, kind) == (stage_count(job) - 1, "F")]
    if last != sorted(last):  # torch looks up a microbatch's loss by its place among them
        return "the last stage must run the forwards in the order of the microbatches"
    for actions, played in zip(ranks, play(ranks, stage_count(job)), strict=True):
        if len(played) < len(actions):
            return "{}{}{} waits for ever for what must come before it".format(*actions[len(played)])
    return None


def play(ranks: list[list[Action]], stages: int, seconds: Callable[[Action], float] = lambda action: TIME[action[1]],
         travel: float = 0.0) -> list[list[tuple[float, Action]]]:
    """Simulate a schedule: when each action starts if each rank runs its own in order, each as soon as its inputs exist.

    `seconds` is the duration of an action, `travel` that of sending its output to the next stage. A rank with an action that waits for ever
    has no entries from there on.
    """
    ends: dict[Action, float] = {}
    played: list[list[tuple[float, Action]]] = [[] for _ in ranks]
    free = [0.0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while len(played[rank]) < len(actions) and (ready := _ready(actions[len(played[rank])], ends, stages, travel)) is not None:
                action = actions[len(played[rank])]
                start = max(ready, free[rank])
                played[rank].append((start, action))
                ends[action] = free[rank] = start + seconds(action)
                moved = True
    return played


def _ready(action: Action, ends: dict[Action, float], stages: int, travel: float) -> float | None:
    """Return the time at which the inputs of an action are complete; None if that is not known yet."""
    stage, kind, number = action
    if kind == "F":
        before = ends.get((stage - 1, "F", number))
        return 0.0 if stage == 0 else None if before is None else before + travel
    if kind == "W":
        return ends.get((stage, "I", number))
    own = ends.get((stage, "F", number))
    after = own if stage == stages - 1 else ends.get((stage + 1, "B", number), ends.get((stage + 1, "I", number)))
    return None if own is None or after is None else max(own, after + travel * (stage < stages - 1))


# --- the rules, which checks.py runs with the others on the layout ---------------------------------------------------------------------

def pipeline_is_laid_out(job: Job) -> Iterator[Fault]:
    """Schedule, stages, split and microbatches fit model, ranks and each other. Each rule needs the one before: the first fault ends it."""
    if job.parallelism.pp > 1:
        for rule in (schedule_file_is_a_schedule, stages_hold_blocks, split_covers_the_model, batch_cuts_into_microbatches,
                     head_is_not_tied):
            faults = list(rule(job))
            if faults:
                yield from faults
                return


def schedule_file_is_a_schedule(job: Job) -> Iterator[Fault]:
    """A csv schedule is complete and cannot deadlock; otherwise the error would appear only on the cluster."""
    path = job.pp_schedule.csv
    if job.pp_schedule.name != "csv":
        return
    if not path:
        yield Fault("pp_schedule.csv", path, "pp_schedule=csv needs a file")
        return
    if Path(path).exists() and not Path(path).is_file():
        yield Fault("pp_schedule.csv", path, "not a file")
        return
    try:
        problem = wrong_with(read_schedule(path), job)
    except OSError:
        yield Fault("pp_schedule.csv", path, "no such file", legal=similar(path))
    except ValueError as error:
        yield Fault("pp_schedule.csv", path, f"cannot be read: {error}")
    else:
        if problem:
            yield Fault("pp_schedule.csv", path, problem)


def stages_hold_blocks(job: Job) -> Iterator[Fault]:
    """Every pipeline stage holds at least one block, and some schedules fix how many stages a rank has."""
    schedule, pp, layers = job.pp_schedule, job.parallelism.pp, job.model.n_layers
    fixed = PIPELINE_SCHEDULES[schedule.name].stages_per_rank or schedule.stages_per_rank
    if schedule.stages_per_rank != fixed:
        yield Fault("pp_schedule.stages_per_rank", schedule.stages_per_rank, f"{schedule.name} puts a fixed number of stages on a rank",
                    legal=(fixed,))
    elif stage_count(job) > layers and not schedule.split:
        yield Fault("parallelism.pp", pp, f"{counted(stage_count(job), 'stage')}, but the model has {counted(layers, 'block')}",
                    legal=(layers // schedule.stages_per_rank,))


def split_covers_the_model(job: Job) -> Iterator[Fault]:
    """The stages follow each other in the order of the modules and cover the whole model."""
    schedule, stages, layers = job.pp_schedule, stage_count(job), job.model.n_layers
    if schedule.split:
        names = family_of(job.model).modules(job.model)
        for name in schedule.split:
            if name not in names[1:]:
                yield Fault("pp_schedule.split", schedule.split, f"a later stage cannot begin with {name}; it can with "
                            f"{names[1]} to {names[-3]}, {names[-2]} or {names[-1]}")
                return
        if len(schedule.split) != stages - 1:
            yield Fault("pp_schedule.split", schedule.split, f"{stages} stages take {counted(stages - 1, 'name')}, the first module of "
                        "each but the first stage")
        elif any(names.index(a) >= names.index(b) for a, b in zip(schedule.split, schedule.split[1:], strict=False)):
            yield Fault("pp_schedule.split", schedule.split, "the names must be in the order of the model")
        if schedule.layers_per_stage is not None:
            yield Fault("pp_schedule.layers_per_stage", schedule.layers_per_stage, "pp_schedule.split already sets it", legal=(None,))
    elif (per_stage := schedule.layers_per_stage) is not None and (per_stage < 1 or -(-layers // per_stage) != stages):
        legal = tuple(number for number in range(1, layers + 1) if -(-layers // number) == stages)
        yield Fault("pp_schedule.layers_per_stage", per_stage, f"{counted(layers, 'block')} do not make {stages} stages of this size",
                    legal or (None,))


def batch_cuts_into_microbatches(job: Job) -> Iterator[Fault]:
    """A local batch is cut into equal microbatches, as many as the schedule takes."""
    number, batch = microbatches(job), job.data.local_batch
    choices = legal_microbatches(job)
    if not choices:
        least = next(size for size in range(1, 64 * stage_count(job)) if microbatch_objection(job, size) is None)
        why = microbatch_objection(job, batch) or f"cannot be cut into {least} microbatches"
        yield Fault("data.local_batch", batch, f"too few samples to cut into microbatches: {why}", legal=(least,))
    elif number < 1 or batch % number:
        yield Fault("pp_schedule.microbatches", number, f"data.local_batch {batch} cannot be cut into so many", legal=tuple(choices))
    elif why := microbatch_objection(job, number):
        yield Fault("pp_schedule.microbatches", number, why, legal=tuple(choices))


def head_is_not_tied(job: Job) -> Iterator[Fault]:
    """The embedding is on the first stage and the head on the last: one weight cannot be on both."""
    if job.model.tie_embeddings:
        yield Fault("model.tie_embeddings", True, "embedding and head are on different pipeline stages", legal=(False,))
