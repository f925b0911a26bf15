"""How a configuration key is defined: a dataclass field with a description, a range, and what else the checks and the help read of it."""
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from .ranges import Range


def key(default: Any, help: str, range: Range | None = None, only: Sequence[str] = (), identity: bool = True,
        choices: Sequence[str] = (), late: bool = False) -> Any:
    """Define a described configuration field. A callable default is a factory; `...` means that conf/ must give the value.

    Range and choices apply to each element where the key is a list or a table. `late` fields were added after the first release: they are
    not hashed while at their default, so that earlier runs keep their identity.
    """
    metadata = {"help": help, "range": range, "only": only, "identity": identity, "choices": choices, "late": late}
    if default is ...:
        return field(default="???", metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
