"""`titan resume RUN gpus=N`: start another attempt of a run, on another number of GPUs or in another layout.

The run keeps its directory, name and hash, and everything that determines what it learns: the global batch, the order
of the data, optimizer, seed and number formats. A key that would change one of these is refused.
"""

import dataclasses
import sys
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.operation import Launch, Paths
from titan_hydra.core.job.config.user_code import edited_sources
from titan_hydra.core.job.run import checkpoints, inputs, layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.layouts import checked_layouts, in_words, keep_first, relaid, with_one_layout
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.find import RunCell


def run_relaid(run: RunCell, values: list[str], runs: Path) -> int:
    """Start the attempt, and return the exit status of launch.py."""
    directory = run.directory
    refuse_state(directory)
    old = load_job(directory)
    if fault := edited_sources(old.train):
        raise ConfigError(f"{directory.name}: {fault}")
    if old.fault_tolerance.name != "off":
        raise ConfigError(
            f"{directory.name}: a run with fault_tolerance={old.fault_tolerance.name} keeps its layout: the state that its replica "
            "groups share is not cut anew"
        )
    new = relaid(
        dataclasses.replace(
            with_one_layout(old),
            launch=Launch(retry="all", require_proof=old.launch.require_proof),
            paths=Paths(str(runs.absolute())),
        ),
        values,
    )
    layouts, faults = checked_layouts(new)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    saved = checkpoints.complete(layout.CHECKPOINTS.of(directory))
    after = f"after step {checkpoints.step_of(saved[-1])}" if saved else "from the beginning, as it has no checkpoint"
    print(f"{directory.name}: goes on {after} with {in_words(new)}; it had {in_words(old)}", flush=True)
    if new.launch.mode != "dry":
        keep_first(directory)
    with inputs.at_first_folder(new, directory):
        return dispatch.begin([Cell(1, run.overrides, new, directory, 1, layouts=layouts)])


def refuse_state(directory: Path) -> None:
    """Raise ConfigError if the run is done, or may still be running."""
    state = rundir.state(directory)
    if state.kind == "done":
        raise ConfigError(f"{directory.name} is done; titan resume {directory.name} steps=N trains it longer")
    if state.active:
        raise ConfigError(f"{directory.name} is {state.kind}; {state.stopped_by(directory.name)}")
