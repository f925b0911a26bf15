"""`titan verify`: run the acceptance matrix, print it, write docs/acceptance.md."""
from __future__ import annotations

import argparse
import os
from datetime import date
from pathlib import Path

from titan_hydra.config.compose import CONF
from titan_hydra.config.run import versions
from titan_hydra.config.status import ConfigError, Exit

from .acceptance import MATRIX


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `titan verify`."""
    parser.add_argument("--only", metavar="NAME", help="only cases with this in their name")
    parser.add_argument("--ranks", type=int, metavar="N", help="only cases of this many ranks")
    parser.add_argument("--write", type=Path, metavar="FILE", default=CONF.parent / "docs" / "acceptance.md",
                        help="where the table is written when the whole matrix ran (default: docs/acceptance.md)")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if every case passed, else 1."""
    from rich.console import Console
    from rich.table import Table

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks share few cores
    from .verify import STEPS, verify

    cases = [case for case in MATRIX if (args.only or "") in case.name and args.ranks in (None, case.ranks)]
    if not cases:
        raise ConfigError(f"--only {args.only}: no such case; there are: {', '.join(case.name for case in MATRIX)}")
    outcomes = verify(cases)
    rows = [
        (o.case.name, str(o.case.ranks), f"{o.loss:.1e}", f"{o.norm:.1e}", f"{o.gradients:.1e}", str(o.start), "yes" if o.passed else "NO")
        for o in outcomes
    ]
    header = ("case", "ranks", "loss", "gradient norm", "worst gradient", "start differs", "passed")
    table = Table(*header, title=f"Largest relative difference from one process in fp32, {STEPS} steps")
    for row in rows:
        table.add_row(*row, style=None if row[-1] == "yes" else "red")
    Console().print(table)
    for outcome in outcomes:
        if not outcome.passed:
            print(f"{outcome.case.name}: worst gradient is that of {outcome.worst}; tolerances are loss {outcome.case.loss}, "
                  f"norm {outcome.case.norm}, gradients {outcome.case.gradients}")
    if len(cases) == len(MATRIX):
        write(args.write, header, rows, STEPS)
    return Exit.DONE if all(outcome.passed for outcome in outcomes) else Exit.BUG


def write(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]], steps: int) -> None:
    """The table as a page of the docs."""
    lines = [
        "# Acceptance", "",
        f"Largest relative difference of each layout from one process in fp32, over {steps} steps: loss, gradient norm, and the gradient",
        "of the worst parameter at the first step. `start differs` counts initial tensors that differ in any bit.", "",
        f"Written by `titan verify` on {date.today()}; " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".", "",
        "| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), "",
    ]
    path.write_text("\n".join(lines))
