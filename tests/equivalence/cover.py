"""Choose the cases of the matrix that the default suite runs, so that no pair of techniques and no planted fault is left
to the long tests alone.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations

from tests.equivalence.mutants import corpus
from titan_hydra.instruments.verify.case import Case

LAYOUT = ("parallelism", "pp_schedule", "ac", "compile")


def cover(cases: Sequence[Case]) -> set[str]:
    """Return names of a few of these cases. Each part that a case combines, each pair of parts of the layout, and each planted
    fault that one of all cases finds is in a case that is named.
    """
    mutants = [mutant for mutants in corpus.SUBJECTS.values() for mutant in mutants]
    goals: dict[str, set[tuple[str, ...]]] = {}
    for case in cases:
        parts = parts_of(case)
        pairs = {pair for pair in combinations(parts, 2) if all(part.startswith(LAYOUT) for part in pair)}
        found = {("planted", mutant.name) for mutant in mutants if case.name in mutant.cases}
        goals[case.name] = {(part,) for part in parts} | pairs | found
    chosen, left = set(), set().union(*goals.values())
    while left:
        best = max(goals, key=lambda name: len(goals[name] & left))
        chosen.add(best)
        left -= goals[best]
    return chosen


def parts_of(case: Case) -> list[str]:
    """Return what a case combines: its overrides but for sizes, those of its reference apart, and its properties."""
    overrides = [*case.overrides, *case.then, *(f"reference: {override}" for override in case.base)]
    values = dict(override.split("=", 1) for override in overrides)
    kept = {f"{key}={value}" for key, value in values.items() if not is_size(key, value)}
    return sorted(kept | {field.name for field in fields(Case) if getattr(case, field.name) is True} | {case.reference})


def is_size(key: str, value: str) -> bool:
    """Whether an override gives a number that is neither a degree nor the vocabulary, which some cases split unevenly."""
    return value.replace(".", "").isdecimal() and "parallelism" not in key and "vocab_size" not in key
