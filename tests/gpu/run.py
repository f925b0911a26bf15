"""Tests on one GPU: python tests/gpu/run.py [--shards] [--only TEXT ...] [--again FILE] [--seconds 540] [--out FOLDER]

When a case ends, its row is printed and its line is written to FOLDER/tests.jsonl; if it failed, its ranks' logs are
written to FOLDER/tests.log. A summary follows at the end. The exit status is 0 if no case failed. With --device cpu the
cases that need no GPU run over gloo; with --dry-run models are smaller and have fewer steps. With --shards, cases of one
process, of several, and compiled ones run side by side: about a dozen processes, most of which wait for their host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu_cases import CASES, FAULTS, Case
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
    parser.add_argument("--shards", action="store_true", help="run shards of the cases side by side")
    parser.add_argument("--again", type=Path, help="only cases that did not pass or run, by a tests.jsonl")
    parser.add_argument("--card", type=Path, help="file that benchmarks/gpu/card.py has printed")
    args = parser.parse_args()
    began = time.monotonic()
    cases = [case for case in (FAULTS if args.faults else CASES) if any(text in case.name for text in args.only)]
    if args.again:
        failed = failures(args.again)
        cases = [case for case in cases if (case.name, case.ranks) in failed]
    args.out.mkdir(parents=True, exist_ok=True)
    header = {"command": sys.argv, **(json.loads(args.card.read_text()) if args.card else card(args.device))}
    print(*(f"{name}: {value}" for name, value in header.items()), sep="\n", flush=True)
    counts: Counter[str] = Counter()
    with (
        (args.out / "tests.jsonl").open("w", buffering=1) as file,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        file.write(json.dumps(header) + "\n")
        run = side_by_side if args.shards else rows
        for row in run(cases, Path(folder), args.device == "cuda", args.dry_run, args.seconds):
            counts[row.status] += 1
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            print(line(row), flush=True)
            logs = sorted([*Path(folder).glob("logs.txt"), *Path(folder).glob("*/logs.txt")])
            (args.out / "tests.log").write_text("".join(log.read_text(errors="replace") for log in logs))
        took = time.monotonic() - began
        # before the folder is removed, which takes seconds
        print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {took:.0f} s", flush=True)
    return int(bool(set(counts) - {"passed", "skipped"}))


def failures(file: Path) -> set[tuple[str, int]]:
    """Return name and ranks of the cases in a tests.jsonl that did not pass, or did not run as time was up. Raise
    SystemExit(2) if it is none.
    """
    try:
        found = [json.loads(text) for text in file.read_text().splitlines()]
        return {(row["name"], row["ranks"]) for row in found[1:] if row["status"] not in ("passed", "skipped")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"--again={file}: it is no tests.jsonl ({type(error).__name__}: {error})", file=sys.stderr)
        raise SystemExit(2) from None


def side_by_side(cases: list[Case], folder: Path, gpu: bool, dry: bool, seconds: float) -> Iterator[Row]:
    """Run the shards of the cases at once, then the cases that need the device for themselves. Yield rows as they end."""
    until = time.monotonic() + seconds
    found: queue.Queue[Row | BaseException | None] = queue.Queue()
    shards: dict[str, list[Case]] = {}
    for case in cases:
        if not case.alone:
            shards.setdefault(case.shard, []).append(case)

    def follow(shard: str) -> None:
        try:
            for row in rows(shards[shard], folder / shard, gpu, dry, seconds, beside=True):
                found.put(row)
        except BaseException as error:
            found.put(error)
        found.put(None)

    for shard in shards:
        threading.Thread(target=follow, args=(shard,), daemon=True).start()
    for _ in shards:
        for row in iter(found.get, None):  # until one of the shards ends
            if isinstance(row, BaseException):
                raise row
            yield row
    yield from rows([case for case in cases if case.alone], folder, gpu, dry, until - time.monotonic())


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
