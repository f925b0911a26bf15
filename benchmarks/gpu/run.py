"""Measure titan_hydra and TorchTitan's own trainer on one GPU: python benchmarks/gpu/run.py LIST ... [--out FOLDER]

A LIST is the name of a file in lists/ (8b_block), or the path of such a file. Each of its rows runs in a process of its
own with a deadline of its own, so if a row fails, or the machine is taken away, only one row is lost. After each row,
its line is written to FOLDER/rows.jsonl, the table so far to table.txt, and the row as a published measurement, which
`titan rates score` reads, to rows.yaml. With --device cpu the rows run on the CPU; --dry-run makes them tiny, to check
that everything works.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rows import Row, overrides, read, tiny

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # a carried tree is not installed
LEAST = 45  # seconds; if less time is left, no row begins (12 layers of 8B took 32 to 41 s on an H200)
FIRST_STEP = re.compile(r"step:? +1\b.*loss")  # as both tools print it


# --- one row ----------------------------------------------------------------------------------------------------------


def command(row: Row, scratch: Path, trace: Path | None = None) -> list[str]:
    """Return the command that runs the row."""
    if row.tool == "torchtitan":
        more = {"dimensions": row.dimensions, "experts": row.experts, "trace": str(trace or "")}
        settings = json.dumps(dataclasses.asdict(row) | more)
        return [sys.executable, str(HERE / "torchtitan_row.py"), settings]
    profiled = ["profiling=on", f"profiling.first_step={row.steps - 1}", "profiling.steps=2", "profiling.memory=false"]
    profiled *= trace is not None
    return [sys.executable, str(ROOT / "launch.py"), *overrides(row), *profiled, f"paths.runs={scratch}/runs"]


def measure(
    row: Row, left: float, limit: float, environment: dict[str, str], log: Path, trace: Path | None = None
) -> dict[str, Any]:
    """Run a row and return its measurements, or how it failed. It may take `limit` seconds, and all rows together have
    `left` seconds.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        # empty caches, so that the first step of every row compiles
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        with (scratch / "output").open("wb") as output:
            process = subprocess.Popen(
                command(row, scratch, trace),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment | caches,
                start_new_session=True,
            )
            try:
                status, started = watch(process, min(left, limit), scratch / "output")
            finally:
                kill(process)
        text = (scratch / "output").read_text(errors="replace")
        found = (
            readable(row, scratch, text)
            if status == 0
            else {"status": ended(status, text, left < limit), "error": tail(text, 15)}
        )
        if trace is not None and row.tool == "titan_hydra":
            for file in scratch.glob("runs/*/attempts/1/profile/trace_0.json.gz"):
                shutil.move(file, trace)
    with log.open("a") as file:
        file.write(f"=== {row.tool}: {row.name}\n{tail(text, 60)}\n")
    return {
        "name": row.name,
        "tool": row.tool,
        **found,
        "started_seconds": started,
        "seconds": round(time.monotonic() - began, 1),
    }


def watch(process: subprocess.Popen, seconds: float, output: Path) -> tuple[int | None, float | None]:
    """Wait for a row. Return its exit status (None if it has not ended in time), and the seconds until it printed its
    first step.
    """
    began, started = time.monotonic(), None
    while process.poll() is None and time.monotonic() - began < seconds:
        if started is None and FIRST_STEP.search(output.read_text(errors="replace")):
            started = time.monotonic() - began
        time.sleep(0.05)
    return process.returncode, started


def tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


def kill(process: subprocess.Popen) -> None:
    """End a row's process and its helpers (the compiler's workers)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def ended(status: int | None, text: str, cut_off: bool) -> str:
    """Return how a row failed. A row that did not end was cut off by the end of the time of all rows, or it hung."""
    if status is None:
        return "not run: time was up while it ran" if cut_off else "hung"
    if status == 76 or "OutOfMemoryError" in text:
        return "out of memory"
    return "crashed" if status < 0 else "failed"


def readable(row: Row, scratch: Path, text: str) -> dict[str, Any]:
    """Return the figures of a row that succeeded. If they cannot be read, only this row counts as failed."""
    try:
        return measured(row, scratch, text)
    except Exception:
        return {"status": "failed", "error": tail(f"{text}\n{traceback.format_exc()}", 15)}


def measured(row: Row, scratch: Path, text: str) -> dict[str, Any]:
    """Return the figures of a row that succeeded, from all windows after the first."""
    if row.tool == "torchtitan":
        found = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith('{"windows"')))
        first, steady, flops = found["first_step_seconds"], found["windows"], found["flops_per_token"]
    else:
        (file,) = scratch.glob("runs/*/metrics.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        first, flops = found[0]["step_seconds"], 1e12 * found[0]["tflops"] / found[0]["tokens_per_second"]
        steady = [
            {
                "step": line["step"],
                "tokens_per_second": line["tokens_per_second"],
                "loss": line["loss"],
                "active_gib": line["memory_gib"],
                "reserved_gib": line["memory_reserved_gib"],
            }
            for line in found
        ]
    rates = [window["tokens_per_second"] for window in steady if window["step"] > row.window]
    peaks = {
        key: max((window[key] for window in steady if window[key] is not None), default=None)
        for key in ("active_gib", "reserved_gib")
    }
    return {
        "status": "done",
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        **peaks,
        "first_step_seconds": first,
        "flops_per_token": round(flops),
        "first_loss": steady[0]["loss"],
        "last_loss": steady[-1]["loss"],
    }


# --- all rows ---------------------------------------------------------------------------------------------------------


def card(device: str, known: Path | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what card.py prints, or has printed into the file `known`, and the environment of all rows."""
    if known is None:
        found = subprocess.run([sys.executable, str(HERE / "card.py"), device], capture_output=True, text=True)
        if found.returncode:
            print(f"no {device} here: {found.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            raise SystemExit(2)
    header = json.loads(found.stdout if known is None else known.read_text())
    environment = os.environ | {"PYTHONUNBUFFERED": "1", **header["environment"]}
    return header, environment


def results(
    rows: list[Row], until: float, limit: float, environment: dict[str, str], header: dict[str, Any], out: Path
) -> Iterator[dict]:
    """Measure rows, and add to each its MFU and its ratio."""
    rates: dict[str, float] = {}
    peak = header.get("peak_flops")
    for row in rows:
        left = until - time.monotonic()
        if reason := omitted(row, left, header):
            yield {"name": row.name, "tool": row.tool, "status": reason}
            continue
        found = measure(row, left, limit, environment, out / "rows.log")
        if found["status"] == "done":
            rates[row.name] = rate = found["tokens_per_second"]
            # relative to the bf16 peak, under Float8 too
            found["mfu"] = rate * found["flops_per_token"] / peak if peak else None
            found["against"], found["ratio"] = row.against, rate / rates[row.against] if row.against in rates else None
        yield found | {"settings": dataclasses.asdict(row)}


def omitted(row: Row, left: float, header: dict[str, Any]) -> str:
    """Return why a row does not run: the card has too little memory, or too few seconds are left. Return "" if it runs."""
    if row.needs > header.get("memory_gib", math.inf):
        return f"needs {row.needs:g} GiB"
    return "not run" if left < LEAST else ""


def publish(row: Row, found: dict, header: dict[str, Any], out: Path) -> bool:
    """Append a measured row to rows.yaml. An error is printed and does not stop the rows that follow."""
    try:
        text = yaml.safe_dump([as_published(row, found, header)], sort_keys=False)
    except (Exception, SystemExit):
        print("    | not published:", *(f"    | {words}" for words in traceback.format_exc().splitlines()), sep="\n")
        return False
    with (out / "rows.yaml").open("a") as file:
        file.write(text)
    return True


def as_published(row: Row, found: dict, header: dict[str, Any]) -> dict[str, Any]:
    """Return a measured row in the form of benchmarks/planner/published.yaml, with the preset of its card."""
    from titan_hydra.core.job.freeze import freeze
    from titan_hydra.experiments.compose.compose import compose_unchecked
    from titan_hydra.experiments.compose.describe import option_files
    from titan_hydra.instruments.rates.own_row import row_of
    from titan_hydra.instruments.rates.published import OWN

    device = header["device"].lower()
    preset = next((file.stem for file in option_files("hardware") if file.stem in device), "unknown")
    job = freeze(compose_unchecked(*overrides(row), f"hardware={'cpu' if row.cpu else preset}"))
    tool, differs = OWN, {}
    if row.tool != OWN:
        tool = "pytorch/torchtitan"
        differs["dp_kind"] = "none" if row.wrap == "native" else "fsdp2"
        differs |= {"compile": "block and loss"} if row.compile else {}
    published = {
        "source": f"{tool}, benchmarks/gpu, {header['commit']}",
        "known": str(datetime.date.today()),
        "device": f"1 x {header['device']}",
    }
    published |= row_of(job, row.name) | differs | {"tokens_per_second_per_gpu": found["tokens_per_second"]}
    return published if found["reserved_gib"] is None else published | {"memory_gib": found["reserved_gib"]}


HEADER = (
    f"{'tool':<12}{'row':<48}{'tokens/s':>10}{'spread':>8}{'MFU':>7}{'GiB':>7}{'first step':>11}{'from start':>11}"
    f"{'ratio':>7}  against"
)


def line(found: dict) -> str:
    """Return a result as a line of the table."""
    start = f"{found['tool']:<12}{found['name']:<48}"
    if found["status"] != "done":
        return f"{start}{found['status']}"
    rate, unknown = found["tokens_per_second"], "-"
    spread = (found["fastest"] - found["slowest"]) / rate
    mfu = f"{found['mfu']:.1%}" if found["mfu"] is not None else unknown
    memory = f"{found['reserved_gib']:.1f}" if found["reserved_gib"] is not None else unknown
    ratio = f"{found['ratio']:.2f}" if found["ratio"] is not None else unknown
    since = f"{found['started_seconds']:.1f} s" if found["started_seconds"] is not None else unknown
    first = f"{found['first_step_seconds']:.1f} s"
    return f"{start}{rate:>10,.0f}{spread:>8.1%}{mfu:>7}{memory:>7}{first:>11}{since:>11}{ratio:>7}  {found['against']}"


def parse() -> argparse.Namespace:
    """Parse the command line; run.py and profile_rows.py share this function."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="+", metavar="LIST")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes and few steps")
    parser.add_argument("--only", default="", help="only rows with this in their name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of all rows: --set batch=1"
    )
    parser.add_argument("--card", type=Path, help="file that card.py has printed")
    parser.add_argument("--seconds", type=float, default=560, help=f"for all rows; one begins only if {LEAST} are left")
    parser.add_argument("--row-seconds", type=float, default=170, help="deadline of a row")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def chosen(args: argparse.Namespace, header: dict[str, Any]) -> list[Row]:
    """Return the rows that the command line selects, as they fit the card."""
    changes = {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in args.set)}
    rows = [
        row
        for name in args.lists
        for row in read(name, {**changes, "cpu": args.device == "cpu"}, header.get("memory_gib", math.inf))
        if args.only in row.name
    ]
    return [tiny(row) for row in rows] if args.dry_run else rows


def main() -> int:
    args = parse()
    until = time.monotonic() + args.seconds
    header, environment = card(args.device, args.card)
    rows = chosen(args, header)
    text = ["command: " + " ".join(sys.argv), *(f"{name}: {value}" for name, value in header.items()), "", HEADER]
    print(*text, sep="\n", flush=True)
    failed = 0
    with (args.out / "rows.jsonl").open("a", buffering=1) as file:
        file.write(json.dumps({"command": sys.argv, "card": header}) + "\n")
        for found in results(rows, until, args.row_seconds, environment, header, args.out):
            file.write(json.dumps(found) + "\n")
            print(line(found), flush=True)
            text.append(line(found))
            done = found["status"] == "done"
            if not found["status"].startswith("needs"):
                failed += not (done and publish(Row(**found["settings"]), found, header, args.out))
            if "error" in found:
                print(*(f"    | {words}" for words in found["error"].splitlines()), sep="\n", flush=True)
            (args.out / "table.txt").write_text("\n".join(text) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
