"""The state of a search: Optuna's journal file in the folder of the sweep.

A trial is one line of the journal, with all its values, which is written before a run of the trial starts. So after a
kill, the next driver finds every trial that was drawn. One driver at a time holds the lock of the folder (lines.py).
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run import layout
from titan_hydra.instruments.search.keys import OptunaSearch

from .lines import JournalDamaged, JournalFile, set_aside
from .space import Space

if TYPE_CHECKING:
    from optuna.study import Study

DRAWS = 100  # number of draws that repeat earlier trials, after which the space counts as exhausted
# number of trials that are drawn at random before TPE learns from them; a quarter of all trials if that is less
STARTUP = 10
OPEN, COMPLETE, PRUNED, FAILED = "open", "complete", "pruned", "failed"


@dataclass(frozen=True)
class SearchTrial:
    """A trial as recorded in the journal. `values` are its held-out losses by steps, `objectives` its final objectives."""

    number: int
    overrides: list[str]
    params: dict[str, Any]
    state: str
    values: dict[int, float]
    objectives: list[float]  # objectives of a complete trial, else empty
    runs: dict[int, str]  # the trial's run directories by steps
    reason: str  # why the trial failed or was refused

    @property
    def open(self) -> bool:
        """Whether the trial may still go on."""
        return self.state == OPEN


class Journal:
    """The Optuna study in a sweep's folder. Only a driver that holds `locked` may write; without `directions`, a journal
    that has no study yet counts as damaged, and nothing is written.
    """

    def __init__(self, folder: Path, directions: Sequence[str] = ("minimize",)) -> None:
        import optuna
        from optuna.storages import JournalStorage

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.file = layout.JOURNAL.of(folder)
        lines: Any = JournalFile(self.file)
        try:
            self.storage = JournalStorage(lines)
            if directions and not self.storage.get_all_studies():
                wanted = [optuna.study.StudyDirection[direction.upper()] for direction in directions]
                optuna.create_study(storage=self.storage, study_name="search", directions=wanted)
            self.study: Study = optuna.load_study(storage=self.storage, study_name="search")
            self.id = self.storage.get_study_id_from_name("search")
            self.trials()
        except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            # lines without checksums: Optuna does not check them
            raise JournalDamaged(f"{self.file}: cannot be replayed ({type(error).__name__}: {error})") from error

    def trials(self) -> list[SearchTrial]:
        """Return all trials, by number."""
        return [_read(frozen) for frozen in self.study.get_trials(deepcopy=False)]

    def draw(self, space: Space, search: OptunaSearch) -> SearchTrial | None:
        """Draw a trial, and write it to the journal; return None if the space has no further trial. What is drawn
        depends only on the earlier trials and on search.seed, so that a search continues after a kill as it would have
        continued without the kill.
        """
        from optuna.trial import TrialState, create_trial

        known = self.trials()
        taken = {tuple(trial.overrides) for trial in known}
        values = _in_order(space, search, taken) if search.sampler == "grid" else self._sampled(space, search, taken)
        if values is None:
            return None
        frozen = create_trial(
            state=TrialState.RUNNING,
            params=values,
            distributions=space.distributions,
            user_attrs={"overrides": space.overrides(values)},
        )
        self.study.add_trial(frozen)
        return self.trials()[-1]

    def _sampled(self, space: Space, search: OptunaSearch, taken: set[tuple[str, ...]]) -> dict[str, Any] | None:
        """Return values that no trial has yet. The sampler gets trials that wait for their next length as pruned
        trials.
        """
        import optuna

        frozen = self.study.get_trials(deepcopy=False)
        seed = search.seed + 1_000_003 * len(frozen)
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
        if search.sampler == "tpe":
            startup = min(STARTUP, max(search.trials // 4, 1))
            sampler = optuna.samplers.TPESampler(
                seed=seed % 2**32, multivariate=True, constant_liar=True, n_startup_trials=startup
            )
        memory = optuna.create_study(sampler=sampler, directions=self.study.directions)
        if search.sampler == "tpe":
            memory.add_trials([_as_seen(trial) for trial in frozen])
        for _ in range(DRAWS):
            if len(taken) >= space.size:
                break
            values = space.rounded(memory.ask(space.distributions).params)
            if tuple(space.overrides(values)) not in taken:
                return values
        return None

    def note_run(self, trial: SearchTrial, steps: int, directory: str) -> None:
        """Record the run directory of a trial for one of its lengths."""
        self.storage.set_trial_user_attr(self._id(trial), f"run {steps}", directory)

    def report(self, trial: SearchTrial, steps: int, value: float) -> None:
        """Record the held-out loss of a trial at one of its lengths."""
        self.storage.set_trial_intermediate_value(self._id(trial), steps, value)

    def tell(self, trial: SearchTrial, state: str, values: Sequence[float] | None = None, reason: str = "") -> None:
        """Record how a trial has ended."""
        from optuna.trial import TrialState

        if reason:
            self.storage.set_trial_user_attr(self._id(trial), "reason", reason)
        states = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}
        self.study.tell(trial.number, state=states[state], values=values)

    @property
    def confirmed(self) -> dict[str, Any]:
        """What is recorded of the runs with other seeds: {"number seed": {"run": directory, "value": objective or null}}."""
        return dict(self.study.user_attrs.get("confirmed", {}))

    def confirm(self, trial: SearchTrial, seed: int, directory: str, value: float | None) -> None:
        """Record a run of a trial with another seed."""
        entry = {f"{trial.number} {seed}": {"run": directory, "value": value}}
        self.storage.set_study_user_attr(self.id, "confirmed", self.confirmed | entry)

    def differs(self, value: Callable[[str], list[float] | None]) -> str:
        """Return in which number the journal differs from the results of the runs; "" if it differs in none. `value`
        returns the objectives in the result of a run directory; None if there is no result.
        """
        for trial in self.trials():
            told = {steps: [loss] for steps, loss in trial.values.items()}
            if trial.objectives and trial.runs:
                told[max(trial.runs)] = trial.objectives
            for steps, values in told.items():
                found = value(trial.runs[steps]) if steps in trial.runs else None
                if found and found[: len(values)] != values:
                    return f"trial {trial.number} has {values}, and the result of {trial.runs[steps]} {found}"
        for name, entry in self.confirmed.items():
            found = value(entry["run"]) if entry["run"] else None
            if found and found[:1] != [entry["value"]]:
                return f"trial {name.split()[0]} has {entry['value']}, and the result of {entry['run']} {found[0]}"
        return ""

    def _id(self, trial: SearchTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, trial.number)


def mended_journal(folder: Path, directions: Sequence[str], value: Callable[[str], list[float] | None]) -> Journal:
    """Open the journal for its driver, which holds `locked`. A damaged journal, or one that differs from the results of
    the runs (`Journal.differs`), is set aside with a warning, and the driver finds the runs of the lost lines again:
    what is drawn depends only on the earlier trials.
    """
    file = layout.JOURNAL.of(folder)
    for last in (False, True):
        whole = last
        try:
            journal = Journal(folder, directions)
            if not (reason := journal.differs(value)):
                return journal
            whole = True
        except JournalDamaged as error:
            reason = str(error).removeprefix(f"{file}: ")
        kept = set_aside(file, whole)
        words = f"it is kept as {kept}, and the journal is made again from the runs"
        print(f"warning: {file}: {reason}; {words}", file=sys.stderr)
    return Journal(folder, directions)


def _read(frozen: Any) -> SearchTrial:
    attrs = frozen.user_attrs
    runs = {int(name.split()[1]): run for name, run in attrs.items() if name.startswith("run ")}
    state = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED}.get(frozen.state.name, OPEN)
    objectives = list(frozen.values) if state == COMPLETE else []
    values = dict(frozen.intermediate_values)
    return SearchTrial(
        frozen.number, attrs["overrides"], frozen.params, state, values, objectives, runs, attrs.get("reason", "")
    )


def _as_seen(frozen: Any) -> Any:
    """Return a trial in the form that the sampler gets."""
    from optuna.trial import TrialState, create_trial

    waits = frozen.state == TrialState.RUNNING and frozen.intermediate_values
    return create_trial(
        state=TrialState.PRUNED if waits else frozen.state,
        values=frozen.values if frozen.state == TrialState.COMPLETE else None,
        params=frozen.params,
        distributions=frozen.distributions,
        intermediate_values=frozen.intermediate_values,
    )


def _in_order(space: Space, search: OptunaSearch, taken: set[tuple[str, ...]]) -> dict[str, Any] | None:
    """Return the next cell of the grid, in an order that search.seed determines."""
    cells = space.grid()
    random.Random(search.seed).shuffle(cells)
    return next((cell for cell in cells if tuple(space.overrides(cell)) not in taken), None)


def require_optuna() -> None:
    """Raise ConfigError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("search=optuna: Optuna is not installed; pip install 'titan_hydra[search]' brings it")
