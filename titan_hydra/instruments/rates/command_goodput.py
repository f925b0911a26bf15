"""`titan rates goodput`: print the share of a job's time in which it makes steps that count, and how to raise the
share.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.amounts import lasting
from titan_hydra.core.base.errors import ConfigError, Exit, Kind
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import bad_value, fault_at
from titan_hydra.core.job.config.ranges import NOT_NEGATIVE, POSITIVE, Interval
from titan_hydra.core.job.ranks import all_ranks
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import guilty
from titan_hydra.core.job.run.stretches import life_of
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.plan.command_plan import add_job, device_counting, legal_job, make_folder, planned_job
from titan_hydra.experiments.runs.find import all_runs
from titan_hydra.experiments.runs.rundir import inspect_all
from titan_hydra.experiments.runs.view import add_runs
from titan_hydra.instruments.rates.goodput import FAILURES, Site, Way, daly_interval, ways, young_interval

OPTIONS: dict[str, tuple[float | None, Interval, str]] = {  # for each option: its default, its range, and its help text
    "step-seconds": (None, POSITIVE, "seconds of a step (default: predicted)"),
    "save-seconds": (
        None,
        NOT_NEGATIVE,
        "seconds until a checkpoint is complete (default: its bytes divided by --write-gbs)",
    ),
    "copy-seconds": (
        None,
        NOT_NEGATIVE,
        "seconds for which an async save stops training (default: computed from its bytes)",
    ),
    "write-gbs": (1.0, POSITIVE, "GB/s that a node writes (default: 1)"),
    "queue-minutes": (10.0, NOT_NEGATIVE, "minutes until another node replaces a failed node (default: 10)"),
    "restart-minutes": (
        5.0,
        NOT_NEGATIVE,
        "minutes from the new node's arrival until training goes on: start, load, compile (default: 5)",
    ),
}
# numbers of steps between two saves at which the curve is computed
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


# Failures that the job itself causes: the same command would fail again.
OWN_FAULTS = {Kind.CONFIG, Kind.OUT_OF_MEMORY, Kind.NOT_FINITE, Kind.TIME_LIMIT, Kind.PREEMPTED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--failures",
        default="llama3",
        metavar="RATE",
        help="failures per GPU-day: a number, `llama3` (default), or `runs` for the rate measured in the runs of --runs",
    )
    for name, (default, _, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X", help=text)
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write plots of the goodput")


def main(args: argparse.Namespace) -> int:
    """Print how the time of the job is divided, for the job as it is and for better ways to run it. Draw the result if
    --plot names a folder.
    """
    make_folder(args.plot)
    with device_counting(args, "titan rates goodput"):
        return divided(args, legal_job(*planned_job(args, needs_rates=not args.step_seconds)))


def divided(args: argparse.Namespace, job: Job) -> int:
    """Print how the time of a job is divided, and draw it."""
    given: dict[str, Any] = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    for name, (_, allowed, _) in OPTIONS.items():
        if given[name] is not None and (reason := allowed.objection(given[name])):
            raise bad_value(f"--{name}", given[name], reason, *allowed.nearest(given[name]))
    rate, source = rate_of(args)
    minutes = (60 * given["queue-minutes"], 60 * given["restart-minutes"])
    step = given["step-seconds"] or predicted_step(job)
    at = Site(
        job,
        all_ranks(job),
        rate,
        step,
        *minutes,
        1e9 * given["write-gbs"],
        given["save-seconds"],
        given["copy-seconds"],
    )
    if at.bytes is None and None in (at.save_seconds, at.copy_seconds):
        raise ConfigError(
            str(fault_at(job, "model.family", "has no known bytes; give --save-seconds and --copy-seconds"))
        )
    rows = list(ways(at))
    curves = {"steps": list(by_interval(at, rows)), "gpus": list(by_gpus(at, rows))}
    if args.json:
        print(to_json(as_values(at, rows, source) | {f"by_{name}": curve for name, curve in curves.items()}))
    else:
        show_shares(at, rows, source)
    if args.plot:
        with notes_on_stderr(args.json):
            draw_goodput(args.plot, at, curves)
    return Exit.DONE


def rate_of(args: argparse.Namespace) -> tuple[float, str]:
    """Return the number of failures per GPU-day, and a text that names its source."""
    words = (*FAILURES, "runs", "a number")
    if args.failures in FAILURES:
        failures, days = FAILURES[args.failures]
    elif args.failures == "runs":
        failures, days = count_interruptions(all_runs(args.runs))
        if not failures:
            raise bad_value(
                "--failures", "runs", f"{days:,.6g} GPU-days of {args.runs} had none", *FAILURES, "a number"
            )
    else:
        try:
            rate = float(args.failures)
        except ValueError as error:
            raise bad_value("--failures", args.failures, "is no rate", *words) from error
        if reason := POSITIVE.objection(rate):
            raise bad_value("--failures", args.failures, f"failures per GPU-day: {reason}")
        return rate, f"{rate:g} per GPU-day"
    return failures / days, f"{args.failures}: {failures} in {days:,.6g} GPU-days"


def count_interruptions(runs: list[Path]) -> tuple[int, float]:
    """Return the number of attempts that were interrupted after at least one step, and the GPU-days of all attempts
    with at least one step. An attempt was interrupted if it ended early although nobody asked it to, and the job itself
    was not the cause.
    """
    failures, seconds = 0, 0.0
    for directory, state in zip(runs, inspect_all(runs), strict=True):
        config = layout.CONFIG.read(directory)
        homes = [home for home in (directory, *layout.REPLICA.all(directory).values()) if layout.ATTEMPT.all(home)]
        groups = (config.get("fault_tolerance") or {}).get("replicas") or 1
        for home in homes:
            attempts = layout.ATTEMPT.all(home)
            for number, attempt in attempts.items():
                if (life := life_of(attempt)) and layout.STATUS.read(attempt):
                    seconds += (life[1] - life[0]) * (config.get("gpus") or 1) * groups / len(homes)
                    failures += _interrupted(attempt, number < max(attempts) or not state.active)
    return failures, seconds / 86400


def _interrupted(attempt: Path, over: bool) -> bool:
    """Whether an attempt failed for a reason outside the job itself, or ended without a record (as after a power cut)."""
    if layout.CANCELLED.of(attempt).exists():
        return False
    if failure := guilty(attempt):
        return failure.kind not in OWN_FAULTS
    return over and "exit_status" not in layout.RANK.read(attempt)


def predicted_step(job: Job) -> float:
    """Return the predicted seconds of a step."""
    prediction = predict.predict(job)
    if not prediction.speed:
        raise ConfigError(f"{prediction.reason}; --step-seconds gives it")
    return prediction.speed.step_seconds


def by_interval(at: Site, rows: list[Way]) -> Iterator[dict[str, Any]]:
    """Yield the goodput of each way of saving for several numbers of steps between two saves."""
    saving = {way.kind: way for way in rows if way.groups == 1 and way.queue and not way.elastic and way.kind != "off"}
    for steps in INTERVALS:
        yield {"steps": steps} | {f"checkpoint={kind}": at.shares(way, steps).goodput for kind, way in saving.items()}


def by_gpus(at: Site, rows: list[Way]) -> Iterator[dict[str, Any]]:
    """Yield the goodput of each way on other numbers of devices, from an eighth to eight times the job's number."""
    for gpus in (at.gpus * 2**power // 8 for power in range(7)):
        there = replace(at, gpus=gpus)
        yield {"gpus": gpus} | {way.name: there.shares(way).goodput for way in rows if gpus >= way.groups * at.node}


def as_values(at: Site, rows: list[Way], source: str) -> dict[str, Any]:
    """Return the content of the table as JSON values."""
    costs = at.costs(rows[0])
    return {
        "gpus": at.gpus,
        "failures_per_gpu_day": at.rate,
        "source": source,
        "hours_between_failures": at.between / 3600,
        "step_seconds": at.step,
        "checkpoint_bytes": at.bytes,
        "save_seconds": at.save(),
        "copy_seconds": at.copy("async_pinned"),
        "daly_seconds": daly_interval(costs),
        "young_seconds": young_interval(costs),
        "rows": [{"name": way.name, "interval_steps": at.steps(way)} | asdict(at.shares(way)) for way in rows],
    }


def show_shares(at: Site, rows: list[Way], source: str) -> None:
    """Print the table."""
    size = "" if at.bytes is None else f" of {at.bytes / 1e12:,.2f} TB"
    print(
        f"{at.job.model.name} on {at.gpus:,} GPUs: a step takes {lasting(at.step)}; a failure every {lasting(at.between)} ({source})"
    )
    print(
        f"a checkpoint{size} is complete in {lasting(at.save())}, copied in {lasting(at.copy('async_pinned'))} (async_pinned); "
        f"a failure costs {at.queue / 60:g} min in the queue and {at.restart / 60:g} min to the next step\n"
    )
    cells = []
    for way in rows:
        steps, shares = at.steps(way), at.shares(way)
        parts = (shares.goodput, shares.saving, shares.redone, shares.restarting, shares.slower)
        cells.append((way.name, f"{steps:,}", f"{steps * at.step / 60:,.1f}", *(f"{part:.1%}" for part in parts)))
    titles = ("", "steps", "minutes", "goodput", "saving", "done again", "restarting", "fewer nodes")
    print(*table(titles, cells, titles[1:]), sep="\n")
    print("steps, minutes: between two saves")


def draw_goodput(folder: Path, at: Site, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the goodput over the interval between saves and over the number of devices; print the names of the files."""
    from titan_hydra.experiments.report.plots import figure, save_figure
    from titan_hydra.experiments.report.style import drawing

    for name, rows in curves.items():
        with drawing("plan"):
            drawn, axes = figure(4.2)
            for line in [line for line in rows[-1] if line != name]:
                known = [row for row in rows if line in row]
                axes.plot([row[name] for row in known], [row[line] for row in known], marker="o", label=line)
            axes.set_xscale("log")
            axes.set_xticks([row[name] for row in rows], [f"{row[name]:,}" for row in rows])
            axes.minorticks_off()
            axes.set_ylim(0, 1.03)
            axes.set_xlabel("steps between two saves" if name == "steps" else "GPUs", loc="right")
            axes.set_title(f"{at.job.model.name}, {at.rate:.2g} failures per GPU-day: goodput", loc="left")
            drawn.legend(loc="outside lower center", ncols=2)
            print(*save_figure(drawn, folder, f"goodput-{name}"), sep="\n")
