"""`titan plan --gpus 8,16,64`: print the fastest layout that fits for each number of GPUs, and why efficiency falls."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.core.job.ranks import devices_here, runs_here
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.plan.memory import on_the_host
from titan_hydra.experiments.plan.search import Row, search

TITLES = (
    "gpus",
    "layout",
    "ac",
    "local batch",
    "GiB",
    "fits",
    "tokens/s/device",
    "tokens/s",
    "of linear",
    "GPU-hours",
    "limited by",
)

# the words of a command line that a layout replaces
REPLACED = re.compile(
    r"\+*~?(gpus|ac|optimizer\.offload|pp_schedule|(ac|pp_schedule)\..*|data\.(local|global)_batch|parallelism\.(dp_replicate|dp_shard|cp|tp|pp|ep|async_tp))="
)
LIMITED = "`limited by`: the largest term of time beside matmuls and attention; of memory"


def device_counts(text: str) -> list[int]:
    """Parse --gpus: whole numbers, separated by commas. Return them sorted, each once. Raises ArgumentTypeError."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number, or several with commas between them, as 8,16,64"
        ) from error


def curve(job: Job, counts: list[int], args: argparse.Namespace) -> int:
    """Search for the fastest layout on each number of devices, and print a row for each number. GPU-hours are those of
    a billion tokens. Draw the speeds if --plot names a folder. Returns 2 if no layout fits on any number of devices.
    """
    best = {count: rows[0] for count in counts if (rows := search(job, count, host=True)[0])}
    fitting = {count: row for count, row in best.items() if row.prediction.fits != "no"}
    if args.json:
        print(to_json([_as_json(count, best.get(count)) for count in counts]))
    else:
        _show(job, counts, best, fitting, args)
    if args.plot and fitting:
        predictions = {count: row.prediction for count, row in fitting.items()}
        with notes_on_stderr(args.json):
            print(*draw_speed(args.plot, predictions, bool(job.data.global_batch)), sep="\n")
    return Exit.DONE if fitting else Exit.CONFIG


def billion_tokens(prediction: predict.Prediction) -> float | None:
    """Return the GPU-hours of a billion tokens; None if the speed cannot be predicted, or if the layout does not fit."""
    return 1e9 / prediction.speed.tokens_per_second / 3600 if prediction.speed and prediction.fits != "no" else None


def _as_json(count: int, row: Row | None) -> dict[str, Any]:
    if row is None:
        return {"gpus": count, "overrides": None, "reason": "no layout obeys the rules"}
    return {
        "overrides": row.overrides,
        "gpu_hours_of_a_billion_tokens": billion_tokens(row.prediction),
    } | predict.as_json(row.prediction)


def _show(job: Job, counts: list[int], best: dict[int, Row], fitting: dict[int, Row], args: argparse.Namespace) -> None:
    """Print a row for each number of devices, then the layouts as command lines."""
    batch = f"{job.data.global_batch:,} samples" if job.data.global_batch else f"{job.data.local_batch:,} on each GPU"
    print(f"{job.model.name} on {job.hardware.name}, {job.data.seq_len:,} tokens a sample, global batch: {batch}")
    alone = [row for row in fitting.values() if not on_the_host(row.prediction.job)]  # linear scaling begins with these
    first = next((row.prediction.speed for row in [*alone, *fitting.values()]), None)
    rows: list[tuple[Any, ...]] = []
    for count in counts:
        row = best.get(count)
        if row is None:
            rows.append((f"{count:,}", "no layout obeys the rules", *["-"] * (len(TITLES) - 2)))
            continue
        prediction, speed = row.prediction, row.prediction.speed if count in fitting else None
        times = ["-"] * 4
        if speed and first:
            rate = speed.tokens_per_second
            times = [
                f"{rate:,.0f}",
                f"{rate * count:,.0f}",
                f"{rate / first.tokens_per_second:.0%}",
                f"{billion_tokens(prediction):,.1f}",
            ]
        limit = f"{speed.limit}; {prediction.peak.largest.name}" if speed else prediction.peak.largest.name
        layout = (
            layout_of(prediction.job),
            f"{prediction.job.ac.name}{', states on the host' * prediction.job.optimizer.offload}",
            prediction.job.data.local_batch,
            f"{prediction.peak.gib:.1f}",
            prediction.fits,
        )
        rows.append((f"{count:,}", *layout, *times, limit))
    numbers = ("gpus", "local batch", "GiB", "tokens/s/device", "tokens/s", "of linear", "GPU-hours")
    leaves = ("limited by", "tokens/s", "local batch", "GPU-hours")
    print(*table(TITLES, rows, numbers, ("layout",), leaves=leaves), sep="\n")
    print(f"GPU-hours of a billion tokens. {LIMITED}", *predict.notes(job), *_offloads(job, best), "", sep="\n")
    print(*(f"{count:>6,}  {whole_line(job, row, args)}" for count, row in best.items()), sep="\n")


def _offloads(job: Job, best: dict[int, Row]) -> Iterator[str]:
    """Yield a line for each number of devices on which a layout fits only with the host's memory: what that costs."""
    if not on_the_host(job):
        for count, row in best.items():
            yield from (f"{count:,}: {line}" for line in predict.cost_of_offload(row.prediction.job))


def whole_line(job: Job, row: Row, args: argparse.Namespace) -> str:
    """Return the command line that trains a layout: the words of the plan's own line, where it was planned for the job
    `job`, without those that the layout replaces, and the layout. A job that this machine has too few devices for gets
    a cluster.
    """
    words = [word for word in args.overrides if not REPLACED.match(word)]
    far = job.hardware.name != "cpu" and runs_here(job) and row.prediction.job.gpus > devices_here()
    folders = [word for folder in args.config_dir or () for word in ("--config-dir", str(folder))]
    cluster = ["cluster=slurm"] * far
    words = [word for word in words if not (far and re.match(r"\+*cluster[.=]", word))]
    return f"python launch.py {quoted([*folders, *words, *cluster])} {row.overrides}"


def layout_of(job: Job) -> str:
    """Return in words the degrees that are above one, and the schedule."""
    degrees = job.parallelism
    replicas = (
        f"hsdp {degrees.dp_replicate} x {degrees.dp_shard}" if degrees.dp_replicate > 1 else f"fsdp {degrees.dp_shard}"
    )
    others = [f"{name} {getattr(degrees, name)}" for name in ("cp", "tp", "pp", "ep") if getattr(degrees, name) > 1]
    return ", ".join(filter(None, [replicas, *others, order_of(job)]))


def order_of(job: Job) -> str:
    """Return the schedule, the stages per rank and the number of microbatches, such as 1f1b 1x64; "" without a
    pipeline.
    """
    schedule = job.pp_schedule
    return f"{schedule.name} {schedule.stages_per_rank}x{schedule.microbatches}" if job.parallelism.pp > 1 else ""


def draw_speed(folder: Path, predictions: dict[int, predict.Prediction], fixed: bool) -> list[Path]:
    """Draw tokens/s over the number of devices, beside the line of linear scaling. Returns the names of the files."""
    from titan_hydra.experiments.report.plots import figure, save_figure
    from titan_hydra.experiments.report.style import LIGHT, drawing

    counts, job = list(predictions), next(iter(predictions.values())).job
    speeds = [
        prediction.speed.tokens_per_second * count for count, prediction in predictions.items() if prediction.speed
    ]
    with drawing("plan"):
        drawn, plane = figure(3.4)
        plane.plot(counts, [speeds[0] / counts[0] * count for count in counts], color=LIGHT["rule"], label="linear")
        plane.plot(counts, speeds, marker="o", label="predicted")
        plane.set_xscale("log", base=2)
        plane.set_yscale("log", base=2)
        plane.set_xticks(counts, [f"{count:,}" for count in counts])
        plane.set_yticks(speeds, [f"{speed:,.3g}" if speed < 1000 else f"{speed:,.0f}" for speed in speeds])
        plane.minorticks_off()
        plane.set_xlabel(f"GPUs, {'at a fixed global batch' if fixed else 'with a fixed batch on each'}")
        plane.set_title(
            f"{job.model.name} on {job.hardware.name}: tokens/s of the fastest layout that fits", loc="left"
        )
        plane.legend()
        return [*save_figure(drawn, folder, "plan-speed")]
