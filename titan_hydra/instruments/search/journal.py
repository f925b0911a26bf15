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
        """Open the study, or create it. Raises JournalDamaged if its lines cannot be replayed."""
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
        known = self.trials()
        taken = {tuple(trial.overrides) for trial in known}
        values = _in_order(space, search, taken) if search.sampler == "grid" else self._sampled(space, search, taken)
        return None if values is None else self._add(space, values)

    def _add(self, space: Space, values: dict[str, Any]) -> SearchTrial:
        """Record a new trial with these values, and return it."""
        from optuna.trial import TrialState, create_trial

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
            recorded = {steps: [loss] for steps, loss in trial.values.items()}
            if trial.objectives and trial.runs:
                recorded[max(trial.runs)] = trial.objectives
            for steps, values in recorded.items():
                in_result = value(trial.runs[steps]) if steps in trial.runs else None
                if in_result and in_result[: len(values)] != values:
                    return f"trial {trial.number} has {values}, and the result of {trial.runs[steps]} {in_result}"
        for name, entry in self.confirmed.items():
            in_result = value(entry["run"]) if entry["run"] else None
            if in_result and in_result[:1] != [entry["value"]]:
                return f"trial {name.split()[0]} has {entry['value']}, and the result of {entry['run']} {in_result[0]}"
        return ""

    def lacks(self, cells: Sequence[dict[str, Any]]) -> str:
        """Return which run of the manifest (`manifest_cells`) no trial has; "" if there is none. The journal is written before the
        manifest, so lines of the journal were lost then.
        """
        trials = self.trials()
        for listed in cells:
            known = listed["trial"] < len(trials) and listed["directory"] in trials[listed["trial"]].runs.values()
            if listed["seed"] is None and not known:
                return (
                    f"has no trial {listed['trial']} with the run {listed['directory']}, so lines at its end are lost"
                )
        return ""

    def restore(self, cells: Sequence[dict[str, Any]], runs: Path, space: Space, search: OptunaSearch) -> None:
        """Add the trials and runs of the manifest that are lost. What the last run of each trial has yielded is left to the
        driver, which attaches to it.
        """
        listed = {cell["trial"]: cell for cell in cells if cell["seed"] is None}
        for number in range(len(self.trials()), max(listed, default=-1) + 1):
            # a trial that was refused is not in the manifest: it is drawn again, as before it was lost
            values = space.values(listed[number]["overrides"]) if number in listed else None
            if not (self._add(space, values) if values else self.draw(space, search)):
                return
        for trial in self.trials():
            lengths = (
                _lengths(runs / listed[trial.number]["directory"]) if trial.number in listed and trial.open else {}
            )
            for steps, run in sorted(lengths.items()):
                if steps not in trial.runs:
                    self.note_run(trial, steps, run)
                loss = layout.RESULT.read(runs / run).get("validation_loss")
                if steps < max(lengths) and steps not in trial.values and loss is not None:
                    self.report(trial, steps, loss)

    def _id(self, trial: SearchTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, trial.number)


def mended_journal(
    folder: Path,
    directions: Sequence[str],
    value: Callable[[str], list[float] | None],
    space: Space,
    search: OptunaSearch,
) -> Journal:
    """Open the journal for its driver, which holds `locked`. A damaged journal, one that differs from the results of the
    runs (`Journal.differs`), and one that lacks runs (`Journal.lacks`) are set aside with a warning. The lost trials are
    those of the manifest; the driver finds their runs again.
    """
    file, cells, warned = layout.JOURNAL.of(folder), manifest_cells(folder), False
    for last in (False, True):
        whole = last
        try:
            journal = Journal(folder, directions)
            if not (reason := journal.differs(value)):
                break
            whole = True
        except JournalDamaged as error:
            reason = str(error).removeprefix(f"{file}: ")
        warned = _begin_anew(file, whole, reason)
    journal = Journal(folder, directions)
    if reason := journal.lacks(cells):
        if not warned:
            _begin_anew(file, False, reason)
            journal = Journal(folder, directions)
        journal.restore(cells, folder.parents[1], space, search)
    return journal


def _begin_anew(file: Path, whole: bool, reason: str) -> bool:
    """Set a journal aside (`set_aside`), and print a warning. Returns True."""
    words = f"it is kept as {set_aside(file, whole)}, and the journal is made again from the runs"
    print(f"warning: {file}: {reason}; {words}", file=sys.stderr)
    return True


def manifest_cells(folder: Path) -> list[dict[str, Any]]:
    """Return the cells in the manifest of a search: the newest run of each trial, and the runs with other seeds."""
    cells = layout.SWEEP.read(folder).get("cells", [])
    return [
        cell | {"seed": cell.get("seed")} for cell in cells if type(cell.get("trial")) is int and cell["trial"] >= 0
    ]


def _lengths(run: Path) -> dict[int, str]:
    """Return the run directories of a trial by their steps: the newest one, and those from which it was continued."""
    by_steps: dict[int, str] = {}
    while (steps := (config := layout.CONFIG.read(run)).get("steps")) and steps < min(by_steps, default=steps + 1):
        by_steps[steps] = run.name
        run = run.parent / Path((config.get("checkpoint") or {}).get("initial_load_path") or "").parent.parent.name
    return by_steps


def _read(frozen: Any) -> SearchTrial:
    """Turn a trial of Optuna into ours."""
    attrs = frozen.user_attrs
    runs = {int(name.split()[1]): run for name, run in attrs.items() if name.startswith("run ")}
    state = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED}.get(frozen.state.name, OPEN)
    objectives = list(frozen.values) if state == COMPLETE else []
    values = dict(frozen.intermediate_values)
    return SearchTrial(
        number=frozen.number,
        overrides=attrs["overrides"],
        params=frozen.params,
        state=state,
        values=values,
        objectives=objectives,
        runs=runs,
        reason=attrs.get("reason", ""),
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
