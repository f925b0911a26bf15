"""`titan rates tune`: plan, run the best layouts for a few steps, calibrate, and plan again, until prediction and
measurement agree.

The runs are an ordinary sweep, started through the same code as launch.py, so that the same command continues an
interrupted sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.load import read
from titan_hydra.core.job.config.operation import Hardware
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.compose.compose import option_folders, own_composer
from titan_hydra.experiments.launch.dispatch import dispatch
from titan_hydra.experiments.plan.command_plan import add_job, device_counting, planned_job, searchable
from titan_hydra.experiments.plan.search import DEGREES, search
from titan_hydra.experiments.runs import find, rundir
from titan_hydra.experiments.runs.find import RunCell
from titan_hydra.instruments.rates.calibrate import Fit, on

from . import command_calibrate as calibrate

ROUNDS = 4  # maximum number of rounds of planning and running
LAYOUT = {  # keys that the search sets; overrides of these keys on the command line are left out
    "parallelism",
    *(f"parallelism.{name}" for name in DEGREES),
    "gpus",
    "ac",
    "ac.name",
    "optimizer.offload",
    "data.local_batch",
    "data.global_batch",
    "pp_schedule",
    "pp_schedule.stages_per_rank",
    "pp_schedule.microbatches",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--layouts", type=int, default=4, metavar="K", help="number of layouts to run in the first round (default: 4)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of each run (default: 20)")
    calibrate.add_into(parser)


def main(args: argparse.Namespace) -> int:
    """Plan, run and calibrate until the layout that is predicted to be the fastest is also measured to be the fastest,
    or until the plan has no new layout. Returns the exit status of the first run that failed, or 0.
    """
    for name, least, reason in (
        ("layouts", 2, "is the number of layouts to compare, at least 2"),
        ("steps", 3, "the first ones are not measured"),
    ):
        if (value := getattr(args, name)) < least:
            raise bad_value(f"--{name}", value, reason, least)
    with device_counting(args, "titan rates tune"):
        return tuned(args)


def tuned(args: argparse.Namespace) -> int:
    """Plan, run and calibrate. Returns the exit status of the first run that failed, or 0."""
    into = calibrate.target_file(args.into)
    job, given = planned_job(args)
    gpus = searchable(job, given)
    layouts = list[str]()
    planned = _best(on(job, job.hardware), gpus, args.layouts)
    if len(planned) < 2:
        raise bad_value("--gpus", gpus, f"only one layout fits, so nothing is compared: {planned[0]}")
    for turn in range(1, ROUNDS + 1):
        layouts += [degrees for degrees in planned if degrees not in layouts]
        print(f"\nround {turn}: {len(layouts)} layouts; predicted to be the fastest: {planned[0]}", flush=True)
        composed = [_composition(degrees, args) for degrees in layouts]
        status = dispatch(composed)
        directories = [rundir.directory_of(freeze(read(config)[0])) for config, _ in composed]
        cells = [RunCell(degrees, directory) for degrees, directory in zip(layouts, directories, strict=True)]
        if status == Exit.CONFIG:
            return status
        if any(state.kind not in ("done", "failed") for state in rundir.states(directories)):
            print("not all runs have ended; the same command continues")
            return status
        fit = calibrate.fit_cells(cells, job.hardware)
        planned = _best(on(job, fit.hardware), gpus, args.layouts)
        fastest = min(fit.runs, key=lambda run: run.step_seconds).name
        if planned[0] == fastest or set(planned) <= set(layouts):
            break
    _show(fit, job.hardware, planned[0], fastest)
    _keep(fit, composed, into)
    return status


def _best(job: Job, gpus: int, number: int) -> list[str]:
    """Return the `number` layouts with the highest predicted rate, as overrides."""
    rows, _ = search(job, gpus)
    fitting = [row.overrides for row in rows if row.prediction.fits != "no"]
    if not fitting:
        raise bad_value(
            "--gpus", gpus, "no layout obeys the rules and fits; titan plan shows those that need least memory"
        )
    return fitting[:number]


def _composition(degrees: str, args: argparse.Namespace) -> tuple[Any, list[str]]:
    """Compose the run of a layout. It has the command line's overrides (except those of a layout), the overrides of
    this layout, a few steps, and no checkpoints.
    """
    without_layout = [word for word in args.overrides if word.partition("=")[0] not in LAYOUT]
    overrides = [
        *without_layout,
        *degrees.split(" "),
        f"steps={args.steps}",
        "checkpoint=off",
        "validation=off",
        "sweep.name=tune",
    ]
    return own_composer(option_folders(args.config_dir))(overrides), overrides


def _show(fit: Fit, start: Hardware, winner: str, fastest: str) -> None:
    """Print the measured and the predicted time of each layout, the fastest first, and whether both times name the same
    layout as the fastest.
    """
    fit = dataclasses.replace(fit, runs=tuple(sorted(fit.runs, key=lambda run: run.step_seconds)))
    print()
    calibrate.show_fit(fit, start)
    print(f"\nfastest: {fastest}")
    print("the calibrated plan agrees" if winner == fastest else f"the calibrated plan prefers {winner}")


def _keep(fit: Fit, composed: list[tuple[Any, list[str]]], into: Path | None) -> None:
    """Write the rates beside the sweep's manifest, where `titan report --predicted` finds them, and to a hardware file
    if --into names one.
    """
    runs = Path(composed[0][0].paths.runs).expanduser().absolute()
    newest = find.readable(runs)[0]
    layout.RATES.write(newest, vars(fit.hardware))
    print(f"titan report --predicted{find.runs_option(runs)} {newest.name}   what was predicted, and what was measured")
    if into:
        calibrate.write_file(fit, into)
