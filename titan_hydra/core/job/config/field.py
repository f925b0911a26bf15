"""How a configuration key is defined: a dataclass field with a description, a range, and other properties that the
checks and the help use.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from .ranges import Range

Changes = Literal["learning", "work", "learning and work", "held-out loss", "technique"]
READS = ("data", "validation", "tasks", "tokenizer", "weights", "schedule")  # what files can be
Reads = Literal["data", "validation", "tasks", "tokenizer", "weights", "schedule"]


def key(
    default: Any,
    help: str,
    range: Range | None = None,
    only: Sequence[str] = (),
    identity: bool | Literal["if set"] = True,
    choices: Sequence[str] = (),
    changes: Changes | None = None,
    entry: type | None = None,
    reads: Reads | None = None,
) -> Any:
    """Define a described configuration field. A callable default is a factory; `...` means that conf/ must give the
    value.

    `identity` is whether the key is part of the hash that names a run. With "if set", the key is part of the hash only
    if its value is not the default. So a key that a later version adds does not change the hashes of earlier runs.

    If the key is a list or a table, range and choices apply to each element; `entry` is the dataclass of a table's
    values. `changes` states what changes with the value of the key: what is learned, the work of a step (what it
    computes, or how long it takes), both, the samples of the held-out loss, or only the technique. `changes_of`
    (load.py) defines what None means. `reads` is for a key that names files: what these files are. Their contents are
    then part of what a run is (core/job/inputs.py).
    """
    metadata = {
        "help": help,
        "range": range,
        "only": only,
        "identity": identity,
        "choices": choices,
        "changes": changes,
        "entry": entry,
        "reads": reads,
    }
    if default is ...:
        return field(default="???", metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
