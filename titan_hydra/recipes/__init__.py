"""Ways of training beside plain text, each in a folder with its sources, objective, family, rules and commands. A
recipe registers its parts in the same way as a module of `train.imports`; deleting its folder removes the recipe
completely.
"""

import importlib
from pathlib import Path
from typing import Any

NAMES = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
RECIPES = [importlib.import_module(f"titan_hydra.recipes.{name}") for name in NAMES]


def of_all(table: str) -> dict[str, Any]:
    """Merge the tables called `table` of all recipes. COMMANDS maps the name of a `titan` subcommand to its module and
    its description. RENAMED maps the name of a former subcommand to what replaces it: (subcommand, word after it).
    """
    return {name: entry for recipe in RECIPES for name, entry in getattr(recipe, table, {}).items()}
