"""Tests on one GPU: python tests/gpu/run.py [--only TEXT ...] [--seconds 540] [--out FOLDER]

When a case ends, its row is printed and its line is written to FOLDER/tests.jsonl; if it failed, its ranks' logs are
written to FOLDER/tests.log. A summary follows at the end. The exit status is 0 if no case failed. With --device cpu the
cases that need no GPU run over gloo; with --dry-run models are smaller and have fewer steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu_cases import CASES, FAULTS
from gpu_pool import Row, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="fewer steps of smaller models")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only cases with one of these in their name"
    )
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after so long")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of tests.jsonl")
    parser.add_argument(
        "--faults", action="store_true", help="run cases that fail on purpose, to see what the kit makes of them"
    )
    args = parser.parse_args()
    began = time.monotonic()
    cases = [case for case in (FAULTS if args.faults else CASES) if any(text in case.name for text in args.only)]
    args.out.mkdir(parents=True, exist_ok=True)
    header = {"command": sys.argv, **card(args.device)}
    print(*(f"{name}: {value}" for name, value in header.items()), sep="\n", flush=True)
    counts: Counter[str] = Counter()
    with (
        (args.out / "tests.jsonl").open("w", buffering=1) as file,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        file.write(json.dumps(header) + "\n")
        for row in rows(cases, Path(folder), args.device == "cuda", args.dry_run, args.seconds):
            counts[row.status] += 1
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            print(line(row), flush=True)
            if (logs := Path(folder) / "logs.txt").exists():
                shutil.copy(logs, args.out / "tests.log")
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {time.monotonic() - began:.0f} s")
    return int(bool(set(counts) - {"passed", "skipped"}))


def card(device: str) -> dict:
    """Return what the tests run on, as benchmarks/gpu/card.py finds it in a process of its own."""
    command = [sys.executable, str(Path(__file__).parents[2] / "benchmarks/gpu/card.py"), device]
    found = subprocess.run(command, capture_output=True, text=True)
    return json.loads(found.stdout) if found.returncode == 0 else {"card": found.stderr[-500:]}


def line(row: Row) -> str:
    """Return the text of a row; if the case did not pass, the end of its error is below it."""
    facts = "  ".join(
        f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.facts.items()
    )
    text = f"{row.status:<8}{row.ranks} rank{'s' * (row.ranks > 1):<2} {row.seconds:>6.1f} s  {row.name:<52} {facts}"
    if row.status == "skipped":
        return f"{text}{row.error}"
    return "\n".join([text, *(f"        | {words}" for words in row.error.splitlines()[-25:])])


if __name__ == "__main__":
    sys.exit(main())
