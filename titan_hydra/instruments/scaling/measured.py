"""What a sweep measured of a ladder: the held-out loss of each size and number of tokens, averaged over seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from titan_hydra.core.base.amounts import brief
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import as_typed
from titan_hydra.core.job.config.load import changes_of
from titan_hydra.experiments.report.cells import ReportCell, gather, mean
from titan_hydra.experiments.runs.find import RunCell, Selection

from .law import Ladder

COUNTS = {
    "all": "all parameters, as Chinchilla counts them",
    "body": "without the embedding and the head, as Kaplan et al. count them",
}
# Sections and keys whose numbers may depend on the size or on the number of tokens. A value that is text must be the
# same in all runs, except the name of the model's option.
FOLLOWING = ("model", "optimizer", "lr_scheduler", "steps", "data.global_batch")
NAMES = ("model.name",)
AVERAGED = "seed"


@dataclass(frozen=True)
class MeasuredLadder:
    """The ladder of a sweep, with notes on what was left out or varies, and the run with most compute."""

    name: str
    ladder: Ladder
    notes: list[str]
    largest: RunCell


def read_ladder(selection: Selection, count: str = "all") -> MeasuredLadder:
    """Read the runs of a sweep that are done. Raises ConfigError if the sweep mixes recipes, or has no such run."""
    cells = [cell for cell in gather(selection) if not cell.repeat]
    left_out = _left_out(cells)
    notes = [f"left out: {len(left)} of {len(cells)} runs, {why} ({_few(left)})" for why, left in left_out.items()]
    gone = {name for left in left_out.values() for name in left}
    usable = [cell for cell in cells if cell.name not in gone]
    if not usable:
        raise ConfigError("; ".join([f"{selection.name}: no run has a held-out loss", *notes]))
    groups: dict[tuple[int, int], list[ReportCell]] = {}
    for cell in usable:
        groups.setdefault((parameters_counted(cell, count), cell.tokens), []).append(cell)
    if varying := _one_recipe(selection.name, groups):
        notes.append(f"varies with the size or the tokens: {', '.join(varying)}")
    seeds = sorted({len(group) for group in groups.values()})
    if seeds[-1] > 1:
        notes.append(f"losses are means over {' to '.join(map(str, seeds))} seeds")
    import numpy as np

    keys = sorted(groups)
    ladder = Ladder(
        np.array([float(size) for size, _ in keys]),
        np.array([float(tokens) for _, tokens in keys]),
        np.array([mean([cell.held_out for cell in groups[key]]) for key in keys]),
        np.array([len(groups[key]) for key in keys]),
    )
    last = groups[max(keys, key=lambda key: key[0] * key[1])][0]
    return MeasuredLadder(selection.name, ladder, notes, RunCell(last.name, last.directory, last.overrides))


def parameters_counted(cell: ReportCell, count: str) -> int:
    """Return a run's number of parameters: all of them, or all except those of the embedding and the head."""
    if count == "all":
        return int(cell.parameters)
    ends = 1 if cell.config.get("model.tie_embeddings") else 2
    return int(cell.parameters - ends * cell.config["model.vocab_size"] * cell.config["model.dim"])


def _left_out(cells: list[ReportCell]) -> dict[str, list[str]]:
    """Return the names of the runs that cannot be used, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.done:
            by_reason.setdefault(cell.word, []).append(cell.name)
        elif cell.held_out is None:
            by_reason.setdefault("without a held-out loss (validation=on measures it)", []).append(cell.name)
        elif not (isfinite(cell.held_out) and cell.held_out > 0 and cell.parameters and cell.tokens):
            by_reason.setdefault("with a result that is damaged", []).append(cell.name)
    return by_reason


def _one_recipe(name: str, groups: dict[tuple[int, int], list[ReportCell]]) -> list[str]:
    """Return the keys that vary with the size or the tokens. Raises ConfigError if runs differ otherwise in what is
    learned, or in the samples of the held-out loss.
    """
    every = [cell for group in groups.values() for cell in group]
    varying = []
    for key in dict.fromkeys(key for cell in every for key in cell.config):
        if key == AVERAGED or changes_of(key)[1] not in ("learning", "learning and work", "held-out loss"):
            continue
        values = _values(key, every)
        if len(values) < 2:
            continue
        follows = any(key == following or key.startswith(f"{following}.") for following in FOLLOWING)
        numbers = all(isinstance(cell.config.get(key), int | float | None) for cell in every)
        words = any(isinstance(cell.config.get(key), bool) for cell in every)
        by_size = all(len(_values(key, group)) == 1 for group in groups.values())
        if not (follows and by_size and (key in NAMES or (numbers and not words))):
            raise ConfigError(
                f"{name}: {key} differs between runs ({_few(values)}), so the sweep mixes recipes; give each recipe its own "
                "sweep.name, and compare them: titan scale A B"
            )
        varying.append(key)
    return varying


def _values(key: str, cells: Iterable[ReportCell]) -> list[str]:
    return list(dict.fromkeys(as_typed(cell.config.get(key)) for cell in cells))


def _few(words: list[Any]) -> str:
    return ", ".join(map(str, words[:3])) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def describe_ladder(ladder: Ladder) -> str:
    """Return the numbers of cells and sizes, and the ranges of parameters, tokens and compute, in a line."""
    import numpy as np

    sizes = len(np.unique(ladder.parameters))
    ranges = [
        f"{brief(values.min())} to {brief(values.max())} {quantity}"
        for values, quantity in ((ladder.parameters, "parameters"), (ladder.tokens, "tokens"))
    ]
    low, high = ladder.flops.min(), ladder.flops.max()
    return f"{len(ladder.losses)} cells of {sizes} sizes: {', '.join(ranges)}, {low:.3g} to {high:.3g} FLOPs (x{high / low:,.0f})"
