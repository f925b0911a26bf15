"""All mutants: those of the package, and those of recipes, which stand beside the recipes' tests. Imports no torch."""

import importlib
from pathlib import Path

from . import experts, formats, heads, layers, learning, losses, parametrization, reductions
from .mutant import Mutant

RECIPES = Path(__file__).parents[2] / "recipes"
SUBJECTS: dict[str, list[Mutant]] = {
    "reductions": reductions.MUTANTS,
    "losses": losses.MUTANTS,
    "experts": experts.MUTANTS,
    "layers, adapters": layers.MUTANTS,
    "limited logits": heads.MUTANTS,
    "number formats": formats.MUTANTS,
    "learning, resume": learning.MUTANTS,
    "width and depth": parametrization.MUTANTS,
}
for file in sorted(RECIPES.glob("*/mutants.py")):
    SUBJECTS |= importlib.import_module(f"tests.recipes.{file.parent.name}.mutants").SUBJECTS
