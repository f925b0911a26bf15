"""Ways of training beside plain text, a folder each, with all that one needs: sources, objective, family, rules,
commands. A recipe registers its parts as a module of `train.imports` does; without its folder it does not exist.
"""

import importlib
from pathlib import Path
from typing import Any

NAMES = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
RECIPES = [importlib.import_module(f"titan_hydra.recipes.{name}") for name in NAMES]


def of_all(table: str) -> dict[str, Any]:
    """Return a table of all recipes that have it. COMMANDS: the subcommands of `titan` that they bring, by name: the
    module, and what it does. RENAMED: what they were called before, a subcommand and a word behind it.
    """
    return {name: entry for recipe in RECIPES for name, entry in getattr(recipe, table, {}).items()}
