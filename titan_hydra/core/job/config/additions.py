"""Find what recipes and instruments add to the package: each is a folder that can be deleted."""

import argparse
import importlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[3]
WINGS = ("instruments", "recipes")


class Word(NamedTuple):
    """A word of `titan`, or a verb of one: its place, which is imported only when it is given, what it does, two or three
    command lines that show it, and the group in which `titan --help` lists it. A word without a place has verbs.
    """

    place: str  # a module with add_arguments(parser) and main(args), or module:name with name_arguments and name
    text: str
    examples: tuple[str, ...]
    group: str = "Instruments"

    def functions(self) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
        """Import the place, and return the function that adds the arguments and the one that runs the command."""
        module, _, name = self.place.partition(":")
        module_object = importlib.import_module(module)
        return getattr(module_object, f"{name}_arguments" if name else "add_arguments"), getattr(
            module_object, name or "main"
        )


def words_alone(commands: Iterable[str]) -> list[str]:
    """Return the words of a table of commands, without their verbs."""
    return [name for name in commands if " " not in name]


def verbs_of(word: str, commands: dict[str, Word]) -> dict[str, Word]:
    """Return the verbs of a word; empty if it has none."""
    return {name.partition(" ")[2]: verb for name, verb in commands.items() if name.startswith(f"{word} ")}


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
    """Merge the tables called `table` of all instruments and recipes. COMMANDS maps a word of `titan`, or a word and its
    verb ("data show"), to its Word; ELSEWHERE maps words of other programs to the line of `titan` that does it.
    """
    return {name: entry for module in additions() for name, entry in getattr(module, table, {}).items()}
