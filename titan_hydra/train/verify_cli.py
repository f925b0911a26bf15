"""`titan verify`: run the acceptance matrix, print it, write docs/acceptance.md."""
from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path

from titan_hydra.config import Fault
from titan_hydra.config.compose import CONF
from titan_hydra.config.fault import suggest
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
    if args.ranks is not None and (ranks := tuple(sorted({case.ranks for case in MATRIX}))) and args.ranks not in ranks:
        raise ConfigError(str(Fault("--ranks", args.ranks, "no case has that many", legal=ranks)))
    if not cases:
        names = [case.name for case in MATRIX if args.ranks in (None, case.ranks)]
        raise ConfigError(str(Fault("--only", args.only, "no such case", legal=suggest(args.only, names))))
    outcomes = verify(cases)
    header = ("case", "ranks", "loss", "norm", "gradient", "start", "copies", "passed")
    rows = [
        (o.case.name, *map(str, (o.case.ranks, f"{o.loss:.1e}", f"{o.norm:.1e}", f"{o.gradients:.1e}", o.start, o.drift)),
         "yes" if o.passed else "NO") for o in outcomes
    ]
    table = Table(*header, title=f"Largest relative difference from one process in fp32, {STEPS} steps", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row, style=None if row[-1] == "yes" else "red")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
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
        "of the worst parameter at the first step. `start` counts initial tensors that differ in any bit, `copies` parts of weights whose",
        "copies on several ranks differ in any bit after the last step. The cases, their overrides and tolerances stand in",
        "[acceptance.py](../titan_hydra/train/acceptance.py).", "",
        f"Written by `titan verify` on {date.today()}; " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".", "",
        "| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), "",
    ]
    path.write_text("\n".join(lines))
