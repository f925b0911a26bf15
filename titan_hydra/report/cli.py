"""`titan report`: the table of a sweep, for a terminal or a paper, and its plots and page."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titan_hydra.config.files import write_text
from titan_hydra.config.status import ConfigError, Exit
from titan_hydra.launch.find import select

from . import write
from .cells import gather
from .table import build

TEXTS = {"md": ("report.md", write.markdown), "csv": ("report.csv", write.comma_separated), "latex": ("report.tex", write.latex)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked for."""
    parser.add_argument("target", nargs="?", help="sweep, manifest, folder of runs, run, or the start of a hash; all runs without it")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories (default: runs)")
    parser.add_argument("--baseline", metavar="CELL", help="cell to compare with; else the sweep's own, else its first")
    parser.add_argument("--allow", metavar="KEY,...", default="", help="compare cells though they differ in these keys")
    for name, (file, _) in TEXTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"the table as {file} has it, printed, or written with -o")
    parser.add_argument("--html", action="store_true", help="write report.html: one page with everything, for any browser, without network")
    parser.add_argument("--plots", action="store_true", help="write the plots, PNG and SVG")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where to write; else into the sweep's folder, or here")


def main(args: argparse.Namespace) -> int:
    """Print or write what was asked for."""
    selection = select(args.target, args.runs)
    cells = gather(selection)
    report = build(selection, cells, args.baseline, {key.strip() for key in args.allow.split(",") if key.strip()})
    folder = args.output or selection.manifest or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        texts = [name for name in TEXTS if getattr(args, name)]
        for name in texts:
            file, text = TEXTS[name]
            if args.output:
                write_text(folder / file, text(report))
                print(folder / file)
            else:
                print(text(report), end="")
        if "csv" in texts:  # a table for machines has no place for them
            print(*report.notes, sep="\n", end="\n" if report.notes else "", file=sys.stderr)
        if args.plots:
            from . import plots

            for file in plots.write(report, folder):
                print(file)
        if args.html:
            from . import page

            write_text(folder / "report.html", page.page(report))
            print(folder / "report.html")
        if not texts and not args.plots and not args.html:
            write.terminal(report)
    except OSError as error:
        raise ConfigError(f"-o {folder}: cannot be written: {error.strerror}") from error
    return Exit.DONE
