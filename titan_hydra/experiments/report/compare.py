"""Decide which cells may be compared. To compare tokens/s, some keys must be equal; to compare losses, others must.

The schema states for each key what it changes (`changes`, core/job/config/field.py). Keys of techniques may always differ: how a
job is split, its schedule, precision, activation checkpointing, compilation, and local batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import methodcaller
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import as_typed, did_you_mean, suggest
from titan_hydra.core.job.config.load import changes_of, kind_of, known_keys
from titan_hydra.experiments.compose.sweep import differing, key_of
from titan_hydra.experiments.runs.view import tells

from .cells import ReportCell

# What each key of config.json changes. If a section states `changes` for all its keys, the section is one entry.
CHANGES = {
    name: changes for key in known_keys() if not is_dataclass(kind_of(key)) for name, changes in [changes_of(key)]
}
WORK = [name for name, changes in CHANGES.items() if "work" in changes]  # must be equal where tokens/s are compared
# must be equal where losses are compared
LEARNING = [name for name, changes in CHANGES.items() if "learning" in changes]
HELD_OUT = [name for name, changes in CHANGES.items() if changes == "held-out loss"]
EQUAL = [name for name, changes in CHANGES.items() if changes != "technique"]
VERSIONS = ("torch", "torchao", "triton")
UNKNOWN = object()  # the value of a key whose file or result is missing; it counts as equal to every value
# further values that must be equal and are not keys of config.json
PLACE: dict[str, Callable[[ReportCell], Any]] = {
    "gpus": lambda cell: cell.gpus,
    "device": lambda cell: cell.device,
    "code": lambda cell: cell.code,
    **{f"versions.{package}": methodcaller("version", package) for package in VERSIONS},
}
RECIPES = ("experiment", "debug", "sweeps")  # groups whose options may set any key
DEGREES = ("gpus", "parallelism", "cluster.gpus_per_node")
# Key -> further keys: a sweep that varies one of the further keys also varies the key on purpose.
MEANS = {"data.global_batch": ("data.global_batch", "data.local_batch"), "gpus": DEGREES}


@dataclass(frozen=True)
class Difference:
    """A key that must be equal in all cells, but has several values in cells with numbers."""

    key: str
    values: dict[str, list[str]]  # for each formatted value, the labels of the cells that have it
    work: bool  # whether the key changes the computation per token
    learning: bool  # whether the key changes what a step learns
    purpose: bool  # whether the sweep varies the key on purpose

    def __str__(self) -> str:
        return f"{self.key} differs: {self.shown()}"

    def shown(self) -> str:
        """Return each value with the labels of at most three of its cells."""
        values = []
        for value, labels in self.values.items():
            more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
            values.append(f"{value} ({', '.join(labels[:3])}{more})")
        return "; ".join(values)


def value_of(cell: ReportCell, key: str) -> object:
    """Return a cell's value of a key; for a section, a tuple of its keys and values. UNKNOWN if the cell has no value."""
    if key in PLACE:
        value = PLACE[key](cell)
        return UNKNOWN if value is None else value
    value = cell.config.get(key)
    if value == {}:  # the table is empty here; in another cell it may be a section with keys
        return ((key, "{}"),)
    if key in cell.config:
        return as_typed(value) if isinstance(value, list | dict) else value
    below_key = (
        (name, repr(value))
        for name, value in cell.config.items()
        if name.startswith(f"{key}.") and _name_of(name) == key
    )
    return tuple(below_key) or UNKNOWN


def differences(cells: list[ReportCell], labels: list[str], swept: set[str]) -> list[Difference]:
    """Return the keys that must be equal in all cells but differ, each with whether the sweep varies it on purpose."""
    unequal = []
    for key in (*EQUAL, *PLACE):
        values: dict[object, list[str]] = {}
        for cell, label in zip(cells, labels, strict=True):
            if (value := value_of(cell, key)) is not UNKNOWN and not (key in HELD_OUT and cell.held_out is None):
                values.setdefault(value, []).append(label)
        if len(values) > 1:
            shown = {shown_value(key, value, values): of for value, of in values.items()}
            purpose = on_purpose(key, swept) or (key == "data.global_batch" and even(cells, swept))
            unequal.append(Difference(key, shown, key in WORK, key in LEARNING, purpose))
    return unequal + list(differences_of_files(cells, labels))


def differences_of_files(cells: list[ReportCell], labels: list[str]) -> Iterator[Difference]:
    """Yield a difference for each key whose path is the same in cells that have read other bytes there."""
    for key in sorted({key for cell in cells for key in cell.files}):
        read: dict[str, dict[object, list[str]]] = {}
        for cell, label in zip(cells, labels, strict=True):
            if key in cell.files:
                read.setdefault(str(cell.config.get(key)), {}).setdefault(cell.files[key], []).append(label)
        for path, values in read.items():
            if len(values) > 1:
                shown = {f"{path} with digest {digest}": of for digest, of in values.items()}
                yield Difference(key, shown, False, key not in HELD_OUT, False)


def on_purpose(key: str, swept: set[str]) -> bool:
    """Whether the sweep varies a key. It does if an override that differs between the sweep's cells sets the key, the
    key's group, or an option that may set any key (RECIPES).

    Code, versions and device never count as varied on purpose, as no override sets them: if they differ, the cells come
    from several checkouts or clusters. debug.balance_experts never counts either, as no real training uses it.
    """
    if (key in PLACE and key != "gpus") or key == "debug.balance_experts":
        return False
    names = (key, *MEANS.get(key, ()))
    return any(_within(name, by) or _within(by, name) or by in RECIPES for name in names for by in swept)


def even(cells: list[ReportCell], swept: set[str]) -> bool:
    """Whether all global batches have the same number of tokens, as in the paper's tables of long sequences. If the
    sweep varies the number of devices, the tokens per device must be the same instead (weak scaling).
    """
    tokens = [(cell.config.get("data.global_batch") or 0) * (cell.config.get("data.seq_len") or 0) for cell in cells]
    if len(set(tokens)) == 1:
        return True
    return len({total / (cell.gpus or 1) for total, cell in zip(tokens, cells, strict=True)}) == 1 and on_purpose(
        "gpus", swept
    )


def swept_keys(overrides: list[list[str]]) -> set[str]:
    """Return the keys and config groups whose overrides differ between the cells."""
    return {
        key_of(override).partition("@")[0].replace("/", ".") for of_cell in differing(overrides) for override in of_cell
    }


def varied(cells: list[ReportCell]) -> dict[str, list[Any]]:
    """Return for each key and group in which the cells' overrides differ, the value in each cell: of a key, the value of
    its configuration; of a group, the option that was typed, or None if it was not typed.
    """
    changes = differing([list(filter(tells, cell.overrides)) for cell in cells])
    named = dict.fromkeys(key_of(change) for of_cell in changes for change in of_cell)
    return {key.partition("@")[0].replace("/", "."): [value_typed(cell, key) for cell in cells] for key in named}


def value_typed(cell: ReportCell, key: str) -> Any:
    """Return a key's value in a cell or, if it is not in the cell's configuration, the text that was typed for it last."""
    if key in cell.config:
        value = cell.config[key]
        return as_typed(value) if isinstance(value, list | dict) else value
    typed = [override.partition("=")[2] for override in cell.overrides if key_of(override) == key]
    return typed[-1] if typed else None


def refuse(unequal: list[Difference], allowed: set[str]) -> None:
    """Raise ConfigError with a line for each difference. Differences on purpose, those in `allowed`, and those that
    change only the held-out loss are accepted.
    """
    unknown = [
        key for key in allowed if not any(_within(known, key) or _within(key, known) for known in (*EQUAL, *PLACE))
    ]
    if unknown:
        known = (*EQUAL, *PLACE, "versions")
        hint = did_you_mean(suggest(unknown[0], known), otherwise=f"; there are {', '.join(known)}")
        raise ConfigError(f"--allow {unknown[0]}: not a key that must be equal{hint}")
    lines = [
        f"{difference}; leave cells out, or --allow {difference.key}"
        for difference in unequal
        if not (difference.purpose or difference.key in HELD_OUT or is_allowed(difference.key, allowed))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def is_allowed(key: str, allowed: Iterable[str]) -> bool:
    """Whether --allow names this key, or the group of this key."""
    return any(_within(key, name) for name in allowed)


def same(cell: ReportCell, baseline: ReportCell, keys: Iterable[str]) -> bool:
    """Whether two cells have equal values of all these keys; an unknown value counts as equal."""
    pairs = ((value_of(cell, key), value_of(baseline, key)) for key in keys)
    return all(UNKNOWN in pair or pair[0] == pair[1] for pair in pairs)


@cache
def _name_of(key: str) -> str:
    """Return the name under which a key is compared: the section's name if the section as a whole states `changes`,
    else the key's own name.
    """
    return changes_of(key)[0]


def _within(key: str, group: str) -> bool:
    return key == group or key.startswith(f"{group}.")


def shown_value(key: str, value: object, values: Iterable[Any]) -> str:
    """Format a value. For a section, show its `name` if the names differ between cells, and those keys in which
    sections of the same name differ.
    """
    if not (isinstance(value, tuple) and key not in PLACE and value and isinstance(value[0], tuple)):
        return as_typed(value)
    leaves, others = dict(value), [dict(other) for other in values]
    name = f"{key}.name"
    alike = [other for other in others if other.get(name) == leaves.get(name)]
    changing = [leaf for leaf in leaves if len({other.get(leaf) for other in alike}) > 1]
    names = [leaves[name].strip("'")] if name in leaves and len(alike) < len(others) else []
    return ", ".join(names + [f"{leaf}={leaves[leaf]}" for leaf in changing[:3]])
