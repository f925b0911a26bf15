"""`titan report`: print or write the table of a sweep (for a terminal or a paper), and write its plots and its page."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, to_json
from titan_hydra.core.job.config.additions import of_all
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.registry import resolve
from titan_hydra.experiments.report import write
from titan_hydra.experiments.report.cells import gather
from titan_hydra.experiments.report.table import Report, build
from titan_hydra.experiments.runs.copies import add_copies, asks_for_copies, copy_or_send
from titan_hydra.experiments.runs.view import add_target, choose

TEXTS = {  # forms of a report: the file's name, what it is, and the function that returns the text
    "md": ("report.md", "the table in Markdown", write.markdown),
    "csv": ("report.csv", "the table with commas between its values", write.comma_separated),
    "latex": ("report.tex", "the table in LaTeX", write.latex),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--baseline",
        metavar="CELL",
        help="cell with which all others are compared (default: sweep.baseline, or the first cell)",
    )
    parser.add_argument(
        "--allow", metavar="KEY,...", default="", help="compare cells even if they differ in these keys"
    )
    parser.add_argument(
        "--over",
        metavar="KEY",
        help="average cells that differ only in this key, such as seed, and add standard errors",
    )
    parser.add_argument(
        "--with",
        dest="foreign",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="FILE",
        help="logs of other programs, as further rows: TorchTitan's or Megatron-LM's log, a folder of TensorBoard, a .csv",
    )
    for name, (file, purpose, _) in forms().items():
        parser.add_argument(f"--{name}", action="store_true", help=f"{purpose}, printed, or written as {file} with -o")
    for name, (purpose, _) in of_all("REPORT_CHANGES").items():
        parser.add_argument(f"--{name}", action="store_true", help=purpose)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON for scripts: all columns with unrounded values, and the rule by which each row was judged",
    )
    parser.add_argument(
        "--gate",
        type=Path,
        metavar="FILE.yaml",
        help="judge the runs by the thresholds of this file and print the verdict; status 3 if one is missed",
    )
    add_page(parser)
    add_plots(parser)
    add_copies(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder to write to (default: the sweep's folder or, without a sweep, the current folder)",
    )


def forms() -> dict[str, tuple[str, str, Any]]:
    """Return the forms of a report as text, with those that instruments add: the file's name, what it is, its function."""
    return TEXTS | of_all("REPORT_TEXTS")


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options of the page."""
    parser.add_argument(
        "--html",
        action="store_true",
        help="write report.html, a page with the whole report; browsers show it without a network",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page to browsers on this machine only, and update it while the sweep runs",
    )
    parser.add_argument(
        "--port", type=int, default=8321, metavar="N", help="port of --serve (default: 8321; 0: any free port)"
    )


def add_plots(parser: argparse.ArgumentParser) -> None:
    """Add the options of the plots."""
    parser.add_argument("--plots", action="store_true", help="write the plots as PNG and SVG")
    parser.add_argument(
        "--x", choices=("step", "tokens", "seconds"), default="step", help="the plots' x axis (default: step)"
    )
    parser.add_argument("--log", action="store_true", help="plot losses on a logarithmic scale")


def main(args: argparse.Namespace) -> int:
    """Print, write or serve the report. Raises ConfigError if no cell has numbers, or if cells cannot be compared."""
    if asks_for_copies(args):
        return copy_or_send(args)
    if args.gate:
        from titan_hydra.experiments.report.gate import gate_main

        return gate_main(args, tuple(forms()))
    if args.json and (given := [name for name in (*forms(), "serve") if getattr(args, name)]):
        raise ConfigError(f"--json: prints one document, and --{given[0]} another; give one of them")
    if args.serve:
        from titan_hydra.experiments.report.serve import serve

        serve(lambda: report_of_line(args), args.port)
        return Exit.DONE
    report = report_of_line(args)
    if all(row.cell.rate is None and row.cell.loss is None for row in report.rows):
        states = ", ".join(f"{row.cell.name}: {row.cell.word}" for row in report.rows[:6]) + (
            ", ..." if len(report.rows) > 6 else ""
        )
        raise ConfigError(f"{report.name}: no cell has numbers yet ({states})")
    folder = args.output or report.selection.manifest or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_asked(report, folder, args)
    except OSError as error:
        raise ConfigError(f"-o {folder}: cannot be written: {error.strerror}") from error
    return Exit.DONE


def write_asked(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Print or write each form of the report that the options ask for: texts, JSON, plots, page. Without an option,
    print the table. Files are named on stdout.
    """
    texts = [name for name in forms() if getattr(args, name)]
    for name in texts:
        file, _, text = forms()[name]
        if args.output:
            write_text(folder / file, resolve(text)(report))
            print(folder / file)
        else:
            print(resolve(text)(report), end="")
    if "csv" in texts:  # a CSV file has no place for the notes, so they are printed to stderr
        print(*report.notes, sep="\n", end="\n" if report.notes else "", file=sys.stderr)
    if args.json:
        print(to_json(write.report_document(report)))
    elif not texts and not args.html:
        write.terminal(report)
        if args.plots:
            print()
    with notes_on_stderr(args.json):
        if args.plots:
            from titan_hydra.experiments.report import plots

            for file in plots.write(report, folder, args.x, args.log):
                print(file)
        if args.html:
            from titan_hydra.experiments.report import page

            write_text(folder / "report.html", page.page(report))
            print(folder / "report.html")


def report_of(
    target: str | None,
    runs: Path,
    baseline: str | None,
    allowed: set[str],
    over: str | None,
    foreign: Sequence[Path] = (),
) -> Report:
    """Compare the runs that `target` selects, and those of other programs in the files `foreign`. Raises ConfigError if
    there are none, or if they cannot be compared.
    """
    selection = choose(target, runs)
    report = build(selection, gather(selection), baseline, allowed, over)
    for section in of_all("REPORT_SECTIONS").values() if selection.manifest else ():
        report = replace(report, section=resolve(section)(selection.manifest) or report.section)
    if foreign:
        from titan_hydra.experiments.report.foreign import foreign_cells, foreign_rows

        rows, remarks = foreign_rows(foreign_cells(foreign), report.baseline.cell)
        report = replace(report, rows=[*report.rows, *rows], remarks=tuple(remarks))
    return report


def report_of_line(args: argparse.Namespace) -> Report:
    allowed = {key.strip() for key in args.allow.split(",") if key.strip()}
    report = report_of(args.target, args.runs, args.baseline, allowed, args.over, args.foreign)
    for name, (_, change) in of_all("REPORT_CHANGES").items():
        report = resolve(change)(report) if getattr(args, name) else report
    return report
