"""Find what recipes and instruments add to the package: each is a folder that can be deleted."""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[3]
WINGS = ("instruments", "recipes")


class Word(NamedTuple):
    """A word of `titan`: its module, which is imported only when the word is given, what it does, two or three command
    lines that show it, and the group in which `titan --help` lists it.
    """

    module: str
    text: str
    examples: tuple[str, ...]
    group: str = "Instruments"


def names_of_additions(wing: str) -> list[str]:
    """Return the names of a wing's folders; the list is empty if the wing is not there."""
    return sorted(file.parent.name for file in (PACKAGE / wing).glob("*/__init__.py"))


@cache
def additions() -> tuple[ModuleType, ...]:
    """Import the folders of both wings, which register their parts in the same way as a module of `train.imports`."""
    return tuple(
        importlib.import_module(f"titan_hydra.{wing}.{name}") for wing in WINGS for name in names_of_additions(wing)
    )


def of_all(table: str) -> dict[str, Any]:
    """Merge the tables called `table` of all instruments and recipes. COMMANDS maps a word of `titan` to its Word;
    RENAMED maps a former word, (subcommand, word after it), to what replaces it.
    """
    return {name: entry for module in additions() for name, entry in getattr(module, table, {}).items()}
