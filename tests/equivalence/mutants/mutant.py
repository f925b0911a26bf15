"""A fault that can be planted, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A patch of one file of the package, and the cases and tests that should notice it, the cheapest first."""

    name: str
    needs: str  # the technique without which the fault has no effect; "any" if the fault affects a single process too
    file: str  # the file to patch, relative to titan_hydra/
    old: str  # the text to replace; it occurs `times` times in the file
    new: str
    sentence: str  # what is wrong
    cases: tuple[str, ...] = ()  # names of cases of the matrix that could notice the fault
    tests: tuple[str, ...] = ()  # pytest's names of tests that notice the fault, for a fault that no case can notice
    like: str = ""  # the real bug that this mutant copies, as owner/repository#number
    times: int = 1

    @property
    def link(self) -> str:
        """The address of the real bug; "" if the mutant copies none. For a pull request, GitHub redirects this address."""
        repository, _, number = self.like.partition("#")
        return f"https://github.com/{repository}/issues/{number}" if number else ""

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the fault. Raises ValueError if the file has changed, so that the patch no
        longer fits.
        """
        if (found := text.count(self.old)) != self.times:
            raise ValueError(f"{self.file} has {found} places for {self.name!r}, not {self.times}")
        return text.replace(self.old, self.new)
