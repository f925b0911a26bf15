"""The trial: which mutants the matrix and the tests find, in which case and column, and how far the difference is
beyond its bound. Imports no torch.

References are run again for each mutant, in the changed tree. Most faults are in code that one process runs too, so in
a package that really has the fault, the reference has it as well, and a comparison shows nothing. With references of
the unchanged tree, the trial would count such faults as found.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from titan_hydra.instruments.verify.case import QUICK_STEPS
from titan_hydra.instruments.verify.matrix import whole_matrix

from .copy import PER_TEST, Copy
from .mutant import Mutant

STEPS = 10  # optimizer steps of the cases of the whole matrix, as `titan verify` makes them
TOGETHER = 16  # number of cases that are run at a time in the unchanged tree
By = Literal["quick", "matrix", "tests", "missed"]


@dataclass(frozen=True)
class Finding:
    """What found a mutant. For a missed mutant, the case and the column whose difference came nearest to its bound."""

    mutant: Mutant
    by: By
    where: str  # the case or the test
    column: str
    # the difference as a multiple of its bound, or the number of values that differ although they must be equal
    times: float
    seconds: float

    @property
    def found(self) -> bool:
        return self.by != "missed"


class Trial:
    """Plants mutants in one copy of the package. `tell` gets each line about the progress."""

    def __init__(self, quick_only: bool, tell: Callable[[str], None]) -> None:
        self.quick_only, self.tell = quick_only, tell
        self.cases = {case.name: case for case in whole_matrix()}
        self.sound: dict[
            str, bool
        ] = {}  # whether a case or test passes in the unchanged tree; if it fails there, it finds no mutant

    def run(self, mutants: Iterable[Mutant]) -> Iterator[Finding]:
        """Yield a finding for each mutant."""
        mutants = [mutant for mutant in mutants if not self.quick_only or self.quick_of(mutant)]
        copy = Copy()
        try:
            self._control(copy, mutants)
            for mutant in mutants:
                yield self._examine(copy, mutant)
        finally:
            copy.close()

    def quick_of(self, mutant: Mutant) -> list[str]:
        """Return the mutant's short cases."""
        return [name for name in mutant.cases if self.cases[name].quick]

    def _control(self, copy: Copy, mutants: list[Mutant]) -> None:
        """Run the quick cases in the unchanged tree, to know which of them pass without a mutant."""
        names = list(dict.fromkeys(name for mutant in mutants for name in self.quick_of(mutant)))
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            self.tell(f"cases {first + 1} to {first + len(some)} of {len(names)} in the unchanged tree")
            found = copy.run(some, QUICK_STEPS)
            rows = (
                rated(found, some)
                if "error" not in found
                else [row for name in some for row in rated(copy.run([name], QUICK_STEPS), [name])]
            )
            for case, column, times, passed in rows:
                self.sound[case] = passed
                if not passed:
                    self.tell(f"without any mutant: {case} does not pass: {column} is {times:.2g} times its bound")

    def _examine(self, copy: Copy, mutant: Mutant) -> Finding:
        began, nearest = time.monotonic(), ("", "", 0.0)

        def finding(by: By, where: str, column: str, times: float) -> Finding:
            return Finding(mutant, by, where, column, times, time.monotonic() - began)

        cases = [name for name in mutant.cases if self.sound.get(name, True)]
        stages: list[tuple[By, list[str], int]] = [
            ("quick", [name for name in cases if self.cases[name].quick], QUICK_STEPS)
        ]
        stages += [] if self.quick_only else [("matrix", cases, STEPS)]
        with copy.planted(mutant):
            for by, names, steps in stages:
                for where, column, times, passed in rated(copy.run(names, steps), names) if names else ():
                    if not passed:
                        return finding(by, where, column, times)
                    nearest = max(nearest, (where, column, times), key=lambda one: one[2])
        for test in () if self.quick_only else mutant.tests:
            with copy.planted(mutant):
                failed = copy.fails(test)
            if failed is None:
                self.tell(f"no verdict on {mutant.name}: {test} has not ended after {PER_TEST} s")
            if failed and self._passes_alone(copy, test):
                return finding("tests", test, "test", float("inf"))
        return finding("missed", *nearest)

    def _passes_alone(self, copy: Copy, test: str) -> bool:
        if test not in self.sound:
            self.sound[test] = copy.fails(test) is False
            if not self.sound[test]:
                self.tell(f"without any mutant: {test} fails")
        return self.sound[test]


def rated(found: dict[str, Any], names: list[str]) -> list[tuple[str, str, float, bool]]:
    """Return (case, column, times beyond its bound, whether it passed) of each case in a server's answer. The column is
    the one furthest beyond its bound; counts that must be 0 come before differences. An error ends all cases.
    """
    if "error" in found:
        return [(names[0], "hang" if found["error"].startswith("no end") else "error", float("inf"), False)]
    rows = []
    for one in found["outcomes"]:
        columns = {"error": float("inf")} if one["error"] else one["counts"] or one["times"]
        column = max(columns, key=lambda name: columns[name])
        rows.append((one["case"], column, float(columns[column]), one["passed"]))
    return rows


def counts_by_way(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of mutants that each way has found, and the number of missed mutants."""
    counts = Counter(finding.by for finding in findings)
    return {by: counts[by] for by in ("quick", "matrix", "tests", "missed")}
