"""The lengths at which trials are compared, and which trial goes on to the next length.

A run can be continued at any time. So a trial that does not go on to the next length waits, and goes on later if it is
then among the best of its length. This is asynchronous successive halving (Li et al. 2020, algorithm 2), in which
waiting trials can be promoted. Every decision follows only from the journal.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from titan_hydra.core.job.config import Fault, Job
from titan_hydra.experiments.launch.longer import steps_of_same_rates
from titan_hydra.instruments.search.keys import OptunaSearch

from .journal import SearchTrial

KEPT = 0.5  # minimum fraction of a run's steps after the warm-up that the run of the next length must be able to use


@dataclass(frozen=True)
class Rungs:
    """The lengths of a trial in steps; the last one is the length of the whole run."""

    steps: tuple[int, ...]
    factor: int = 2
    # for each bracket, the index in `steps` of the length at which its trials begin; trials take the brackets in turn
    brackets: tuple[int, ...] = (0,)

    def first(self, trial: SearchTrial) -> int:
        """Return the index of a trial's first length."""
        return self.brackets[trial.number % len(self.brackets)]

    def reached(self, trial: SearchTrial) -> int:
        """Return the index of the greatest length at which a trial has a value; -1 if it has none."""
        return max((index for index, steps in enumerate(self.steps) if steps in trial.values), default=-1)

    def after(self, trial: SearchTrial) -> int:
        """Return the length that follows the present one of a trial."""
        return self.steps[self.reached(trial) + 1]

    def promoted(self, trials: Sequence[SearchTrial], busy: Container[int] = ()) -> SearchTrial | None:
        """Return a waiting trial that goes on to the next length, or None. This trial is among the best 1/factor of all
        trials of its bracket that have reached its present length; trials with a greater length come first. `busy` has
        the numbers of trials that run.
        """
        for index in range(len(self.steps) - 2, -1, -1):
            for bracket in sorted(set(self.brackets)):
                there = [
                    candidate
                    for candidate in trials
                    if self.first(candidate) == bracket and self.steps[index] in candidate.values
                ]
                there.sort(key=lambda candidate: (candidate.values[self.steps[index]], candidate.number))
                for trial in there[: len(there) // self.factor]:
                    if trial.open and trial.number not in busy and self.reached(trial) == index:
                        return trial
        return None

    def finalist(self, trials: Sequence[SearchTrial], busy: Container[int], count: int) -> SearchTrial | None:
        """Return a waiting trial that goes on although it is not among the best 1/factor; None if there is none. Once
        no further trial starts, the best `count` trials are trained to the last step. Values at different lengths are
        not compared: a trial with a greater length counts as better.
        """
        best = sorted((trial for trial in trials if trial.values and not trial.reason), key=self.rank)[:count]
        free = [trial for trial in best if trial.open and trial.number not in busy]
        return next((trial for trial in free if self.reached(trial) < len(self.steps) - 1), None)

    def rank(self, trial: SearchTrial) -> tuple[int, float, int]:
        """Return the key by which trials are sorted: a greater length first, then a better value."""
        reached = self.reached(trial)
        return -reached, trial.values.get(self.steps[reached], math.inf) if reached >= 0 else math.inf, trial.number


def rungs_of(job: Job, search: OptunaSearch) -> Rungs:
    """Return the lengths of the trials of a job: search.first_steps (default: the job's steps / factor^2) times powers
    of the factor, and the job's own steps.
    """
    if search.pruner == "none":
        return Rungs((job.steps,))
    lengths = [search.first_steps or math.ceil(job.steps / search.factor**2)]
    while lengths[-1] * search.factor < job.steps:
        lengths.append(lengths[-1] * search.factor)
    steps = (*(length for length in lengths if length < job.steps), job.steps)
    brackets = hyperband(len(steps), search.factor) if search.pruner == "hyperband" else (0,)
    return Rungs(steps, search.factor, brackets)


def hyperband(lengths: int, factor: int) -> tuple[int, ...]:
    """For successive trials, return the index of the first length, so that all brackets use about the same compute (Li
    et al. 2018, algorithm 1: bracket s has a share of factor^s / (s + 1) trials). The brackets are interleaved.
    """
    last = lengths - 1
    shares = [math.ceil(lengths * factor ** (last - index) / (last - index + 1)) for index in range(lengths)]
    due = [(turn / share, index) for index, share in enumerate(shares) for turn in range(share)]
    return tuple(index for _, index in sorted(due))


def halving_faults(job: Job, search: OptunaSearch, rungs: Rungs) -> Iterator[Fault]:
    """Yield a fault for each reason why trials of this job cannot be compared at several lengths."""
    if search.pruner == "none":
        return
    if search.objective != "loss":
        yield Fault("search.pruner", search.pruner, "compares held-out losses, so it needs search.objective=loss")
    if search.first_steps and search.first_steps >= job.steps:
        yield Fault("search.first_steps", search.first_steps, f"must be less than steps={job.steps}")
    if job.checkpoint.name == "off":
        yield Fault(
            "search.pruner", search.pruner, "carries runs on from checkpoints, so it needs checkpoint=sync or async"
        )
    if job.fault_tolerance.name != "off":
        yield Fault(
            "search.pruner", search.pruner, f"cannot carry on runs with fault_tolerance={job.fault_tolerance.name}"
        )
    if reason := not_the_longer_run(job, rungs):
        yield Fault("search.pruner", search.pruner, reason, ("none",))


def not_the_longer_run(job: Job, rungs: Rungs) -> str | None:
    """Return why a run of one length cannot be continued to the next length; None if it can. A continued run must learn
    the same as a run that had the greater length from the start. So the runs of both lengths must have the same
    learning rates until late in the shorter run.
    """
    warm = job.lr_scheduler.warmup_steps
    for short, long in zip(rungs.steps, rungs.steps[1:], strict=False):
        if short <= warm:
            return f"the shortest run has {short} steps, and the warm-up {warm}; set search.first_steps"
        same = steps_of_same_rates(replace(job, steps=short), replace(job, steps=long))
        if same - warm < KEPT * (short - warm):
            return (
                f"lr_scheduler={job.lr_scheduler.name}: the learning rates of {short} and {long} steps differ from step "
                f"{same + 1} on, so too little of a run of {short} steps can be carried on; constant and wsd allow it"
            )
    return None
