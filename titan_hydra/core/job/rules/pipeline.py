"""The rules of pipelines: schedule, stages, split and microbatches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_hydra.core.job.batches import legal_microbatches, microbatch_objection, microbatches
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, counted, fault_at
from titan_hydra.core.job.config.files import similar
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import Action, read_schedule, splits_backward, stage_count
from titan_hydra.core.job.run.code import versions
from titan_hydra.core.job.schedules import play


def wrong_with(ranks: list[list[Action]], job: Job) -> str | None:
    """Return why the actions are not a valid schedule for the job's ranks and stages; None if they are.

    Every stage is on one rank, every microbatch runs its forward and its backward once on each stage, and no action
    waits for ever.
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
    last = [
        number for actions in ranks for stage, kind, number in actions if (stage, kind) == (stage_count(job) - 1, "F")
    ]
    if last != sorted(last):  # torch finds the loss of a microbatch by the microbatch's position in this order
        return "the last stage must run the forwards in the order of the microbatches"
    for actions, played in zip(ranks, play(ranks, stage_count(job)), strict=True):
        if len(played) < len(actions):
            return "{}{}{} waits for ever for an action that must come before it".format(*actions[len(played)])
    return None


# --- the rules, which checks.py runs with its own rules on the layout -------------------------------------------------


def pipeline_is_laid_out(job: Job) -> Iterator[Fault]:
    """Schedule, stages, split and microbatches fit the model, the ranks and each other. Each check relies on the one
    before, so the first fault ends the rule.
    """
    if job.parallelism.pp > 1:
        for rule in (
            schedule_file_is_a_schedule,
            stages_hold_blocks,
            split_covers_the_model,
            batch_cuts_into_microbatches,
            head_is_not_tied,
        ):
            faults = list(rule(job))
            if faults:
                yield from faults
                return


def schedule_file_is_a_schedule(job: Job) -> Iterator[Fault]:
    """A csv schedule is complete and cannot deadlock. Otherwise the error would appear only on the cluster."""
    if not PIPELINE_SCHEDULES[job.pp_schedule.name].from_file:
        return
    schedule: Any = job.pp_schedule
    path = schedule.csv
    if not path:
        yield Fault("pp_schedule.csv", path, f"pp_schedule={schedule.name} needs a file")
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
        yield Fault(
            "pp_schedule.stages_per_rank",
            schedule.stages_per_rank,
            f"{schedule.name} puts a fixed number of stages on a rank",
            legal=(fixed,),
        )
    elif stage_count(job) > layers and not schedule.split:
        yield Fault(
            "parallelism.pp",
            pp,
            f"{counted(stage_count(job), 'stage')}, but the model has {counted(layers, 'block')}",
            legal=(layers // schedule.stages_per_rank,),
        )


def split_covers_the_model(job: Job) -> Iterator[Fault]:
    """The stages follow each other in the order of the modules and cover the whole model."""
    schedule, stages, layers = job.pp_schedule, stage_count(job), job.model.n_layers
    if schedule.split:
        names = family_of(job.model).modules(job.model)
        for name in schedule.split:
            if name not in names[1:]:
                yield Fault(
                    "pp_schedule.split",
                    schedule.split,
                    f"a later stage cannot begin with {name}; it can with {names[1]} to {names[-3]}, {names[-2]} or {names[-1]}",
                )
                return
        if len(schedule.split) != stages - 1:
            yield Fault(
                "pp_schedule.split",
                schedule.split,
                f"{stages} stages take {counted(stages - 1, 'name')}, the first module of each but the first stage",
            )
        elif any(names.index(a) >= names.index(b) for a, b in zip(schedule.split, schedule.split[1:], strict=False)):
            yield Fault("pp_schedule.split", schedule.split, "the names must be in the order of the model")
        if schedule.layers_per_stage is not None:
            yield Fault(
                "pp_schedule.layers_per_stage",
                schedule.layers_per_stage,
                "pp_schedule.split already sets it",
                legal=(None,),
            )
    elif (per_stage := schedule.layers_per_stage) is not None and (per_stage < 1 or -(-layers // per_stage) != stages):
        legal = tuple(number for number in range(1, layers + 1) if -(-layers // number) == stages)
        yield Fault(
            "pp_schedule.layers_per_stage",
            per_stage,
            f"{counted(layers, 'block')} do not make {stages} stages of this size",
            legal or (None,),
        )


def batch_cuts_into_microbatches(job: Job) -> Iterator[Fault]:
    """A local batch is cut into equal microbatches, in a number that the schedule accepts."""
    number, batch = microbatches(job), job.data.local_batch
    choices = legal_microbatches(job)
    if not choices:
        least = next(size for size in range(1, 64 * stage_count(job)) if microbatch_objection(job, size) is None)
        why = microbatch_objection(job, batch) or f"cannot be cut into {least} microbatches"
        yield Fault("data.local_batch", batch, f"too few samples to cut into microbatches: {why}", legal=(least,))
    elif batch % number:
        yield Fault(
            "pp_schedule.microbatches",
            number,
            f"data.local_batch {batch} cannot be cut into so many",
            legal=tuple(choices),
        )
    elif why := microbatch_objection(job, number):
        yield Fault("pp_schedule.microbatches", number, why, legal=tuple(choices))


def old_torch_splits_only_plain_backwards(job: Job) -> Iterator[Fault]:
    """torch 2.11 frees the part of the graph that the second half of a split backward needs, if a weight goes through a
    function with a backward of its own.
    """
    if job.parallelism.pp == 1 or not splits_backward(job) or not versions().get("torch", "").startswith("2.11."):
        return
    features = [
        *["loss=linear_cross_entropy"] * (job.loss.name == "linear_cross_entropy"),
        *[f"precision.converter={job.precision.converter}"] * (job.precision.converter is not None),
        *["experts"] * job.model.sparse,
    ]
    if features:
        why = f"splits the backward, which torch 2.11 cannot do with {features[0]}; a newer torch can"
        yield fault_at(job, "pp_schedule.name", why, "interleaved_1f1b", "1f1b")


def head_is_not_tied(job: Job) -> Iterator[Fault]:
    """The embedding is on the first stage and the head on the last, so they cannot share one weight."""
    if job.model.tie_embeddings:
        yield fault_at(job, "model.tie_embeddings", "embedding and head are on different pipeline stages", False)
