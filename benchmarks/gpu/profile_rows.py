"""Split the time of a step into matmul, attention, casts, optimizer, loss and gaps, for every row of a list: python
benchmarks/gpu/profile_rows.py LIST [--only TEXT]

This program runs the rows of run.py, for both tools, with torch's profiler over the last two steps. It reads the traces
with trace_summary.py: milliseconds per step, each moment counted once. After each row, its line is written to
FOLDER/profile.jsonl. A profiler slows steps down, most of all if the CPU limits them; take rates from run.py.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import run
import trace_summary as trace

COLUMNS = ("matmul", "attention", "casts", "optimizer", "loss", "other", "communication", "idle")


def main() -> int:
    args = run.parse()
    until = time.monotonic() + args.seconds
    header, environment = run.card(args.device, args.card)
    rows = run.chosen(args, header)
    print(
        "command: " + " ".join(sys.argv),
        *(f"{name}: {value}" for name, value in header.items()),
        "",
        f"{'tool':<12}{'row':<48}"
        + "".join(f"{name if name != 'idle' else 'gaps':>14}" for name in (*COLUMNS, "ms/step"))
        + f"{'tokens/s':>10}{'GiB':>7}  losses",
        sep="\n",
    )
    failed = 0
    with (args.out / "profile.jsonl").open("a", buffering=1) as file, tempfile.TemporaryDirectory() as folder:
        file.write(json.dumps({"command": sys.argv, "card": header}) + "\n")
        for number, row in enumerate(rows):
            left = until - time.monotonic()
            found: dict[str, Any] = {"name": row.name, "tool": row.tool, "status": run.omitted(row, left, header)}
            if not found["status"]:
                place = Path(folder) / f"{number}.json.gz"
                found = run.measure(row, left, args.row_seconds, environment, args.out / "rows.log", place)
                if found["status"] == "done":
                    found |= split(place)
            failed += found["status"] != "done" and not found["status"].startswith("needs")
            file.write(json.dumps(found) + "\n")
            print(f"{row.tool:<12}{row.name:<48}{line(found)}", flush=True)
    return int(failed > 0)


def line(found: dict[str, Any]) -> str:
    """Return the columns of a row, or its status and the end of its error."""
    if found["status"] != "done":
        return "\n    | ".join([found["status"], *found.get("error", "").splitlines()])
    memory = "-" if found["reserved_gib"] is None else f"{found['reserved_gib']:.1f}"
    times = "".join(f"{found[name]:>14.2f}" for name in (*COLUMNS, "ms"))
    losses = f"{found['first_loss']:.4f} to {found['last_loss']:.4f}"
    return f"{times}{found['tokens_per_second']:>10,.0f}{memory:>7}  {losses}"


def split(file: Path) -> dict[str, Any]:
    """Return a trace's milliseconds per step by class, and its longest kernels. A trace that cannot be read fails only
    its row.
    """
    try:
        with gzip.open(file, "rt") as content:
            summary = trace.summarize(json.load(content)["traceEvents"])
    except Exception as error:
        return {"status": "failed", "error": f"the trace cannot be read ({type(error).__name__}: {error})"}
    step = 1000 * summary.seconds / summary.steps
    longest = [
        [name[:120], round(1000 * seconds / summary.steps, 3), calls] for name, seconds, calls in summary.top[:40]
    ]
    return {"ms": step, **{name: share * step for name, share in summary.shares.items()}, "longest": longest}


if __name__ == "__main__":
    sys.exit(main())
