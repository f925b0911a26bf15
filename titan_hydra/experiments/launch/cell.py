"""A cell that passed the checks: its job, its run directory, and the rule that decides whether its run is started."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config import Fault, Job, identity
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.core.job.config.schema import EPOCH
from titan_hydra.core.job.config.user_code import sources
from titan_hydra.core.job.ranks import all_ranks, runs_here
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.inputs import CHANGED
from titan_hydra.core.job.run.layout import runs_of
from titan_hydra.core.job.run.run import hash_of
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.runs.proofs import folder_of_proof, proof_of
from titan_hydra.experiments.runs.rundir import State

# For each value of launch.retry: the exit statuses of the failed runs that this value starts again.
RETRY = {
    "none": (),
    "oom": (Exit.OUT_OF_MEMORY,),
    "node": (Exit.UNHEALTHY, Exit.HANG),
    "failed": tuple(Exit),
    "all": tuple(Exit),
}


@dataclass(frozen=True)
class Cell:
    """One cell that passed the checks."""

    number: int  # position among all cells of the command line, counted from 1
    overrides: list[str]
    job: Job
    directory: Path
    of: int  # number of cells of the command line
    prediction: predict.Prediction | None = None
    # for an elastic job: a copy of the job in each layout, from the most nodes to the fewest
    layouts: tuple[Job, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks; for an elastic job, the number in its largest layout."""
        return max(map(all_ranks, self.layouts), default=all_ranks(self.job))

    @property
    def nodes(self) -> int:
        # replica groups that are separate jobs do not share nodes
        groups = 1 if runs_here(self.job) else self.job.fault_tolerance.replicas
        return groups * math.ceil(self.ranks / groups / (self.job.cluster.gpus_per_node or self.ranks))

    @property
    def name(self) -> str:
        """The name of the cell in its sweep, or what was typed of its job."""
        typed = (word for word in self.overrides if not word.startswith("launch."))
        return self.job.sweep.cell or " ".join(typed) or self.directory.name

    @property
    def label(self) -> str:
        """The position of the cell in its command line, such as "cell 2 of 8"; "" if it is the only cell."""
        return f"cell {self.number} of {self.of}" if self.of > 1 else ""

    @property
    def runs(self) -> Path:
        """The folder that contains all run directories."""
        return runs_of(self.job)

    def wants(self, state: State) -> bool:
        """Whether the launcher starts the cell (again) if its run is in this state."""
        if state.active:
            return False
        again = state.kind == "failed" and state.failure.status in RETRY[self.job.launch.retry]
        return self.job.launch.force or again or state.kind in ("new", "not submitted", "interrupted")

    @property
    def gpu_hours(self) -> float | None:
        """An upper bound of the cell's GPU-hours; None without a time limit."""
        minutes = self.job.cluster.time_minutes
        return None if minutes is None else self.ranks * minutes / 60


def without_proof(cells: list[Cell]) -> Iterator[Fault]:
    """If launch.require_proof is set, yield a fault for each cell whose layout has no proof made with this code."""
    for cell in cells:
        for job in cell.layouts or (cell.job,):
            if not job.launch.require_proof or proof_of(job):
                continue
            name = folder_of_proof(job).name
            line = f"titan verify {quoted(cell.overrides) or f'gpus={job.gpus}'}"
            yield Fault(
                "launch.require_proof",
                True,
                f"{cell.directory.name}: its layout has no proof {name} of this code and torch; make it: {line}",
            )


def of_another_pass(cell: Cell) -> Iterator[Fault]:
    """With steps=epoch, the number of steps follows from the data. Yield a fault for each run of the same job that began
    when the data had another number of samples; otherwise changed data would begin a new run, without a word.
    """
    for directory in sorted(cell.runs.glob(f"{cell.job.name}-*")):
        then = layout.CONFIG.read(directory)
        samples = then.get("data", {}).get("samples")
        if samples in (None, cell.job.data.samples):
            continue
        data = dataclasses.replace(cell.job.data, samples=samples)
        if identity(dataclasses.replace(cell.job, steps=then["steps"], data=data)) == hash_of(directory):
            reason = (
                f"the data have {cell.job.data.samples:,} samples, and had {samples:,} when {directory.name} began; "
                "launch.force=true begins a run with these"
            )
            yield Fault("steps", EPOCH, reason, code=CHANGED)


def user_sources(cells: list[Cell]) -> dict[str, Path]:
    """Return the files of the modules that these cells import (`user_code.sources`)."""
    return sources(dict.fromkeys(module for cell in cells for module in cell.job.train.imports))


def to_start(cells: list[Cell], states: list[State]) -> list[Cell]:
    """Return the cells that are to be started (again), according to the states of their runs."""
    return [cell for cell, state in zip(cells, states, strict=True) if cell.wants(state)]
