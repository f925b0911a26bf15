"""Expand a composed configuration into the cells of its sweep file, and name cells that have no name.

A file of sweeps/ names its cells, and lists the overrides by which each cell differs from the file's own values:

    # @package _global_
    # When to choose it.
    defaults:
      - override /model: llama3_8b
    steps: 100
    sweep:
      name: layouts
      baseline: fsdp
      cells:
        fsdp: [parallelism=fsdp]
        fsdp_tp: [parallelism=fsdp_tp, parallelism.tp=4]

A cell's overrides take precedence over the file's values, and the command line over both.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config.fault import Fault, as_value, suggest
from titan_hydra.core.job.config.load import give_types
from titan_hydra.core.job.config.operation import Sweep

from .explain import explain
from .overrides import mistakes

Composed = tuple[Any, list[str]]  # a composed configuration (OmegaConf's), and the overrides that made it


def expand_sweep(config: Any, overrides: list[str], faults: list[str]) -> list[Composed]:
    """Return the cells of a configuration: those of its sweep file, or the configuration itself. Call this while Hydra
    composes, in @hydra.main's function.

    A cell that does not compose adds a line to `faults` instead of raising, since Hydra would print an exception in its
    own way. `sweep.cell=NAME` selects one cell, so that the overrides of a cell reproduce that cell.
    """
    file, typed = _split(overrides)
    if wrong := _typed(config, file):
        faults.extend(wrong)
        return []
    cells, only = config.sweep.cells, config.sweep.cell
    if not cells:
        return [(config, overrides)]
    for key, value in (("sweep.cell", only), ("sweep.baseline", config.sweep.baseline)):
        if value is not None and value not in cells:
            faults.append(
                str(Fault(key, value, f"{_where(file)} has no such cell", legal=suggest(value, cells) or tuple(cells)))
            )
    composed, compose, folders = [], *_composition()
    for name, of_cell in cells.items():
        if only not in (None, name):
            continue
        try:
            if not (lines := mistakes(of_cell, folders)):
                composed.append(_compose_cell(compose, name, file, list(of_cell), typed))
        except Exception as error:
            if not (line := explain(error)):
                raise
            lines = [line]
        faults += [f"{line}   ({_where(file)}, cell {name}: {redact(' '.join(of_cell))})" for line in lines]
    _tell_of_overridden({name: of_cell for name, of_cell in cells.items() if only in (None, name)}, typed, _where(file))
    return composed


def sweep_cells(compose: Callable[[list[str]], Any], overrides: list[str]) -> list[Composed]:
    """Return the cells that overrides compose to, for programs other than launch.py. Several sweep files may be named, as
    +sweeps=paper_table1,paper_table2.
    """
    file, typed = _split(overrides)
    key, _, names = file[0].partition("=") if file else ("", "", "")
    composed: list[Composed] = []
    for own_file in [[f"{key}={name}"] for name in names.split(",")] if file else [[]]:
        config = compose([*own_file, *(override for override in overrides if override not in file)])
        if wrong := _typed(config, own_file):
            raise ConfigError("\n".join(wrong))
        only = config.sweep.cell
        cells = [
            _compose_cell(compose, name, own_file, list(of_cell), typed)
            for name, of_cell in config.sweep.cells.items()
            if only in (None, name)
        ]
        composed += cells or [(config, [*own_file, *typed])]
    return composed


def _typed(config: Any, file: list[str]) -> list[str]:
    """Give the section `sweep` of a composed configuration the types of its keys, as its names and cells are used before
    `read` types the others. Return the faults.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config.sweep, resolve=True)
    cells = values.get("cells")
    for of_cell in cells.values() if isinstance(cells, dict) else ():
        if not isinstance(of_cell, list) or not all(isinstance(override, str) for override in of_cell):
            reason = "a cell has a name and a list of overrides; quote an override that holds a comma"
            return [f"{_where(file)}: sweep.cells: {reason}"]
    if not (faults := list(give_types(Sweep, values, "sweep."))):
        config.sweep = values
    return list(map(str, faults))


def named(composed: list[Composed]) -> list[Composed]:
    """Fill in the missing names of the cells of one command line: sweep.name from the swept keys, sweep.cell from the
    overrides that differ.

    No two cells have the same name: if -m has multiplied the cells of a file, the swept overrides are appended to the
    names. A single run gets no name.
    """
    groups: dict[str | None, list[Composed]] = {}
    for config, overrides in composed:
        groups.setdefault(config.sweep.cell, []).append((config, overrides))
    sweeps = dict.fromkeys(config.sweep.name for config, _ in composed if config.sweep.name is not None)
    swept: dict[str, None] = {}
    for cell, group in groups.items():
        for (config, _), changes in zip(group, differing([overrides for _, overrides in group]), strict=True):
            swept |= dict.fromkeys(key_of(change).rpartition(".")[2] for change in changes)
            config.sweep.cell = " ".join([cell or "", *changes]).strip() or None
    taken: dict[str, int] = {}
    for config, _ in composed:
        config.sweep.name = "-".join(sweeps or swept) or None
        if (cell := config.sweep.cell) is not None:
            taken[cell] = taken.get(cell, 0) + 1
            config.sweep.cell = cell if taken[cell] == 1 else f"{cell} ({taken[cell]})"
    first = {cell: group[0][0].sweep.cell for cell, group in groups.items()}
    for config, _ in composed:
        config.sweep.baseline = first.get(config.sweep.baseline, config.sweep.baseline)
    return composed


def differing(overrides: list[list[str]]) -> list[list[str]]:
    """Return for each cell its overrides, without the overrides that all cells share."""
    common = set.intersection(*map(set, overrides)) if overrides else set()
    return [[override for override in cell if override not in common] for cell in overrides]


def _composition() -> tuple[Callable[[list[str]], Any], list[Path]]:
    """Return a function that composes a cell with the running Hydra, and the folders of its options."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from .cells import composer_of

    hydra = HydraConfig.get()
    paths = [override for override in hydra.overrides.hydra if override.lstrip("+").startswith("hydra.searchpath")]
    composer = composer_of(GlobalHydra.instance().config_loader(), hydra.job.config_name)
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    return lambda overrides: composer([*paths, *overrides]), folders


def _compose_cell(
    compose: Callable[[list[str]], Any], name: str, file: list[str], of_cell: list[str], typed: list[str]
) -> Composed:
    """Compose a cell from the overrides of the sweep file, of the cell itself and of the command line, the later ones
    count. Return it with the overrides that compose it again.
    """
    config = compose([*file, *of_cell, *typed])
    if wrong := _typed(config, file):
        raise ConfigError("\n".join(wrong))
    config.sweep.cells = {}
    config.sweep.cell = name
    return config, [*file, f"sweep.cell={as_value(name)}", *of_cell, *typed]


def _tell_of_overridden(cells: dict[str, Any], typed: list[str], where: str) -> None:
    """Warn if the command line overrides keys that cells set. The command line takes precedence, so the cells differ
    less than their names suggest.
    """
    for override in typed:
        names = [
            name
            for name, of_cell in cells.items()
            if override not in of_cell and key_of(override) in map(key_of, of_cell)
        ]
        if names:
            quoted = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            warn_once(f"warning: {override} takes the place of what {where} gives the cells {quoted}")


def key_of(override: str) -> str:
    """Return the key or group that an override names."""
    return override.lstrip("+~").partition("=")[0]


@functools.cache
def warn_once(line: str) -> None:
    """Print a line on stderr, once for each command line."""
    print(line, file=sys.stderr)


def _split(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return the override that chooses the sweep file, and the other typed overrides except sweep.cell."""
    file = [override for override in overrides if override.lstrip("+").startswith("sweeps=")]
    return file, [
        override
        for override in overrides
        if override not in file and not override.lstrip("+").startswith("sweep.cell=")
    ]


def _where(file: list[str]) -> str:
    return f"sweeps/{file[0].partition('=')[2]}.yaml" if file else "the sweep"
