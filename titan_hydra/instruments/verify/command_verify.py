"""`titan verify`: prove that layouts (the matrix, random jobs), jobs, or a module learn what one process learns, or look
at what a model's size decides. This file has the arguments, and runs the matrix; jobs.py and widths.py have the rest.
"""

from __future__ import annotations

import argparse
import glob
import os
from dataclasses import asdict
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config.fault import bad_value, suggest
from titan_hydra.core.job.run.code import versions
from titan_hydra.experiments.compose.compose import compose_unchecked

from . import jobs, widths
from .case import Case
from .matrix import whole_matrix

if TYPE_CHECKING:
    from .judge import Outcome

STEPS_OF_RANDOM = 4  # number of optimizer steps of each job of --random
STEPS_OF_MODULE = 3  # number of optimizer steps of --module: one before the run is resumed, and two after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "titan verify [widths | depths] [KEY=VALUE... | RUN...] [OPTIONS]"
    add = parser.add_argument
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="nothing: the matrix of layouts; a job, as for launch.py, or RUN: its layout; with --only or --random: "
        "overrides of every case; after the word widths (or depths): the job whose model is made wider (deeper)",
    )
    add("--config-dir", type=Path, action="append", metavar="DIR", help="a folder with options of your own")
    add("--json", action="store_true", help="print JSON for scripts")
    add = parser.add_argument_group("layouts").add_argument
    add(
        "--only", metavar="NAME", help="the case of this name or, if there is none, cases with this text; '*': any text"
    )
    add("--ranks", type=int, metavar="N", help="only cases of N ranks; for a job: reduce it to at most N, 2 to 8 (4)")
    add("--list", action="store_true", help="print the names of the cases")
    add("--random", type=int, metavar="N", help="N random legal jobs against a float64 reference, not the matrix")
    add("--seed", type=int, metavar="S", default=0, help="seed of the random jobs (0)")
    add("--write", type=Path, metavar="FILE", help="write the table into this file too, as a page")
    add = parser.add_argument_group("a job").add_argument
    add("--again", action="store_true", help="prove the layout again, although this code has a proof of it")
    add("--show", type=Path, metavar="PROOF", help="print what is in a proof.json, and prove nothing")
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of run directories (runs)")
    add = parser.add_argument_group("a module").add_argument
    add("--module", metavar="FILE.py:NAME", help="a Subject: a module that you parallelize yourself")
    widths.add_size_options(parser)


def main(args: argparse.Namespace) -> int:
    """Verify layouts, jobs, a module, or what a model's size decides. Returns 0 if every check has passed, else 1."""
    if args.overrides[:1] in (["widths"], ["depths"]):
        return widths.compare_sizes(args)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank, as there may be more ranks than cores
    # the ranks compute on CPUs, as there are more ranks than a machine has GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.module:
        return _verify_module(args.module, args.json)
    if args.show:
        return jobs.show_proof(args.show, args.json)
    if args.overrides and not (args.only is not None or args.list or args.random is not None or args.write):
        return jobs.verify_jobs(args)
    return _verify_cases(args)


def _verify_cases(args: argparse.Namespace) -> int:
    """Run the cases that the arguments choose. Returns 0 if every case passed, else 1."""
    if args.write and not args.write.absolute().parent.is_dir():
        raise ConfigError(f"--write {args.write}: there is no folder {args.write.absolute().parent}")
    changed_by_user = bool(args.overrides or args.config_dir)
    if changed_by_user:  # what is wrong with them alone, such as a missing module, is a line at once
        compose_unchecked(*args.overrides, config_dir=args.config_dir)
    from .coverage import Coverage, covered
    from .sampler import draw_jobs
    from .verify import STEPS, verify, verify_drawn

    drawn = args.random is not None
    steps = STEPS_OF_RANDOM if drawn else STEPS
    cases = list(draw_jobs(args.random, args.seed)) if drawn else whole_matrix()
    chosen = _chosen(args, cases)
    if args.list:
        names = [{"name": case.name, "ranks": case.ranks} for case in chosen]
        print(to_json(names) if args.json else "\n".join(f"{case.ranks:>3}  {case.name}" for case in chosen))
        return Exit.DONE
    coverage = (
        covered(chosen, tuple(args.overrides), tuple(args.config_dir or ()), steps)
        if changed_by_user
        else Coverage(chosen)
    )
    outcomes = (verify_drawn if drawn else verify)(coverage.cases, steps)
    if changed_by_user:
        outcomes = coverage.without_refused(outcomes)
        with notes_on_stderr(args.json):
            print(*coverage.lines(len(outcomes), len(cases)), "", sep="\n")
        if not outcomes:
            return Exit.CONFIG
    if args.json:
        from .judge import outcome_as_json

        print(
            to_json(
                {"steps": steps, "versions": versions(), "cases": [outcome_as_json(outcome) for outcome in outcomes]}
            )
        )
    header, rows = _rows(outcomes)
    if not args.json:
        show_outcomes(outcomes, header, rows)
    if args.write:
        _write(args.write, header, rows, steps)
    return Exit.DONE if all(outcome.passed for outcome in outcomes) else Exit.BUG


def _rows(outcomes: list[Outcome]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the titles and the rows of the table of outcomes."""
    header = ("case", "ranks", "loss", "norm", "gradient", "weights", "band", "start", "copies", "rounded", "passed")
    rows = [
        (
            o.case.name,
            str(o.case.ranks),
            *(f"{value:.1e}" for value in (o.loss, o.norm, o.gradients, o.weights)),
            f"{o.band:.2f}" if o.band else "",
            *map(str, (o.start, o.drift, o.rounded)),
            "yes" if o.passed else "NO",
        )
        for o in outcomes
    ]
    return header, rows


def show_outcomes(outcomes: list[Outcome], header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print the table, and a line for each case that has not passed."""
    colours = [dict.fromkeys(header, "red") if row[-1] == "NO" else {} for row in rows]
    print(
        "Largest relative differences from the reference:",
        *table(header, rows, header[1:-1], ("case",), colours),
        sep="\n",
    )
    for outcome in outcomes:
        if not outcome.passed:
            print(outcome)


def _verify_module(address: str, as_json: bool) -> int:
    """Print the verdict on a user's module (`Subject`). Returns 0 if no check has failed, else 1."""
    from .module import verify_module
    from .processes import Crashed, Raised

    try:
        verdict = verify_module(address, STEPS_OF_MODULE)
    except (Raised, Crashed) as error:
        with notes_on_stderr(as_json):
            print(error)
        return Exit.BUG
    if as_json:
        print(to_json({**asdict(verdict), "passed": verdict.passed}))
        return Exit.DONE if verdict.passed else Exit.BUG
    words = {True: "yes", False: "NO", None: "unknown"}
    header = ("check", "found", "allowed", "where", "passed")
    rows = [(check.name, check.value, check.allowed, check.where, words[check.passed]) for check in verdict.checks]
    colours = [dict.fromkeys(header, "red") if row[-1] == "NO" else {} for row in rows]
    mesh = " x ".join(f"{name} {size}" for name, size in verdict.mesh.items())
    print(
        f"{address} on {mesh} against one process in {verdict.reference}:",
        *table(header, rows, (), ("where",), colours),
        sep="\n",
    )
    wrong = {name: pair for name, pair in verdict.gradients.items() if not pair[0] <= pair[1]}
    if wrong:
        print(f"\n{len(wrong)} of {len(verdict.gradients)} gradients are wrong:")
        rows = [
            (name, f"{value:.1e}", f"{allowed:.1e}")
            for name, (value, allowed) in sorted(wrong.items(), key=lambda item: -item[1][0])
        ]
        print(*table(("parameter", "difference", "allowed"), rows[:20], ("difference", "allowed")), sep="\n")
    return Exit.DONE if verdict.passed else Exit.BUG


def _chosen(args: argparse.Namespace, cases: list[Case]) -> list[Case]:
    """Return the cases that --only and --ranks choose. Raises ConfigError if there are none."""
    if args.ranks is not None and (ranks := tuple(sorted({case.ranks for case in cases}))) and args.ranks not in ranks:
        raise bad_value("--ranks", args.ranks, "no case has this number of ranks", *ranks)
    here = [case for case in cases if args.ranks in (None, case.ranks)]
    pattern = f"*{glob.escape(args.only or '').replace('[*]', '*')}*"
    chosen = [case for case in here if case.name == args.only] or [
        case for case in here if fnmatchcase(case.name, pattern)
    ]
    if not chosen:
        names = [case.name for case in here]
        raise bad_value("--only", args.only, "no such case; --list names them", *suggest(args.only, names))
    return chosen


def _write(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]], steps: int) -> None:
    from .judge import DRAWS, MORE_DRAWS, MULTIPLE, NEAR, TIGHT

    lines = [
        "# Acceptance",
        "",
        f"The table has the largest relative differences of each layout from the same job in one process, over {steps} steps: of the",
        "loss, of the gradient norm, of a parameter's gradient at the first step, and of a parameter after the last step. The",
        "difference of a parameter is relative to how far the parameter has moved; before that, the difference that the rounding of its",
        "updates explains is subtracted.",
        "`start` counts initial tensors that differ in any bit; in a comparison with float64, those that are drawn from another",
        "distribution. `copies` counts parts of weights whose copies on several ranks differ in any bit after the last step. `rounded`",
        "counts parameters whose gradient was summed in bfloat16 although float32 is asked for. The cases, their overrides and their",
        "upper bounds are in [matrix.py](../../titan_hydra/instruments/verify/matrix.py). Ranks are processes. The cases of 4 to",
        "128 ranks in [many.py](../../titan_hydra/instruments/verify/many.py) make two steps, have threads of one process as ranks, and",
        "have no pipelines.",
        "",
        "How much rounding changes a run in these steps depends on the processor, so it is measured on the machine that runs the cases.",
        f"A loss or norm within {TIGHT['loss']:.0e}, a gradient within {TIGHT['gradients']:.0e} and a parameter within",
        f"{TIGHT['weights']:.0e} pass at once. If a difference is larger, the reference is run again, at most {len(DRAWS)} times, and",
        f"{len(MORE_DRAWS)} times more if the difference is too large by less than {NEAR:.0f} times: with every initial weight moved to",
        "the next float32 above or below it, with its sums in another order (the samples shuffled, the batch in several parts; for tensor",
        "parallelism, and for context parallelism in bfloat16, each linear in parts that are rounded before they are added), or with both.",
        "A gradient or a parameter",
        f"may then differ by {MULTIPLE['weights']:.0f} times the largest difference that it had in these runs, loss and norm by",
        f"{MULTIPLE['loss']:.0f} times. No more runs are made than are needed.",
        "`band` is the largest ratio of a difference to what is allowed: if it is above 1, the case has not passed. It is empty if no",
        "band was needed, and if the reference rounds in another way (another number format, or float64); then only the fixed upper",
        "bounds apply.",
        "",
        f"Written by `titan verify` on {date.today()}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
        + ".",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    path.write_text("\n".join(lines))
