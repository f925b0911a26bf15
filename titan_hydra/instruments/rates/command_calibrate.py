"""Fit the rates of a hardware file to measured runs, for `titan rates calibrate` and for each round of `titan rates
tune`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.operation import Hardware
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import import_modules
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.compose.folders import line_that_sees, option_file
from titan_hydra.experiments.plan.command_plan import add_job, device_counting, planned_job
from titan_hydra.experiments.runs.find import RunCell
from titan_hydra.experiments.runs.view import add_runs, choose
from titan_hydra.instruments.rates import calibrate as plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--from", dest="measured", nargs="+", required=True, metavar="RUN", help="finished runs or sweeps"
    )
    add_into(parser)
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_into(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--into", metavar="NAME", help="write the fitted rates to conf/hardware/NAME.yaml")


def main(args: argparse.Namespace) -> int:
    """Fit the rates, print them with the residuals, and write the hardware file that --into names."""
    into = target_file(args.into)
    with device_counting(args, "titan rates calibrate"):
        hardware = planned_job(args)[0].hardware
    fit = fit_cells([cell for target in args.measured for cell in choose(target, args.runs).cells], hardware)
    if args.json:
        print(to_json(fit_as_json(fit, hardware)))
    else:
        show_fit(fit, hardware)
    if into:
        with notes_on_stderr(args.json):
            write_file(fit, into)
    return Exit.DONE


def write_file(fit: plan.Fit, file: Path) -> None:
    """Write a hardware file, and print the option that chooses it. Raises ConfigError if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, plan.as_yaml(fit, file.stem))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    print(f"{file}: written; plan with {line_that_sees(file.parent)[1]}hardware={file.stem}")


def target_file(into: str | None) -> Path | None:
    """Return the path of the file that --into names, conf/hardware/INTO.yaml; None without --into. Raises ConfigError if
    the file exists.
    """
    if into is None:
        return None
    if not re.fullmatch(r"\w[\w-]*", into):
        raise ConfigError(f"--into {into}: cannot be typed as hardware=NAME; letters, digits, _ and - can")
    file = option_file("hardware", into)
    if file.exists():
        raise bad_value("--into", into, f"{file} already exists", f"{into}_2")
    return file


def fit_cells(cells: list[RunCell], hardware: Hardware) -> plan.Fit:
    """Fit the hardware's rates to the runs that have finished. Raises ConfigError if no run has finished."""
    finished = [run for cell in cells if (run := _measured(cell))]
    if not finished:
        names = ", ".join(cell.name for cell in cells[:6])
        raise ConfigError(f"no finished run with a measured speed among {names or 'no runs at all'}")
    return plan.fit(finished, hardware)


def _measured(cell: RunCell) -> plan.Measured | None:
    """Return a run's job and its seconds per step; None if the run has not finished, or has no measured speed."""
    rate = layout.RESULT.read(cell.directory).get("tokens_per_second")
    if not rate:
        return None
    import_modules(cell.directory)
    return plan.measured(cell.name, load_job(cell.directory), rate)


def fit_as_json(fit: plan.Fit, start: Hardware) -> dict[str, Any]:
    """Return as JSON values what `show_fit` prints."""
    runs = [
        {
            "name": run.name,
            "step_seconds": run.step_seconds,
            "predicted_before": plan.seconds(run, start),
            "predicted": plan.seconds(run, fit.hardware),
            "residual": fit.residual(run),
        }
        for run in fit.runs
    ]
    rates = {name: {"before": getattr(start, name), "fitted": getattr(fit.hardware, name)} for name in fit.fitted}
    return {"hardware": start.name, "rates": rates, "runs": runs, "notes": [*fit.notes]}


def show_fit(fit: plan.Fit, start: Hardware) -> None:
    """Print the rates before and after the fit, and for each run the measured and the predicted seconds of a step."""
    rates = [(name, f"{getattr(start, name):.4g}", f"{getattr(fit.hardware, name):.4g}") for name in fit.fitted]
    print(*table(("rate", start.name, "fitted"), rates, (start.name, "fitted")), sep="\n")
    rows = [
        (
            run.name,
            f"{run.step_seconds:.3f}",
            f"{plan.seconds(run, start):.3f}",
            f"{plan.seconds(run, fit.hardware):.3f}",
            f"{fit.residual(run):+.1%}",
        )
        for run in fit.runs
    ]
    titles = ("run", "seconds a step", f"by {start.name}", "fitted", "residual")
    print("", *table(titles, rows, titles[1:], ("run",)), *fit.notes, sep="\n")
