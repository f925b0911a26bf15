"""Run a search: draw trials, start their runs on the executor, await them, and decide which trials go on.

The journal and the run directories hold the whole state of a search, so the driver may be killed at any moment. The
same command line then continues the search: it attaches to active runs, and starts trials that were only drawn.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit, Kind
from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config.fault import counted, fault_at
from titan_hydra.core.job.config.registry import EXECUTORS, executor_named
from titan_hydra.core.job.config.user_code import digest_of_code, sources
from titan_hydra.core.job.ranks import devices_here, processes
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.core.job.run.code import code_here, code_in, edited, fingerprints, intact
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.core.job.run.stretches import device_hours
from titan_hydra.experiments.compose.cells import Question
from titan_hydra.experiments.launch import show
from titan_hydra.experiments.launch.attach import STOP_LIMIT, Interrupts, kill, saving, stop
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.dispatch import faults_of_the_place
from titan_hydra.experiments.runs import manifest, rundir
from titan_hydra.experiments.runs.rundir import State

from .journal import COMPLETE, FAILED, PRUNED, SearchTrial, mended_journal, require_optuna
from .lines import locked
from .summary import printed, summary_of
from .trials import SearchPlan, plan_of

MOST_STARTS = 4  # number of times that one driver starts a run; a further start would end in the same way
POLL_HERE, POLL = 0.1, 5.0  # seconds between two checks of runs on this machine, and of runs on a cluster
RETRIED = (Kind.NODE, Kind.HANG, Kind.KILLED, Kind.PREEMPTED)  # failures that do not depend on the drawn values
# failures that depend on the drawn values, so that the sampler learns from them
DRAWN = (Kind.NOT_FINITE, Kind.OUT_OF_MEMORY, Kind.CONFIG)


def run_search(question: Question) -> int:
    """Run the search of a command line, and return the exit status. Raises ConfigError if the search cannot start; then
    nothing is written.
    """
    require_optuna()
    plan = plan_of(question)
    job, states = plan.base.job, [rundir.state(plan.base.directory)]
    if job.launch.force:
        raise ConfigError("launch.force=true: a search goes on with its runs; another search.seed begins a new one")
    if plan.search.parallel > 1 and EXECUTORS[job.cluster.executor].single:
        reason = f"cluster={job.cluster.name} runs one trial, in this process"
        raise fault_at(plan, "search.parallel", reason, 1).error
    if job.launch.stop_at_failure:
        raise ConfigError("launch.stop_at_failure=true: a search learns from trials that fail")
    if plan.search.parallel > 1 and EXECUTORS[job.cluster.executor].here and (devices := devices_here()):
        fits = 1 if executor_named(job.cluster.executor).one_cell else max(devices // processes(job), 1)
        if plan.search.parallel > fits:
            reason = f"each trial takes {processes(job)} of {counted(devices, 'device')}"
            raise fault_at(plan, "search.parallel", reason, fits).error
    if faults := list(faults_of_the_place([plan.base], states)):
        raise ConfigError("\n".join(map(str, faults)))
    if job.launch.mode == "dry":
        dry(plan, states)
        return Exit.DONE
    plan.folder.mkdir(parents=True, exist_ok=True)
    with locked(plan.folder):
        try:
            return Driver(plan).drive()
        except KeyboardInterrupt:  # Ctrl-C came inside a rank that runs in this process
            print("stopped; the same command line continues", file=sys.stderr)
            return 130


def dry(plan: SearchPlan, states: list[State]) -> None:
    """Print what a search would do."""
    for dimension in plan.space.dimensions:
        print(dimension.typed)
    lengths = " -> ".join(map(str, plan.rungs.steps))
    print(f"{plan.name}: {counted(plan.search.trials, 'trial')} at most, of {lengths} steps; the first of them:")
    show.dry_run([plan.base], states, None)


@dataclass
class Active:
    """A run that the driver awaits: the run of a trial up to one length or, with `seed`, a run that confirms the trial
    with another seed.
    """

    trial: SearchTrial
    steps: int
    cell: Cell
    seed: int | None = None
    starts: int = 0
    parent: subprocess.Popen[Any] | None = None

    @property
    def label(self) -> str:
        return self.cell.job.sweep.cell or ""


class Driver:
    """Draws, starts and awaits the trials of a plan, until nothing is left to do."""

    def __init__(self, plan: SearchPlan) -> None:
        """Open the journal, and restore it from the runs if it lacks what they have."""
        self.plan, self.search = plan, plan.search
        self.journal = mended_journal(
            plan.folder, plan.directions, lambda run: plan.value(plan.runs / run), plan.space, plan.search
        )
        self.executor = executor_named(plan.base.job.cluster.executor)
        self.kind = EXECUTORS[plan.base.job.cluster.executor]
        self.executor.at_once = min(self.search.parallel, plan.base.job.cluster.max_parallel or self.search.parallel)
        self.interrupts = Interrupts()
        self.active: dict[Path, Active] = {}
        self.hours: dict[Path, float] = {}  # GPU-hours of runs that have ended
        self.final = False  # whether no further trial starts, and the best trials are trained to the last step
        self.spent = False  # whether the budget is used

    def drive(self) -> int:
        """Run the search to its end, or until this process is asked to stop. Return the exit status."""
        print(f"{self.plan.folder.name}: {counted(len(self.journal.trials()), 'trial')} so far", flush=True)
        self.keep_code()
        # a rank in this process handles signals itself
        with contextlib.nullcontext() if self.kind.single else self.interrupts.counted():
            while True:
                self.look()
                while not self.interrupts.received and len(self.active) < self.executor.at_once and self.start_next():
                    self.look()
                if self.interrupts.received:
                    return self.stop()
                if not self.active:
                    break
                deadline = time.monotonic() + (POLL_HERE if self.kind.here else POLL)
                while time.monotonic() < deadline and not self.interrupts.received:
                    time.sleep(0.05)
        summary = summary_of(self.plan.folder)
        print("", *printed(summary), sep="\n")
        if self.spent:
            print(f"search.budget_gpu_hours={self.search.budget_gpu_hours:g} is used; more of it continues the search")
        return Exit.DONE if any(trial.state == COMPLETE for trial in self.journal.trials()) else Exit.BUG

    def keep_files(self) -> None:
        """Raise ConfigError if the files that trials read have changed since the first trial began, as then its result
        cannot be compared with further ones.
        """
        runs = [self.plan.runs / run for trial in self.journal.trials() for run in trial.runs.values()]
        first = next((run for run in runs if inputs.files_at_start(run)), None)
        if first and (faults := inputs.check_files({first: self.plan.base.job}, self.plan.runs)):
            raise ConfigError("\n".join(map(str, faults)))

    def keep_code(self) -> None:
        """Let all further trials run the code of the first one, also if an earlier driver has started it. Raises
        ConfigError if that code is not here any more, as trials of two versions of the code cannot be compared.
        """
        runs = [run for trial in self.journal.trials() for run in trial.runs.values()]
        first = next((code for run in runs if (code := layout.ENV.read(self.plan.runs / run).get("code"))), None)
        here = code_here(sources(self.plan.base.job.train.imports))
        if first is None or first == digest_of_code(here):
            return
        copy = layout.CODE.of(self.plan.runs) / first
        if self.kind.single or not intact(copy):
            raise ConfigError(
                f"{self.plan.folder.name}: its trials ran the code {first}, and the code here is another; "
                f"go back to that code, or begin a new search with search.seed={self.search.seed + 1}"
            )
        names = edited(fingerprints(code_in(copy)), fingerprints(here))
        print(f"goes on with the code of its first trial, {copy}; edited since: {names}", flush=True)
        self.executor.code = copy

    def start_next(self) -> bool:
        """Do what the journal requires next: start a run, draw a trial, or record how a trial ended. Return whether
        there was anything to do.
        """
        trials, last = self.journal.trials(), self.plan.rungs.steps[-1]
        busy = {active.trial.number for active in self.active.values() if active.seed is None}
        for trial in trials:
            if trial.open and trial.number not in busy and (steps := self.pending(trial)):
                return self.begin(trial, steps)
            if trial.open and last in trial.values:  # an earlier driver was killed before it recorded the trial's end
                self.journal.tell(trial, COMPLETE, [trial.values[last]])
                return True
        budget = self.search.budget_gpu_hours
        self.spent = budget is not None and self.used() >= budget
        if self.spent:
            return False
        if not self.final:
            if trial := self.plan.rungs.promoted(trials, busy):
                return self.begin(trial, self.plan.rungs.after(trial))
            if len(trials) < self.search.trials and (drawn := self.journal.draw(self.plan.space, self.search)):
                print(f"trial {drawn.number}: {redact(' '.join(drawn.overrides))}", flush=True)
                return True
            if busy:
                return False
        self.final = True
        if trial := self.plan.rungs.finalist(trials, busy, max(self.search.confirm, 1)):
            return self.begin(trial, self.plan.rungs.after(trial))
        return not busy and (self.close(trials) or self.confirm())

    def pending(self, trial: SearchTrial) -> int:
        """Return the steps of the run that a trial needs now; 0 if the trial waits for its next length."""
        if not trial.values and not trial.runs:
            return self.plan.rungs.steps[self.plan.rungs.first(trial)]
        return max((steps for steps in trial.runs if steps not in trial.values), default=0)

    def begin(self, trial: SearchTrial, steps: int, seed: int | None = None) -> bool:
        """Start the run of a trial, or attach to it; a trial whose cell is refused costs nothing. Returns True."""
        self.keep_files()
        cell, reason = self.plan.cell(trial, steps) if seed is None else self.plan.repeat(trial, seed)
        if cell is None:
            print(f"trial {trial.number}: refused: {reason}", flush=True)
            if seed is None:
                self.journal.tell(trial, PRUNED, reason=reason)
            else:
                self.journal.confirm(trial, seed, "", None)
            return True
        if twin := self.active.get(cell.directory):
            self.journal.tell(trial, PRUNED, reason=f"the same experiment as {twin.label}")
            return True
        if seed is None and steps not in trial.runs:
            self.journal.note_run(trial, steps, cell.directory.name)
        self.list_in_manifest(cell, trial, seed)
        self.active[cell.directory] = active = Active(trial, steps, cell, seed)
        state = rundir.state(cell.directory)
        if state.active:
            print(f"{active.label}: {cell.directory.name} is {state.kind}", flush=True)
        self.start(active, state)
        return True

    def start(self, active: Active, state: State) -> bool:
        """Start a run if its state calls for it. Return whether it was started."""
        again = state.kind == "failed" and state.failure.kind in RETRIED
        if not (active.cell.wants(state) or again) or active.starts >= MOST_STARTS:
            return False
        active.starts += 1
        print(f"{active.label}: {active.cell.directory.name}, attempt {state.attempt + 1}", flush=True)
        active.parent = self.executor.start_one(active.cell, self.interrupts)
        return True

    def look(self) -> None:
        """Find out which of the awaited runs have ended, and record how each of them ended."""
        directories = list(self.active)
        for directory, state in zip(directories, rundir.states(directories), strict=True):
            active = self.active[directory]
            attempt = layout.ATTEMPT.of(directory, state.attempt)
            if active.parent is not None:
                # Only the parent process tells whether the attempt is over: before its ranks have started, the attempt
                # is this process's own, and so it is active for as long as this process lives.
                if active.parent.poll() is None:
                    self.note_cancelled(attempt)
                    continue
                kill(attempt, active.parent)  # if the parent itself was killed, this ends the processes that remain
                rundir.end_attempt(attempt)
                active.parent, state = None, rundir.state(directory)
            if state.active:
                continue
            if state.kind != "done" and active.starts:
                self.note_cancelled(attempt)
            if self.interrupts.received and state.kind != "done":
                del self.active[directory]
            elif state.kind == "done" or not self.start(active, state):
                self.ended(active, state)
                del self.active[directory]

    def note_cancelled(self, attempt: Path) -> None:
        """Stop the search if `titan stop` has marked an attempt: it ends the search, not a trial."""
        if not self.interrupts.received and layout.CANCELLED.of(attempt).exists():
            self.interrupts.received.append(signal.SIGTERM)

    def ended(self, active: Active, state: State) -> None:
        """Record the end of a run in the journal."""
        directory, trial = active.cell.directory, active.trial
        values = self.plan.value(directory) if state.kind == "done" else None
        if state.kind == "not submitted":
            raise ConfigError(f"{active.label}: was not submitted: {state.refused}; the same command line continues")
        failure = state.failure or Failure(None, Exit.BUG, f"{state.kind} {counted(active.starts, 'time')}")
        reason = "" if values else "its result lacks the objective" if state.kind == "done" else failure.line
        measured = " ".join(
            f"{name} {value:.5g}" for name, value in zip(self.plan.measured, values or [], strict=False)
        )
        print(f"{active.label}: {measured or reason}", flush=True)
        if active.seed is not None:
            self.journal.confirm(trial, active.seed, directory.name, values[0] if values else None)
        elif values is None:
            self.journal.tell(trial, PRUNED if failure.kind in DRAWN else FAILED, reason=reason)
        elif self.search.objective == "loss":
            self.journal.report(trial, active.steps, values[0])
            if active.steps == self.plan.rungs.steps[-1]:
                self.journal.tell(trial, COMPLETE, values)
        else:
            self.journal.tell(trial, COMPLETE, values)

    def used(self) -> float:
        """Return the GPU-hours of all runs of the trials so far."""
        runs = {self.plan.runs / run for trial in self.journal.trials() for run in trial.runs.values()}
        for run in runs - self.active.keys() - self.hours.keys():
            self.hours[run] = device_hours(run)
        return sum(self.hours[run] if run in self.hours else device_hours(run) for run in runs)

    def close(self, trials: list[SearchTrial]) -> bool:
        """Record in the journal that the waiting trials will not go on to a further length. Return whether there were
        waiting trials.
        """
        left = [trial for trial in trials if trial.open]
        for trial in left:
            self.journal.tell(trial, PRUNED)
        return bool(left)

    def confirm(self) -> bool:
        """Start a run of one of the best trials with another seed. Return whether there was such a run to start."""
        if self.search.objective == "both":
            return False
        known = {*self.journal.confirmed, *(f"{active.trial.number} {active.seed}" for active in self.active.values())}
        first = self.plan.base.job.seed
        for trial in summary_of(self.plan.folder).best[: self.search.confirm]:
            for seed in range(first + 1, first + self.search.seeds):
                if f"{trial.number} {seed}" not in known:
                    return self.begin(trial, self.plan.rungs.steps[-1], seed)
        return False

    def list_in_manifest(self, cell: Cell, trial: SearchTrial, seed: int | None) -> None:
        """List the newest run of each trial, and the runs with other seeds, in the manifest of the sweep."""
        entry = manifest.entry_of(cell) | {"trial": trial.number, "seed": seed}
        manifest.put_cell(
            self.plan.folder,
            self.plan.name,
            entry,
            lambda listed: (listed["seed"] is not None, listed["trial"], listed["seed"] or 0),
        )

    def stop(self) -> int:
        """Ask the runs on this machine to save and stop, and await them; jobs of a cluster go on. Return the exit status."""
        began, asked = time.monotonic(), set()
        while self.kind.here and self.active:
            for directory, active in self.active.items():
                attempt = layout.ATTEMPT.of(directory, rundir.state(directory).attempt)
                if directory not in asked and (ranks := stop(attempt, active.parent)):
                    asked.add(directory)
                    print(f"{active.label}: asked {ranks} to save and stop", flush=True)
                if len(self.interrupts.received) > 1 or (
                    time.monotonic() - began > STOP_LIMIT and not saving(directory)
                ):
                    kill(attempt, active.parent)
            time.sleep(POLL_HERE)
            self.look()
        print("stopped; the same command line continues", file=sys.stderr)
        return self.interrupts.status
