"""The cells of a search: the runs of trials, composed and checked like the cells of any command line."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config import Fault, Job, identity, read
from titan_hydra.core.job.config.fault import as_value
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.compose.cells import Question
from titan_hydra.experiments.compose.sweep import key_of
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.dispatch import examine, read_all
from titan_hydra.experiments.launch.longer import origin, steps_of_same_rates
from titan_hydra.instruments.search.keys import OptunaSearch

from .journal import SearchTrial
from .rungs import Rungs, halving_faults, rungs_of
from .space import Space, space_of

# which objectives are read from a run's result, and whether the lower or the higher value is better
OBJECTIVES = {"validation_loss": "minimize", "tokens_per_second": "maximize"}
MEASURED = {"loss": ("validation_loss",), "tokens_per_second": ("tokens_per_second",), "both": tuple(OBJECTIVES)}
# the keys that change which trials a search draws; if one of them has another value, this is another search
DECIDING = ("sampler", "objective", "pruner", "factor", "first_steps", "seed")


@dataclass(frozen=True)
class SearchPlan:
    """A search that has been read from a command line and checked."""

    question: Question
    search: OptunaSearch
    space: Space
    base: Cell  # the first of the cells that were checked before the start
    rungs: Rungs

    @property
    def fixed(self) -> list[str]:
        """The overrides that all trials share, without those of the search itself."""
        return [override for override in self.question.fixed if key_of(override).partition(".")[0] != "search"]

    @property
    def runs(self) -> Path:
        return self.base.runs

    @cached_property
    def name(self) -> str:
        """The name of the sweep: sweep.name, or the swept keys."""
        keys = [dimension.key.lstrip("+").rpartition(".")[2] for dimension in self.space.dimensions]
        return self.base.job.sweep.name or "-".join(keys).replace("/", "-")

    @cached_property
    def folder(self) -> Path:
        """The folder of the sweep. The same search always has the same folder, so that the same command line finds it."""
        decides = {key: getattr(self.search, key) for key in DECIDING}
        typed = [dimension.typed for dimension in self.space.dimensions]
        text = json.dumps([identity(self.base.job), typed, decides], sort_keys=True)
        return layout.SWEEPS.of(self.runs) / f"{self.name}-search-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def measured(self) -> tuple[str, ...]:
        """The names, in a run's result, of the values by which trials are compared."""
        return MEASURED[self.search.objective]

    @property
    def directions(self) -> list[str]:
        return [OBJECTIVES[name] for name in self.measured]

    def cell(self, trial: SearchTrial, steps: int) -> tuple[Cell | None, str]:
        """Return the cell of a trial's run up to a length, which continues the run of the previous length; or the
        reason why there is none.
        """
        if len(self.rungs.steps) == 1:
            return self.compose_trial(trial.overrides, f"trial {trial.number}")
        name = f"trial {trial.number}, {steps} steps"
        plain, reason = self.compose_trial([*trial.overrides, f"steps={steps}"], name)
        if plain is None:
            return None, reason
        if faults := list(halving_faults(replace(plain.job, steps=self.rungs.steps[-1]), self.search, self.rungs)):
            return None, str(faults[0])
        more = [f"steps={steps}", *checkpoint_overrides(plain.job, self.rungs)]
        if before := max((length for length in trial.runs if length < steps), default=0):
            try:
                path, _ = origin(self.runs / trial.runs[before], replace(plain.job, steps=before), plain.job, None)
            except ConfigError as error:
                return None, str(error)
            more += [f"checkpoint.initial_load_path={as_value(str(path))}", "checkpoint.exclude_from_loading=[]"]
        return self.compose_trial([*trial.overrides, *more], name)

    def repeat(self, trial: SearchTrial, seed: int) -> tuple[Cell | None, str]:
        """Return the cell of a trial's whole run with another seed; or the reason why there is none."""
        return self.compose_trial([*trial.overrides, f"seed={seed}"], f"trial {trial.number}, seed {seed}")

    def compose_trial(self, of_cell: list[str], name: str) -> tuple[Cell | None, str]:
        """Compose and check a cell. Return it, or the first fault."""
        taken = {key_of(override) for override in of_cell}
        overrides = [override for override in self.fixed if key_of(override) not in taken] + of_cell
        config = self.question.compose(overrides)
        config.sweep.name, config.sweep.cell = self.name, name
        cell, faults, _ = examine(config, overrides)
        return cell, redact(str(faults[0])) if cell is None else ""

    def value(self, directory: Path) -> list[float] | None:
        """Return the objectives of a run that is done; None if one of them is missing."""
        results: list[Any] = [layout.RESULT.read(directory).get(name) for name in self.measured]
        return None if None in results else results


def checkpoint_overrides(job: Job, rungs: Rungs) -> list[str]:
    """Return overrides that make a run keep the checkpoint from which the run of the next length continues."""
    if job.steps == rungs.steps[-1]:
        return []
    step = steps_of_same_rates(job, replace(job, steps=rungs.steps[rungs.steps.index(job.steps) + 1]))
    interval = job.checkpoint.interval
    if not interval or step % interval:
        interval = step
    return [f"checkpoint.interval={interval}", f"checkpoint.keep_every={step}", "checkpoint.last_step=true"]


def plan_of(question: Question) -> SearchPlan:
    """Check a command line with a search. Raises ConfigError with all lines that prevent its start.

    The cell with the first values of all keys is composed and checked, and so is each cell in which one key has another
    listed value or its other bound. A value that no cell may have is a fault. A combination of values that is illegal,
    or does not fit into memory, is no fault: a trial that has it is refused later, at no cost.
    """
    space = space_of(question.swept)
    job, faults = read(question.compose([*question.fixed, *space.probes()[0]]))
    if job is None:
        raise ConfigError("\n".join(map(str, faults)))
    search = cast(OptunaSearch, job.search)
    fixed = [override for override in question.fixed if key_of(override).partition(".")[0] != "search"]
    overrides = [[*fixed, *of_probe] for of_probe in space.probes()]
    composed = [(question.compose(of_probe), of_probe) for of_probe in overrides]
    jobs, lines = [], []
    for config, _ in composed:
        probe, faults = read(config)
        jobs += [probe] if probe else []
        lines += map(str, faults)
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    cells, refused = read_all(composed)
    if not cells:
        raise ConfigError("\n".join(dict.fromkeys(refused)))
    plan = SearchPlan(question, search, space, cells[0], rungs_of(cells[0].job, search))
    if faults := list(dict.fromkeys(faults_of_the_search(plan, jobs))):
        raise ConfigError("\n".join(dict.fromkeys(map(str, faults))))
    return plan


def faults_of_the_search(plan: SearchPlan, jobs: list[Job]) -> list[Fault]:
    """Return what prevents a search over these cells; the cells are in the order of `Space.probes`."""
    search, job, faults, first = plan.search, plan.base.job, [], 1
    if search.objective != "tokens_per_second" and job.validation.name == "off":
        legal = ("tokens_per_second",)
        reason = "needs a held-out loss, which validation=on measures"
        faults.append(Fault("search.objective", search.objective, reason, legal=legal))
    for dimension in plan.space.dimensions:
        others = jobs[first : first + len(dimension.ends) - 1]
        first += len(others)
        if identity(jobs[0]) in {identity(other) for other in others}:
            reason = "two of its values make the same experiment, so a search cannot choose between them"
            faults.append(Fault(dimension.key, dimension.typed.partition("=")[2], reason))
        if search.sampler == "grid" and not dimension.values:
            faults.append(
                Fault(dimension.key, dimension.typed.partition("=")[2], "search.sampler=grid takes lists of values")
            )
        if dimension.key == "seed" and search.confirm:
            faults.append(
                Fault("search.confirm", search.confirm, "gives trials other seeds, so `seed` cannot be swept", (0,))
            )
        if dimension.key == "steps" and search.pruner != "none":
            faults.append(Fault("search.pruner", search.pruner, "changes `steps` itself, so `steps` cannot be swept"))
    if search.sampler == "grid" and 1_000_000 < plan.space.size < math.inf:
        faults.append(Fault("search.sampler", "grid", f"{plan.space.size:,} combinations, and 1,000,000 are the most"))
    return [*faults, *halving_faults(job, search, plan.rungs)]
