"""All mutants: those of the package, and those that come with objectives of recipes. Imports no torch."""

from titan_hydra.core.job.config.registry import OBJECTIVES, resolve

from . import experts, formats, layers, learning, losses, parametrization, reductions
from .mutant import Mutant

SUBJECTS: dict[str, list[Mutant]] = {
    "reductions": reductions.MUTANTS,
    "losses": losses.MUTANTS,
    "experts": experts.MUTANTS,
    "layers, adapters": layers.MUTANTS,
    "number formats": formats.MUTANTS,
    "learning, resume": learning.MUTANTS,
    "width and depth": parametrization.MUTANTS,
}


def corpus() -> dict[str, list[Mutant]]:
    """Return the mutants by subject; for mutants of a recipe, the subject is the name of its objective."""
    own = {f"objective {name}": resolve(record.mutants) for name, record in OBJECTIVES.items() if record.mutants}
    return SUBJECTS | own
