"""`titan plan`: predict the memory and the speed of a job's layouts, on devices that need not exist here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import bad_value, multiples_around
from titan_hydra.core.job.dtypes import GIB
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.ranks import world_size
from titan_hydra.core.job.rules import checks
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.compose.describe import option_files
from titan_hydra.experiments.plan import memory, messages, predict
from titan_hydra.experiments.plan.predict import FITS, REFUSED, Prediction
from titan_hydra.experiments.plan.search import Row, prepared, search
from titan_hydra.experiments.plan.shape import NotPredictable, shape_of

from .command_plan_curve import LIMITED, curve, device_counts, draw_speed, order_of, whole_line

BAR = 40  # number of characters of the longest bar


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is predicted: a job, its number of devices, and where its options are."""
    parser.set_defaults(why=None)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the job, as for launch.py, with hardware=NAME; all layouts have the job's global batch (default: "
        "data.local_batch times the number of GPUs)",
    )
    parser.add_argument(
        "--gpus",
        type=device_counts,
        metavar="N",
        help="number of devices, as gpus=N; with several numbers, such as 8,16,64, print the best layout for each number",
    )
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder with your own options, as for launch.py",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--cell", action="store_true", help="predict only the layout of the command line, without a search"
    )
    parser.add_argument(
        "--why",
        metavar="LAYOUT",
        help="print which rule excludes this layout (quoted overrides) or, if none does, the terms of its prediction",
    )
    parser.add_argument(
        "--prove",
        type=int,
        metavar="N",
        help="for the N best layouts, step one rank in the fake world, and print its memory and messages beside those of the formulas",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="write plots of memory by term and of speed over the number of GPUs"
    )


def main(args: argparse.Namespace) -> int:
    """Print the fastest layouts, or one layout. Returns 0, or 2 if no layout fits."""
    if args.prove is not None and args.prove < 1:
        raise bad_value("--prove", args.prove, "is the number of layouts to count, at least 1", 1)
    options = [f"--{name}" for name in ("cell", "why", "prove") if getattr(args, name)]
    with device_counting(args, options[0] if options else "") as counts:
        job, gpus = planned_job(args)
        if len(counts) > 1:
            make_folder(args.plot)
            return curve(job, counts, args)
        if args.cell or args.why:
            return one_layout(job, gpus, args)
        return layouts(job, searchable(job, gpus), args)


@contextmanager
def device_counting(args: argparse.Namespace, singular: str = "") -> Iterator[list[int]]:
    """Yield the numbers of devices of a command line, whose overrides are then without several numbers. Raises
    ConfigError if a number is below one, if there are several although `singular` takes one, and for a job that cannot be
    predicted.
    """
    args.overrides, args.gpus = counted_on(args)
    counts = args.gpus or []
    if counts and counts[0] < 1:
        raise bad_value("--gpus", counts[0], "a job needs at least one", 1)
    if len(counts) > 1 and singular:
        raise bad_value("--gpus", ",".join(map(str, counts)), f"{singular} takes one number of GPUs", counts[0])
    try:
        yield counts
    except NotPredictable as error:
        raise ConfigError(str(error)) from error


def counted_on(args: argparse.Namespace) -> tuple[list[str], list[int] | None]:
    """Return the overrides without several numbers of devices (gpus=8,16), and those numbers or those of --gpus. Raises
    ConfigError if the two differ.
    """
    typed = {word: word.removeprefix("gpus=") for word in args.overrides if re.fullmatch(r"gpus=\d+(,\d+)*", word)}
    counts = next((device_counts(numbers) for numbers in reversed(typed.values())), None)
    if counts and args.gpus and counts != args.gpus:
        numbers = ",".join(map(str, args.gpus))
        raise ConfigError(f"--gpus {numbers}: the line has {[*typed][-1]} too, which is the same key; give one of them")
    several = [word for word, numbers in typed.items() if "," in numbers]
    return [word for word in args.overrides if word not in several], args.gpus or counts


def planned_job(args: argparse.Namespace, needs_rates: bool = True) -> tuple[Job, int | None]:
    """Compose the job of the command line, and return it with the number of devices, None if it is not given. Raises
    ConfigError for faults and, if the answer needs rates, for an unknown device.
    """
    job = compose_unchecked(*args.overrides, *(args.why or "").split(), config_dir=args.config_dir)
    if fill := family_of(job.model).fill:
        job.model = fill(job.model)
    if needs_rates and job.hardware.name == "unknown":
        names = tuple(file.stem for file in option_files("hardware") if file.stem != "unknown")
        reason = "a prediction needs the device's memory and rates, such as hardware=h100"
        raise bad_value("hardware", "unknown", reason, *names)
    if faults := checks.check(job, (checks.INPUT,)):
        raise ConfigError("\n".join(map(str, faults)))
    return job, args.gpus[0] if args.gpus else job.gpus


def searchable(job: Job, gpus: int | None) -> int:
    """Return the number of devices of a search. Raises ConfigError if it is not given."""
    if gpus is None:
        nearest = job.hardware.gpus_per_node or 8
        raise bad_value("gpus", None, f"a search needs the number of GPUs, such as gpus={nearest}", nearest)
    return gpus


def layouts(job: Job, gpus: int, args: argparse.Namespace) -> int:
    """Search for layouts and print them. With --prove N, also count the bytes of the N best layouts in the fake world.
    Draw the layouts if --plot names a folder. Returns 2 if no layout fits.
    """
    rows, points = search(job, gpus, host=True)
    if not rows:
        node, batch = job.hardware.gpus_per_node, prepared(job, gpus).data.global_batch
        if node and gpus > node and gpus % node:
            raise bad_value("--gpus", gpus, f"not whole nodes of {node}", *multiples_around(gpus, node))
        raise bad_value(
            "--gpus",
            gpus,
            f"no layout obeys the rules: the global batch {batch} and the model cannot be split over them",
        )
    proofs = [proof(row.prediction.job) for row in rows[: args.prove or 0]]
    if args.json:
        counted = [{"counted": bytes_counted} for bytes_counted in proofs] + [{}] * (len(rows) - len(proofs))
        print(
            to_json(
                [
                    {"overrides": row.overrides, "front": row.front} | predict.as_json(row.prediction) | more
                    for row, more in zip(rows, counted, strict=True)
                ]
            )
        )
    else:
        show(rows, points, job, args)
        show_proofs(proofs)
    if args.plot:
        with notes_on_stderr(args.json):
            draw(args.plot, rows, {count: rows if count == gpus else search(job, count)[0] for count in halves(gpus)})
    return Exit.DONE if rows[0].prediction.fits != "no" else Exit.CONFIG


def one_layout(job: Job, gpus: int | None, args: argparse.Namespace) -> int:
    """Predict the layout of the command line. Raises ConfigError for broken rules, except that faults of rules about
    techniques that torch cannot combine are only printed. With --cell, returns 2 if the layout does not fit.
    """
    job = legal_job(job, gpus)
    broken = [*map(str, checks.check(job, (checks.RECIPE, checks.PLACE)))]
    if broken and args.why:
        print(to_json({"rules": broken}) if args.json else "\n".join(f"dropped: {line}" for line in broken))
        return Exit.DONE
    prediction = predict.predict(job)
    if prediction.reason:
        raise ConfigError(f"{prediction.reason}; memory is predicted: {predict.line(prediction)[0]} GiB")
    proofs = [proof(job)] if args.prove else []
    if args.json:
        print(to_json(predict.as_json(prediction) | {"rules": broken} | ({"counted": proofs[0]} if proofs else {})))
    else:
        print(*(f"not to be started here: {line}" for line in broken), *explained(prediction), sep="\n")
        show_proofs(proofs)
    return Exit.CONFIG if args.cell and prediction.fits == "no" else Exit.DONE


def legal_job(job: Job, gpus: int | None) -> Job:
    """Return the frozen job on `gpus` devices. Raises ConfigError for broken rules."""
    job = freeze(predict.on_nodes(job, gpus))
    whole = (checks.FILES, checks.PASS) if job.data.samples is not None else ()
    if faults := checks.check(job, (checks.KEYS, checks.RANKS, checks.VALUES, checks.LAYOUT, *whole)):
        raise ConfigError("\n".join(map(str, faults)))
    return job


def show(rows: list[Row], points: int, job: Job, args: argparse.Namespace) -> None:
    """Print the layouts as a table, those that are tight below a rule, then each layout as a command line."""
    first = rows[0].prediction
    degrees = [
        name
        for name in ("cp", "tp", "pp", "ep")
        if any(getattr(row.prediction.job.parallelism, name) > 1 for row in rows)
    ]
    pinned = any(memory.on_the_host(row.prediction.job) for row in rows)
    numbers = ("batch", "tokens/s", "GiB", *("host GiB",) * pinned)
    schedule = ("schedule",) * ("pp" in degrees)
    titles = ("", "dp", *degrees, *schedule, "ac", *("states",) * pinned, *numbers, "fits", "limited by")
    cells = [_cells(number, row, degrees, pinned) for number, row in enumerate(rows, start=1)]
    print(
        f"{points:,} legal points on {world_size(first.job):,} x {first.job.hardware.name} of {first.capacity_gib:g} GiB",
        f"global batch {first.job.data.global_batch:,} x {first.job.data.seq_len:,} tokens; batch: data.local_batch",
        sep="\n",
    )
    lines = table(titles, cells, ("", "dp", *degrees, *numbers), leaves=("limited by", "host GiB"))
    fitting = sum(row.prediction.fits != "tight" for row in rows)
    if fitting < len(rows):
        title = "faster, but tight" if fitting else "nothing fits with room to spare; tight"
        lines.insert(
            fitting + 1 if len(lines) == len(rows) + 1 else len(lines),
            f"--- {title}: under {1 - FITS:.0%} of the memory stays free, and NCCL needs some",
        )
    elif first.fits == "no":
        lines.insert(1, "--- nothing fits; these layouts need least memory")
    if pinned and not job.optimizer.offload:
        lines.insert(1, "--- nothing fits in the devices' memory alone; these layouts need the host's")
    bands = f"predicted: GiB +-{memory.BAND:.0%}, tokens/s of a device {first.shown_band}"
    front = "; * no faster one is smaller" if first.fits != "no" else ""
    legend = [f"{bands}{front}", *[LIMITED] * ("limited by" in lines[0])]
    print(*lines, *legend, *predict.notes(first.job), "", sep="\n")
    print(*(f"{number:>2}  {whole_line(job, row, args)}" for number, row in enumerate(rows, start=1)), sep="\n")
    if first.fits == "no":
        print("try more GPUs, a device with more memory (hardware=), a smaller model or a smaller data.seq_len")


def _cells(number: int, row: Row, degrees: list[str], pinned: bool) -> tuple[Any, ...]:
    """Return the cells of a layout's row in the table."""
    job, prediction = row.prediction.job, row.prediction
    layout = job.parallelism
    return (
        f"{number}{'*' if row.front else ' '}",
        f"{layout.dp_replicate}x{layout.dp_shard}" if layout.dp_replicate > 1 else layout.dp_shard,
        *(getattr(layout, name) for name in degrees),
        *(order_of(job) or "-",) * ("pp" in degrees),
        job.ac.name,
        *("host" if job.optimizer.offload else "device",) * pinned,
        job.data.local_batch,
        f"{prediction.speed.tokens_per_second:,.0f}",
        f"{prediction.peak.gib:.1f}",
        *(f"{memory.on_the_host(job) / GIB:.1f}",) * pinned,
        prediction.fits,
        f"{prediction.speed.limit}; {prediction.peak.largest.name}",
    )


def proof(job: Job) -> dict[str, Any]:
    """Count in the fake world the bytes of the rank that needs most memory, in eager mode. Returns the counted bytes
    and those that the formulas give for the same eager job.
    """
    from titan_hydra.core.train.count import count_rank, eager

    job = eager(job)
    peak = memory.peak(job)
    counted = count_rank(job, peak.rank)
    return {
        "rank": peak.rank,
        "live": counted.live,
        "live_by_formula": peak.live,
        "sent": counted.messages,
        "sent_by_formula": messages.of_step(shape_of(job), peak.pipeline_rank),
    }


def show_proofs(proofs: list[dict[str, Any]]) -> None:
    """Print the counted bytes beside the bytes of the formulas, one row per layout."""
    if not proofs:
        return
    dimensions = sorted({name for of_rank in proofs for name in of_rank["sent_by_formula"]})
    rows = []
    for number, of_rank in enumerate(proofs, start=1):
        pairs = [
            (of_rank["live"], of_rank["live_by_formula"]),
            *((of_rank["sent"].get(name), of_rank["sent_by_formula"].get(name)) for name in dimensions),
        ]
        rows.append(
            (
                number,
                of_rank["rank"],
                *("-" if b is None else f"{a / GIB:,.2f} / {b / GIB:,.2f}" for a, b in pairs),
                f"{of_rank['live_by_formula'] / of_rank['live'] - 1:+.1%}",
            )
        )
    titles = ("", "rank", "live GiB", *(f"{name} GiB" for name in dimensions), "live off by")
    print(
        "\ncounted in the fake world / by formula, eager and without a number format: live memory, then bytes sent in a step"
    )
    print(*table(titles, rows, titles[1:]), sep="\n")


def explained(prediction: Prediction) -> list[str]:
    """Return the predicted totals in a line, then the terms of memory and of time as bars."""
    gib, fits, rate, hours = predict.line(prediction)
    stage = f", pipeline rank {prediction.peak.pipeline_rank}" if prediction.job.parallelism.pp > 1 else ""
    lines = [
        *predict.notes(prediction.job),
        f"{gib} GiB on rank {prediction.peak.rank}{stage}: {fits}; {rate} tokens/s/device, "
        f"{hours} GPU-hours for {prediction.job.steps} steps",
    ]
    terms = [(f"{term.name} ({term.tag})", term.bytes / GIB) for term in prediction.peak.terms]
    lines += bars("GiB", terms)
    return [
        *lines,
        *bars("seconds of a step", [(name, value) for name, value in prediction.speed.parts.items() if value > 0]),
    ]


def bars(unit: str, values: list[tuple[str, float]]) -> list[str]:
    """Return for each value a line with a bar. The largest value has a bar of BAR characters."""
    most = max(value for _, value in values)
    rows = [(name, f"{value:,.2f}", "#" * max(round(BAR * value / most), value > 0)) for name, value in values]
    return ["", *table(("", unit, ""), rows, (unit,))]


def halves(gpus: int) -> list[int]:
    """Return a quarter of the number of devices, half of it, and the number itself; fractions are left out."""
    return [gpus // times for times in (4, 2, 1) if gpus % times == 0 and gpus // times]


def make_folder(folder: Path | None) -> None:
    """Make the folder that --plot names, if any. Raises ConfigError if the folder cannot be written."""
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bad_value("--plot", folder, f"cannot be written: {error.strerror}") from error


def draw(folder: Path, rows: list[Row], by_gpus: dict[int, list[Row]]) -> None:
    """Draw the memory of each layout, stacked by term, and the speed of the fastest layout over the number of GPUs.
    Print the names of the files.
    """
    from titan_hydra.experiments.report.plots import figure, save_figure
    from titan_hydra.experiments.report.style import LIGHT, drawing

    make_folder(folder)
    with drawing("plan"):
        import matplotlib

        drawn, axes = figure(2.2 + 0.36 * len(rows))
        names = dict.fromkeys(term.name for row in rows for term in row.prediction.peak.terms)
        left = [0.0] * len(rows)
        for index, name in enumerate(names):
            widths = [sum(term.bytes for term in row.prediction.peak.terms if term.name == name) / GIB for row in rows]
            axes.barh(range(len(rows)), widths, left=left, label=name, color=matplotlib.colormaps["tab20"](index % 20))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        capacity, job = rows[0].prediction.capacity_gib, rows[0].prediction.job
        title = f"{job.model.name} on {job.hardware.name}"
        axes.axvspan(FITS * capacity, REFUSED * capacity, color=LIGHT["rule"], alpha=0.5, zorder=0)
        axes.axvline(capacity, color="black", linewidth=1)
        drawn.suptitle(f"{title}: predicted memory of a device", x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes.set_yticks(
            range(len(rows)),
            [
                f"{number}: {row.overrides.split(' ac=')[0].replace('parallelism.', '')}"[:48]
                for number, row in enumerate(rows, start=1)
            ],
        )
        axes.invert_yaxis()
        axes.set_xlabel(
            "GiB; the line is a device's memory; a layout fits below the band and is refused beyond it", loc="right"
        )
        drawn.legend(loc="outside lower center", ncols=3)
        print(*save_figure(drawn, folder, "plan-memory"), sep="\n")
    fitting = {
        count: rows_of_count[0].prediction
        for count, rows_of_count in by_gpus.items()
        if rows_of_count and rows_of_count[0].prediction.fits != "no"
    }
    if fitting:
        print(*draw_speed(folder, fitting, fixed=True), sep="\n")
