"""`titan scale`: write a ladder of sizes (a sweep), fit a scaling law to its held-out losses, and predict larger runs."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, to_json
from titan_hydra.core.job.config.fault import bad_value, quoted
from titan_hydra.core.job.config.files import write_text
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.compose.folders import line_that_sees, option_file
from titan_hydra.experiments.plan.command_plan import make_folder
from titan_hydra.experiments.runs.view import add_runs, choose
from titan_hydra.instruments.scaling import afford, bootstrap, shown
from titan_hydra.instruments.scaling.bootstrap import Drawn
from titan_hydra.instruments.scaling.ladder import ladder_cells, sweep_file
from titan_hydra.instruments.scaling.law import fit_law
from titan_hydra.instruments.scaling.measured import COUNTS, MeasuredLadder, describe_ladder, read_ladder
from titan_hydra.instruments.scaling.shown import ScalePart

SIZES = (1e5, 2e5, 4e5, 8e5, 1.6e6, 3.2e6)
MULTIPLES = (5.0, 10.0, 20.0, 40.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SWEEP|KEY=VALUE",
        help="one sweep, or two sweeps whose recipes are compared; overrides of the job to plan or, with --make, of the recipe",
    )
    add_runs(parser)
    parser.add_argument(
        "--flops", type=number, metavar="C", help="compute budget in FLOPs: predict the best size, and its loss"
    )
    parser.add_argument("--size", type=number, metavar="N", help="with --tokens: predict the loss of N parameters")
    parser.add_argument("--tokens", type=number, metavar="D", help="with --size: predict the loss after D tokens")
    parser.add_argument(
        "--count", choices=tuple(COUNTS), default="all", help=f"parameters: {'; '.join(map(': '.join, COUNTS.items()))}"
    )
    parser.add_argument(
        "--reach",
        type=number,
        metavar="X",
        help="how far beyond the ladder's compute to predict, as a factor (default: the factor that its compute spans, at most 100)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=bootstrap.DRAWS,
        metavar="N",
        help="number of laws that the bootstrap fits (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the bootstrap (default: 0)")
    parser.add_argument(
        "--backtest",
        nargs="?",
        type=int,
        const=10,
        metavar="N",
        help="predict the largest size from all smaller ones, and N cells (default: 10), each from the cells with less compute",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="draw the ladder with its band, and the IsoFLOP curves"
    )
    add_plan(parser)
    add_make(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of the plan for a number of GPUs."""
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="with --days and hardware=NAME: print the size, the tokens and the layout with the lowest expected loss; "
        "model=OPTION plans sizes of that model (default: the ladder's model)",
    )
    parser.add_argument("--days", type=number, metavar="D", help="with --gpus: how many days the GPUs train")
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder with your own options, as for launch.py",
    )


def add_make(parser: argparse.ArgumentParser) -> None:
    """Add the options that write a ladder."""
    parser.add_argument(
        "--make", metavar="NAME", help="write sweeps/NAME.yaml: a ladder of sizes of one model, with one recipe"
    )
    parser.add_argument(
        "--sizes", type=numbers, default=SIZES, metavar="N,...", help="with --make: the sizes, as numbers of parameters"
    )
    parser.add_argument(
        "--multiples",
        type=numbers,
        default=MULTIPLES,
        metavar="X,...",
        help="with --make: tokens of each size, as multiples of its parameters (default: 5,10,20,40)",
    )


def number(text: str) -> float:
    """Parse a number above 0, such as 3e9. Raises ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number more than 0, such as 3e9")
    return value


def numbers(text: str) -> tuple[float, ...]:
    return tuple(sorted({number(part) for part in text.split(",")}))


def main(args: argparse.Namespace) -> int:
    """Write a ladder, or print what the ladders of one or two sweeps predict. Raises ConfigError."""
    overrides = [word for word in args.words if "=" in word]
    sweeps = [word for word in args.words if "=" not in word]
    _refuse(args, sweeps, overrides)
    if args.make:
        return make_ladder(args, overrides)
    read = [read_ladder(choose(sweep, args.runs), args.count) for sweep in sweeps or [None]]
    if len(read) == 2 and read[0].name == read[1].name:
        read = [replace(ladder, name=f"{ladder.name} ({number})") for number, ladder in enumerate(read, start=1)]
    curves = {ladder.name: drawn_laws(ladder, args) for ladder in read}
    parts = [shown.ladder_part(ladder, curves[ladder.name]) for ladder in read]
    parts += asked_parts(args, overrides, read, curves)
    make_folder(args.plot)
    if args.json:
        print(to_json(shown.as_document(parts)))
    else:
        print("\n".join(line for part in parts for line in part.lines))
    if args.plot:
        from titan_hydra.instruments.scaling.figures import draw_isoflop, draw_ladder

        origin = "  \N{MIDDLE DOT}  ".join(f"{ladder.name}: {describe_ladder(ladder.ladder)}" for ladder in read)
        with notes_on_stderr(args.json):
            targets = [target for part in parts for target in part.targets]
            print(*draw_ladder(curves, targets, args.plot, origin), sep="\n")
            print(*draw_isoflop(curves[read[0].name], args.plot, origin), sep="\n")
    return Exit.DONE


def asked_parts(
    args: argparse.Namespace, overrides: list[str], read: list[MeasuredLadder], curves: dict[str, Drawn]
) -> list[ScalePart]:
    """Return what the options request in addition to the fit: predictions, a comparison of two recipes, a backtest, a
    plan.
    """
    one, parts = read[0], []
    for name, curve in curves.items():
        if args.size:
            parts.append(shown.prediction_part(name, curve, args.size, args.tokens, args.reach))
        if args.flops and len(read) == 1:
            size = float(curve.fit.law.best_size(args.flops))
            parts.append(shown.prediction_part(name, curve, size, args.flops / 6 / size, args.reach))
    if len(read) == 2:
        flops = args.flops or min(float(other.ladder.flops.max()) for other in read)
        first, second = curves.values()
        parts.append(shown.verdict_part([*curves], bootstrap.judge_recipes(first, second, flops, args.reach)))
    if args.backtest:
        parts.append(shown.backtest_part(*bootstrap.backtest(one.ladder, args.backtest, args.draws, args.seed)))
    if args.gpus:
        job = afford.job_to_plan(overrides, one.largest, args.config_dir)
        curve, body = curves[one.name], args.count == "body"
        offer = afford.best_offer(
            job, args.gpus, args.days, curve.fit.law, lambda sized: afford.parameters_of_job(sized, body)
        )
        parts.append(shown.offer_part(one.name, curve, offer, args.gpus, args.days, args.reach))
    return parts


def _refuse(args: argparse.Namespace, sweeps: list[str], overrides: list[str]) -> None:
    """Raise ConfigError if options exclude each other, or if an option lacks another that it needs."""
    if args.draws < 20:
        raise bad_value("--draws", args.draws, "too few for an interval of 90 %", 20)
    if len(sweeps) > 2:
        raise ConfigError(f"{sweeps[2]}: at most two sweeps are compared")
    for option, partner in (("size", "tokens"), ("tokens", "size"), ("gpus", "days"), ("days", "gpus")):
        if getattr(args, option) and not getattr(args, partner):
            raise ConfigError(f"--{option} {getattr(args, option):g}: needs --{partner} too")
    if args.make and (sweeps or args.gpus or args.flops or args.backtest):
        raise ConfigError(f"--make {args.make}: writes a ladder; its runs are read by titan scale SWEEP")
    if overrides and not (args.make or args.gpus):
        raise ConfigError(f"{overrides[0]}: overrides are for --make and --gpus alone")
    if args.gpus is not None and args.gpus < 1:
        raise bad_value("--gpus", args.gpus, "a job needs at least one", 1)
    if args.backtest is not None and args.backtest < 1:
        raise bad_value("--backtest", args.backtest, "is the number of cells to leave out", 10)
    if len(sweeps) == 2 and (args.gpus or args.backtest):
        raise ConfigError("--gpus and --backtest take one sweep")


def make_ladder(args: argparse.Namespace, overrides: list[str]) -> int:
    """Write the sweep file of a ladder, and print its cells and what to type next."""
    if not re.fullmatch(r"\w[\w-]*", args.make):
        raise ConfigError(f"--make {args.make}: cannot be typed as +sweeps=NAME; letters, digits, _ and - can")
    file = option_file("sweeps", args.make)
    if file.exists():
        raise bad_value("--make", args.make, f"{file} already exists", f"{args.make}_2")
    cells = ladder_cells(compose_job(*overrides, config_dir=args.config_dir), args.sizes, args.multiples)
    lists = [f"--{name} {','.join(f'{value:g}' for value in getattr(args, name))}" for name in ("sizes", "multiples")]
    comment = f"Made by: titan scale --make {args.make} {' '.join(lists)} {quoted(overrides)}."
    text = sweep_file(args.make, overrides, cells, comment)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        raise ConfigError(f"--make {args.make}: {file} cannot be written: {error.strerror}") from error
    print(f"{file}: {len(cells)} cells, {next(iter(cells))} to {[*cells][-1]}")
    program, where = line_that_sees(file.parent)
    print(f"try: {program} {where}+sweeps={args.make} launch.mode=dry")
    return Exit.DONE


def drawn_laws(measured: MeasuredLadder, args: argparse.Namespace) -> Drawn:
    """Fit a scaling law to a ladder, and draw its bootstrap. Raises ConfigError with the sweep's name."""
    try:
        return bootstrap.draw_laws(fit_law(measured.ladder), args.draws, args.seed)
    except ConfigError as error:
        raise ConfigError("; ".join([f"{measured.name}: {error}", *measured.notes])) from error
