"""Print what launch.py shows: tables of cells, how a run ended, and what to type next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.amounts import or_dash
from titan_hydra.core.base.text import table
from titan_hydra.core.job.batches import pass_in_words
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.ranks import runs_here
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.runs.find import runs_option
from titan_hydra.experiments.runs.hints import hint
from titan_hydra.experiments.runs.rundir import State

from .longer import is_worth_extending

if TYPE_CHECKING:
    from .cell import Cell

PREDICTED = ("predicted GiB", "fits", "tokens/s/device", "GPU-hours")


def results(cells: list[Cell], states: list[State]) -> None:
    """Print the result of each cell of a sweep."""
    rows = []
    for cell, state in zip(cells, states, strict=True):
        result = layout.RESULT.read(cell.directory) if state.kind == "done" else {}
        numbers = [
            or_dash(result.get(key), form)
            for key, form in (
                ("steps", ""),
                ("final_loss", ".4f"),
                ("tokens_per_second", ",.0f"),
                ("memory_gib", ".1f"),
                ("seconds", ".0f"),
            )
        ]
        rows.append([cell.directory.name, cell.name, state.failure.line if state.failure else state.kind, *numbers])
    numbers = ("steps", "loss", "tokens/s/device", "GiB", "seconds")
    print(*table(["run", "cell", "status", *numbers], rows, numbers, ("cell", "run")), sep="\n")


def passes(cells: list[Cell]) -> None:
    """Print the number of steps of each cell with steps=epoch."""
    for cell in cells:
        if cell.job.data.samples is not None:
            print(f"{cell.directory.name}: {pass_in_words(cell.job)}", flush=True)


def dry_run(cells: list[Cell], states: list[State], hours: float | None) -> None:
    """Print the cells that would run without launch.mode=dry, and their resources. `hours` is an upper bound of the
    GPU-hours of all cells that would start.
    """
    rows = []
    for cell, state in zip(cells, states, strict=True):
        count = family_of(cell.job.model).parameters
        rows.append(
            [
                cell.directory.name,
                cell.name,
                or_dash(count and count(cell.job.model), ","),
                cell.ranks,
                cell.nodes,
                state.kind,
                or_dash(cell.gpu_hours, ",.1f"),
            ]
        )
    numbers = ("parameters", "ranks", "nodes", "GPU-hours at most")
    titles = ["run", "cell", *numbers[:3], "state", numbers[3]]
    if any(cell.prediction for cell in cells):
        titles += PREDICTED
        rows = [
            [*row, *(predict.line(cell.prediction) if cell.prediction else "----")]
            for row, cell in zip(rows, cells, strict=True)
        ]
    right = (*numbers, *PREDICTED[:1], *PREDICTED[2:])
    leaves = ("GPU-hours at most", "parameters", "tokens/s/device", "nodes", "GPU-hours")
    shown = [title for title in leaves if title in titles]
    print(*table(titles, rows, right, ("cell", "run"), leaves=shown), sep="\n")
    start = sum(cell.wants(state) for cell, state in zip(cells, states, strict=True))
    others = [state.kind for cell, state in zip(cells, states, strict=True) if not cell.wants(state)]
    parts = [f"{start} to start", *(f"{others.count(kind)} {kind}" for kind in dict.fromkeys(others))]
    if hours is not None:
        parts.append(f"at most {hours:,.1f} GPU-hours")
    elif not all(runs_here(cell.job) for cell in cells):
        parts.append("no bound on GPU-hours without cluster.time_minutes")
    print(f"{counted(len(cells), 'cell')}: " + ", ".join(parts))


def predicted(cells: list[Cell]) -> None:
    """Print the predicted memory, rate and GPU-hours of each cell that is to start."""
    for cell in cells:
        if cell.prediction:
            gib, fits, rate, hours = predict.line(cell.prediction)
            print(
                f"{cell.directory.name}: predicted {gib} GiB ({fits}), {rate} tokens/s/device, {hours} GPU-hours",
                flush=True,
            )


def submitted(cells: list[Cell], states: list[State], folder: Path | None) -> None:
    """Print a table of all cells of a submission with their states, and what to type next."""
    rows = []
    for cell, state in zip(cells, states, strict=True):
        word = (
            f"failed: {state.failure.line}"
            if state.failure
            else waiting(state)
            if state.kind in ("queued", "unknown")
            else state.kind
        )
        rows.append([cell.directory.name, cell.name, cell.nodes, cell.ranks, state.job.id if state.job else "-", word])
    print(
        *table(["run", "cell", "nodes", "ranks", "job", "state"], rows, ("nodes", "ranks"), ("cell", "run")), sep="\n"
    )
    kinds = [state.kind for state in states]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    target = folder.name if folder else cells[0].directory.name
    for command, use in (
        ("status", "the progress"),
        ("logs -f", "rank 0's output"),
        ("stop", "stop them"),
        ("report", "the table"),
    ):
        if folder or command != "report":
            print(
                f"  titan {command}{where(cells[0])} {cells[0].directory.name if command == 'logs -f' else target}   {use}"
            )
    if "failed" in kinds:
        print("  failed cells start again only when asked: launch.retry=failed, or titan resume")


def where(cell: Cell) -> str:
    """Return the option --runs of a suggested `titan` command, for the folder of a cell's runs; "" for the default
    folder.
    """
    return runs_option(Path(cell.job.paths.runs).expanduser())


def waiting(state: State) -> str:
    """Return a phrase that explains why a run is not running yet; it contains the reason that the queue gives."""
    if state.kind == "unknown":
        return (
            f"unknown (on {state.host}); nothing was started"
            if state.host
            else f"unknown: {state.refused or 'its queue does not answer'}; nothing was started"
        )
    reason = state.job.why if state.job else ""
    start = state.job.start if state.job and state.job.start not in ("", "N/A", "Unknown") else ""
    return "queued" + (f" ({reason})" if reason else "") + (f", expected to start {start}" if start else "")


def result_line(directory: Path) -> str:
    """Return one line about a finished run."""
    result = layout.RESULT.read(directory)
    loss, rate = or_dash(result.get("final_loss"), ".4f"), or_dash(result.get("tokens_per_second"), ",.0f")
    held_out = (
        "" if result.get("validation_loss") is None else f" (held out {result['validation_loss']:.4f}{lowest(result)})"
    )
    return (
        f"{directory.name}: done, {counted(result.get('steps') or 0, 'step')}, loss {loss}{held_out}, {rate} tokens/s per device "
        f"({layout.RESULT.of(directory)})"
    )


def lowest(result: dict[str, Any]) -> str:
    """Return a phrase with the lowest held-out loss of a result, and whether the checkpoint of that step was kept.
    Return "" if the last held-out loss is the lowest.
    """
    loss, step = result.get("lowest_validation_loss"), result.get("lowest_validation_step")
    if loss is None or step == result.get("steps"):
        return ""
    return f", lowest {loss:.4f} at step {step}{', kept' if result.get('best_checkpoint') else ''}"


def suggest_longer_run(cell: Cell) -> None:
    """Print the `titan resume` command with more steps for a finished run that has left a checkpoint, if the command would be accepted
    and would not train on samples that are stale. If there is only one checkpoint,
    the command names its step, because this checkpoint was written after the learning rate had decayed.
    """
    steps = [checkpoints.step_of(path) for path in checkpoints.complete(layout.CHECKPOINTS.of(cell.directory))]
    if steps and is_worth_extending(cell.job):
        wanted = f" --step {steps[0]}" if len(steps) == 1 else ""
        print(f"  train longer: titan resume{where(cell)} {cell.directory.name} steps={2 * cell.job.steps}{wanted}")


def last_word(directory: Path, state: State) -> str:
    """Return the last message of rank 0 of a run that was stopped. If there is no message, describe how the run ended."""
    if not directory.is_dir():
        return "its folder was deleted while it ran, and everything in it"
    error = layout.RANK.read(layout.ATTEMPT.of(directory, state.attempt)).get("error") or {}
    return error.get("message") or "ended before it could save; it goes back to its newest checkpoint, if there is one"


def failure(directory: Path, why: Failure) -> None:
    """Print the error of the rank that failed first, and where its log is."""
    if why.detail:
        print(f"\n{why.detail}\n", file=sys.stderr)
    print(f"{directory.name}: failed ({why.status}): {why.line}", file=sys.stderr)
    if why.log:
        print(f"  log: {why.log}", file=sys.stderr)
    if advice := hint(why):
        print(f"  try: {advice}", file=sys.stderr)
