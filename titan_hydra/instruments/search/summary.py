"""What a search has found: its trials, the importance of the keys, and the GPU-hours that it used and saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from titan_hydra.core.base.text import table
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.checkpoints import step_of
from titan_hydra.core.job.run.stretches import device_hours
from titan_hydra.experiments.report.table import Section

from .journal import COMPLETE, Journal, SearchTrial, manifest_cells, require_optuna
from .lines import JournalDamaged
from .trials import OBJECTIVES

FEWEST = 4  # minimum number of complete trials for an estimate of the importance of the keys


@dataclass(frozen=True)
class Summary:
    """The trials of a search, read from its folder."""

    runs: Path
    directions: list[str]
    trials: list[SearchTrial]
    confirmed: dict[str, Any]
    importance: dict[str, float]
    unread: list[str]  # runs with other seeds that are done, and whose results are not in the journal

    @property
    def full(self) -> int:
        """The steps of a whole run; 0 before the first run."""
        return max((steps for trial in self.trials for steps in trial.runs), default=0)

    @cached_property
    def best(self) -> list[SearchTrial]:
        """The complete trials, the best first. With two objectives, only the Pareto front: a trial is left out if another
        one is at least as good in both and better in one.
        """
        complete = [trial for trial in self.trials if trial.state == COMPLETE]
        if len(self.directions) == 1:
            return sorted(complete, key=lambda trial: (self._cost(trial)[0], trial.number))
        return [trial for trial in complete if not any(self._exceeds(other, trial) for other in complete)]

    def _cost(self, trial: SearchTrial) -> list[float]:
        signs = [1 if direction == "minimize" else -1 for direction in self.directions]
        return [sign * value for sign, value in zip(signs, trial.objectives, strict=True)]

    def _exceeds(self, trial: SearchTrial, other: SearchTrial) -> bool:
        pairs = list(zip(self._cost(trial), self._cost(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    def seeds(self, trial: SearchTrial) -> list[float]:
        """Return the objectives of a trial's runs with several seeds; [] if the trial has a single seed."""
        other_seeds = [entry["value"] for name, entry in self.confirmed.items() if name.split()[0] == str(trial.number)]
        return [*trial.objectives[:1], *(value for value in other_seeds if value is not None)] if other_seeds else []

    @cached_property
    def winner(self) -> SearchTrial | None:
        """The trial with the best mean among the trials that were run with several seeds; without such trials, the best
        trial. None with two objectives, or before a trial is complete.
        """
        if len(self.directions) > 1 or not self.best:
            return None
        sign = 1 if self.directions == ["minimize"] else -1
        again = [trial for trial in self.best if self.seeds(trial)]
        return min(again or self.best[:1], key=lambda trial: sign * fmean(self.seeds(trial) or trial.objectives))

    @cached_property
    def hours(self) -> dict[int, float]:
        """The GPU-hours of each trial, by number, without its runs with other seeds."""
        return {
            trial.number: sum(device_hours(self.runs / run) for run in trial.runs.values()) for trial in self.trials
        }

    @property
    def spent(self) -> float:
        """The GPU-hours of all trials."""
        return sum(self.hours.values())

    @property
    def confirming(self) -> float:
        """The GPU-hours of the runs with other seeds."""
        return sum(device_hours(self.runs / entry["run"]) for entry in self.confirmed.values() if entry["run"])

    @cached_property
    def steps(self) -> tuple[int, int]:
        """The number of steps that the trials have made, and the number that they would have made if all of them were
        trained to the last step.
        """
        trained = sum(_made(self.runs / run, steps) for trial in self.trials for steps, run in trial.runs.items())
        return trained, self.full * sum(bool(trial.runs) for trial in self.trials)

    @property
    def saved(self) -> float:
        """The GPU-hours that training all trials to the last step would have cost in addition, at the same GPU-hours
        per step.
        """
        trained, whole = self.steps
        return self.spent * (whole / trained - 1) if trained else 0.0

    def document(self) -> dict[str, Any]:
        """Return the search as JSON values."""
        trained, whole = self.steps
        return {
            "directions": self.directions,
            "trials": [
                {
                    "trial": trial.number,
                    "overrides": trial.overrides,
                    "state": self.word(trial),
                    "reason": trial.reason,
                    "lengths": [
                        {"steps": steps, "run": run, "loss": trial.values.get(steps)}
                        for steps, run in sorted(trial.runs.items())
                    ],
                    "objectives": trial.objectives,
                    "seeds": self.seeds(trial),
                    "gpu_hours": self.hours[trial.number],
                }
                for trial in self.trials
            ],
            "winner": self.winner and self.winner.number,
            "best": [trial.number for trial in self.best],
            "importance": self.importance,
            "spent_gpu_hours": self.spent,
            "confirming_gpu_hours": self.confirming,
            "saved_gpu_hours": self.saved,
            "steps": trained,
            "steps_of_whole_runs": whole,
        }

    def word(self, trial: SearchTrial) -> str:
        """Return the state of a trial in a word."""
        if trial.state == COMPLETE:
            return (
                "winner"
                if self.winner is trial
                else "front"
                if len(self.directions) > 1 and trial in self.best
                else "done"
            )
        if trial.open:
            return "runs" if any(steps not in trial.values for steps in trial.runs) or not trial.runs else "waits"
        return "stopped" if trial.values else "failed" if trial.runs else "refused"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles and rows of the table of trials, in the order of their numbers. A search for the lowest loss
        has a column for each length of runs, and any other a column for each objective.
        """
        keys = [override.partition("=")[0] for override in self.trials[0].overrides] if self.trials else []
        measured, numbers = self._measured()
        rows = []
        for trial, of_trial in zip(self.trials, numbers, strict=True):
            values = [override.partition("=")[2] for override in trial.overrides]
            state = self.word(trial) + (f": {trial.reason}" if trial.reason else "")
            hours = f"{self.hours[trial.number]:.4f}"
            rows.append([str(trial.number), *values, *map(_number, of_trial), _spread(self.seeds(trial)), state, hours])
        return ["trial", *keys, *measured, "seeds", "state", "GPU-hours"], rows

    def _measured(self) -> tuple[list[str], list[list[float | None]]]:
        """Return the titles of the columns with measured numbers, and these numbers of each trial."""
        if self.directions == ["minimize"]:
            lengths = sorted({steps for trial in self.trials for steps in trial.values})
            titles = [f"loss at {steps}" for steps in lengths]
            return titles, [[trial.values.get(steps) for steps in lengths] for trial in self.trials]
        titles = ["held-out loss", "tokens/s"] if len(self.directions) > 1 else ["tokens/s"]
        return titles, [[*trial.objectives] or [None] * len(titles) for trial in self.trials]

    def notes(self) -> list[str]:
        """Return the lines below the table."""
        trained, whole = self.steps
        lines = [
            f"{self.spent:.3f} GPU-hours spent on trials, {self.saved:.3f} saved against whole runs of all of them "
            f"({trained:,} of {whole:,} steps); {self.confirming:.3f} on other seeds"
        ]
        if self.importance:
            shares = ", ".join(f"{key} {share:.0%}" for key, share in self.importance.items())
            lines.append(f"importance of the keys (PED-ANOVA): {shares}")
        if unfinished := self.unfinished:
            lines.append(f"the search is not finished: {unfinished}; its command line continues it")
        if self.winner:
            mean = _spread(self.seeds(self.winner))
            lines.append(
                f"winner{' so far' if self.unfinished else ''}: trial {self.winner.number}, {' '.join(self.winner.overrides)}"
                + (f": mean over {len(self.seeds(self.winner))} seeds {mean}" if mean else ", with one seed")
            )
            if doubt := self._doubt():
                lines.append(doubt)
        return lines

    @property
    def unfinished(self) -> str:
        """What the search has still to do or to record, in words; "" if there is nothing. A killed driver, or lines that a
        journal has lost, leave such trials.
        """
        numbers = [str(trial.number) for trial in self.trials if trial.open]
        parts = [f"{counted(len(numbers), 'trial')} may go on (trial {', '.join(numbers[:4])})"] if numbers else []
        return ", ".join([*parts, *(f"{run} is not in its journal" for run in self.unread[:4])])

    def _doubt(self) -> str:
        """Return a line if the winner's lead is smaller than the spread over seeds; "" if it is not, or unknown."""
        samples = [self.seeds(trial) for trial in self.best if len(self.seeds(trial)) > 1]
        if len(samples) < 2:
            return ""
        means = sorted((fmean(values) for values in samples), reverse=self.directions != ["minimize"])
        error = (fmean(stdev(values) ** 2 / len(values) for values in samples) * 2) ** 0.5
        lead = abs(means[1] - means[0])
        return (
            f"its lead of {lead:.4g} over the next is less than twice the standard error {error:.2g} of such a difference"
            if lead < 2 * error
            else ""
        )


def summary_of(folder: Path) -> Summary:
    """Read a search from the folder of its sweep. Raises JournalDamaged, also if a number of the journal is not that of
    the run's result, or if it lacks runs of the manifest.
    """
    cells = manifest_cells(folder)  # before the journal, which is always ahead of the manifest
    journal = Journal(folder, ())
    trials = journal.trials()
    directions = ["minimize" if direction.name == "MINIMIZE" else "maximize" for direction in journal.study.directions]
    runs = folder.parents[1]
    names = [name for name, direction in OBJECTIVES.items() if direction in directions]

    def value(run: str) -> list[float] | None:
        results: list[Any] = [layout.RESULT.read(runs / run).get(name) for name in names]
        return None if None in results else results

    if difference := journal.differs(value):
        raise JournalDamaged(f"{journal.file}: {difference}")
    if lost := journal.lacks(cells):
        raise JournalDamaged(f"{journal.file}: {lost}")
    seeds = [
        one for one in cells if one["seed"] is not None and f"{one['trial']} {one['seed']}" not in journal.confirmed
    ]
    unread = [one["directory"] for one in seeds if layout.RESULT.read(runs / one["directory"]).get("status") == "done"]
    return Summary(
        runs=runs,
        directions=directions,
        trials=trials,
        confirmed=journal.confirmed,
        importance=_importance(journal, trials),
        unread=unread,
    )


def section_of(folder: Path) -> Section:
    """Return a search as a section of a report."""
    require_optuna()
    summary = summary_of(folder)
    return Section("search", *summary.rows(), summary.notes(), summary.document())


def printed(summary: Summary) -> list[str]:
    """Return the summary as lines for a terminal."""
    titles, rows = summary.rows()
    return [*table(titles, rows, [title for title in titles if title != "state"], ("state",)), "", *summary.notes()]


def _importance(journal: Journal, trials: list[SearchTrial]) -> dict[str, float]:
    """Return the share of each key in the variance of the objective among the better half of the trials; {} if too few
    are known. If trials have several lengths, the length that most of them have reached is used.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    lengths = [steps for trial in trials for steps in trial.values]
    length = max(sorted(set(lengths)), key=lengths.count, default=None)
    memory = optuna.create_study(direction=journal.study.directions[0])
    for trial, frozen in zip(trials, journal.study.get_trials(deepcopy=False), strict=True):
        value = trial.objectives[0] if trial.objectives and length is None else trial.values.get(length)
        if value is not None:
            memory.add_trial(
                create_trial(
                    state=TrialState.COMPLETE, value=value, params=frozen.params, distributions=frozen.distributions
                )
            )
    if len(memory.trials) < FEWEST or len({trial.value for trial in memory.trials}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5)
    return optuna.importance.get_param_importances(memory, evaluator=evaluator)


def _made(run: Path, steps: int) -> int:
    """Return the number of steps that a run has made itself, without those of the run from whose checkpoint it
    continues.
    """
    loaded = (layout.CONFIG.read(run).get("checkpoint") or {}).get("initial_load_path")
    done = (layout.METRICS.last(run) or {}).get("step", 0)
    return max(min(done, steps) - (step_of(Path(loaded)) if loaded and Path(loaded).name.startswith("step-") else 0), 0)


def _number(value: float | None) -> str:
    """Format a loss or a rate for the table; "" if it is unknown."""
    if value is None:
        return ""
    return f"{value:,.4f}" if value < 1000 else f"{value:,.0f}"


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):,.4f}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")
