"""Ways of training beside plain text, a folder each, with all that one needs: sources, objective, family, rules,
commands. A recipe registers its parts as a module of `train.imports` does; without its folder it does not exist.
"""

import importlib
from pathlib import Path

NAMES = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
RECIPES = [importlib.import_module(f"titan_hydra.recipes.{name}") for name in NAMES]


def recipe_commands() -> dict[str, tuple[str, str]]:
    """Return the subcommands of `titan` that recipes bring, by name: the module, and what it does."""
    return {name: command for recipe in RECIPES for name, command in getattr(recipe, "COMMANDS", {}).items()}
