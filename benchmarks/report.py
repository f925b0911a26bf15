"""Measure the CPU time, memory and page size of `titan report` over a large sweep: python benchmarks/report.py [--runs
1000] [--rows 1000]

The runs are five layouts with as many seeds each, all done. Each printed line shows one process, started as a user
starts it, with its largest resident memory. The exit status is 1 if a process takes more than 400 MB or writes a page
of more than 5 MB.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.config.files import write_json
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.runs import rundir

ROOT = Path(__file__).parents[1]
LAYOUTS = ("ddp", "fsdp", "hsdp", "tp", "pp")
MEMORY, PAGE = 400e6, 5e6  # bytes
LINES = ("", "--over seed", "--html", "--over seed --html", "--plots", "--over seed --plots")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--lines", default=",".join(LINES), help="flags of titan report, separated by commas (default: %(default)s)"
    )
    args = parser.parse_args()
    over = False
    with tempfile.TemporaryDirectory(prefix="report-") as name:
        make_sweep(Path(name) / "runs", args.runs, args.rows)
        print(
            f"{args.runs} runs of {args.rows} rows; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
            f"{'titan report':<32}{'CPU, s':>8}{'MB':>8}{'page, MB':>10}"
        )
        for line in args.lines.split(","):
            seconds, memory, page = measure(Path(name), line.split())
            print(f"{line:<32}{seconds:>8.1f}{memory / 1e6:>8.0f}{page / 1e6:>10.2f}", flush=True)
            over = over or memory > MEMORY or page > PAGE
    return int(over)


def measure(folder: Path, flags: list[str]) -> tuple[float, float, int]:
    """Return CPU seconds, bytes of memory and bytes of the page of one `titan report`. Raise SystemExit if it fails."""
    code = (
        "import resource, sys; from titan_hydra.cli import main; status = main(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr); "
        "sys.exit(status)"
    )
    page = folder / "out" / "report.html"
    page.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "large", "-o", str(folder / "out"), *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(f"titan report {' '.join(flags)}: status {done.returncode}\n{done.stderr[-2000:]}")
    seconds, kilobytes = done.stderr.split()[-2:]
    return float(seconds), 1024 * float(kilobytes), page.stat().st_size if page.exists() else 0


def make_sweep(runs: Path, number: int, rows: int) -> None:
    """Write a sweep as the launcher and the trainer leave it."""
    cells = []
    for layout_name in LAYOUTS:
        options = [f"parallelism={layout_name}", "gpus=2", "data.global_batch=8", f"steps={rows}", f"paths.runs={runs}"]
        job = compose_job("model=llama3_debug", *options)
        for seed in range(number // len(LAYOUTS)):
            job.seed = seed
            cell = freeze(job)
            directory, overrides = rundir.directory_of(cell), [f"parallelism={layout_name}", f"seed={seed}"]
            (directory / "attempts" / "1").mkdir(parents=True)
            write_run(directory, to_dict(cell), rows, 100.0 * (1 + LAYOUTS.index(layout_name)) + seed)
            cells.append(
                {
                    "name": " ".join(overrides),
                    "overrides": overrides,
                    "hash": directory.name[-8:],
                    "directory": directory.name,
                }
            )
    folder = layout.SWEEPS.of(runs) / "large-1"
    folder.mkdir(parents=True)
    sweep = {"name": "large", "created": 0, "command": ["-m", "seed=range(200)"], "baseline": None, "cells": cells}
    write_json(layout.SWEEP.of(folder), sweep)


def write_run(directory: Path, config: dict, rows: int, rate: float) -> None:
    """Write the files of a run that is done."""
    versions = {"python": "3.11", "torch": "2.13", "hydra-core": "1.3"}
    layout.CONFIG.of(directory).write_text(json.dumps(config))
    environment = {"git_sha": "0123456789abcdef", "git_diff": "+" * 5000, "versions": versions, "host": "a"}
    layout.ENV.of(directory).write_text(json.dumps(environment))
    lines = []
    for step in range(1, rows + 1):
        loss = 3 + math.exp(-step / 100) + math.sin(step * rate) / 100
        lines.append(
            json.dumps(
                {
                    "step": step,
                    "loss": loss,
                    "loss_mean": loss * 0.999,
                    "grad_norm": loss / 7,
                    "lr": 1e-3 / step,
                    "tokens_per_second": rate + loss,
                    "tflops": loss * 11,
                    "mfu": loss / 10,
                    "memory_gib": 9.51234567,
                    "memory_reserved_gib": 10.1234567,
                    "step_seconds": loss / 3,
                    "data_seconds": loss / 1000,
                    "tokens_seen": 16384 * step,
                }
            )
            + "\n"
        )
    layout.METRICS.of(directory).write_text("".join(lines))
    events = [
        {"event": "validation", "step": step, "validation_loss": 3 + 1 / step, "seconds": 1.0}
        for step in range(100, rows + 1, 100)
    ]
    layout.EVENTS.of(directory).write_text("".join(json.dumps(event) + "\n" for event in events))
    layout.RESULT.of(directory).write_text(
        json.dumps(
            {
                "status": "done",
                "steps": rows,
                "final_loss": 3.0,
                "validation_loss": 3.0,
                "tokens_per_second": rate,
                "tokens_per_second_iqr": 2.0,
                "measured_steps": rows - 1,
                "memory_gib": 10.1,
                "mfu": 0.4,
                "world_size": 2,
                "device": "H100",
                "parameters": 1000000,
                "flops_per_token": 6e6,
                "tokens": 16384 * rows,
                "git_sha": "0123456789abcdef",
                "versions": versions,
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
