"""`titan rates score`: print the errors of predictions of measurements."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import table, to_json
from titan_hydra.experiments.plan.bands import band_of, technique_of
from titan_hydra.experiments.plan.predict import FITS, TIGHT
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.instruments.rates.published import Scored, rows_of, score

LEFT_OUT = Path(__file__).with_name("left_out.json")  # written by benchmarks/planner/left_out.py
TITLES = ("", "rows", "tokens/s: median error", "bias", "worst", "band", "inside", "GiB: median error", "worst")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, metavar="FILE", help="file of rows, each with its own job")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Predict the rows of a file, and print the errors by source, device and technique, and those of left-out rows.
    Returns 0, or 2 if no row can be predicted.
    """
    scored, skipped = [], []
    for row in rows_of(args.rows):
        try:
            scored.append(score(row))
        except (NotPredictable, ConfigError, KeyError, ValueError) as error:
            skipped.append(
                (
                    row["id"],
                    f"{error.args[0]} is not given" if isinstance(error, KeyError) else str(error).splitlines()[0],
                )
            )
    if args.json:
        print(to_json({"rows": [*map(_as_json, scored)], "skipped": dict(skipped)}))
        return Exit.DONE if scored else Exit.CONFIG
    counted, apart = (
        [row_score for row_score in scored if not row_score.apart],
        [row_score for row_score in scored if row_score.apart],
    )
    for title, rows, name in (
        ("by source", counted, lambda row_score: str(row_score.row.get("source", "no source")).split(",")[0][:60]),
        (
            "by device and technique",
            counted,
            lambda row_score: f"{row_score.row['hardware']}, {technique_of(row_score.shape.job)}",
        ),
        ("apart", apart, lambda row_score: row_score.apart),
        ("together", counted, lambda row_score: row_score.technique.split(",")[0]),
    ):
        if rows:
            print(title, *table(TITLES, _groups(rows, name), TITLES[1:]), "", sep="\n")
    print(*_fits(counted), sep="\n")
    print(
        "published rows, each predicted with constants that were fitted without its publisher",
        *_left_out(),
        "",
        sep="\n",
    )
    for row_score in sorted(counted, key=lambda row_score: -abs(row_score.error))[:5]:
        print(
            f"{row_score.error:+.1%}  {row_score.row['id']}: {row_score.speed[0]:,.0f} tokens/s, predicted {row_score.speed[1]:,.0f}"
        )
    for name, reason in skipped:
        print(f"skipped  {name}: {reason}")
    return Exit.DONE if scored else Exit.CONFIG


def _fits(rows: Iterable[Scored]) -> list[str]:
    """Return a line that says how many rows with a measured memory are wrongly predicted to fit, or not to fit."""
    known = [(scored.shape.job.hardware.memory_gib, *scored.memory) for scored in rows if scored.memory]
    fitting = sum(predicted <= FITS * room < measured for room, measured, predicted in known)
    refused = sum(predicted > TIGHT * room for room, _, predicted in known)
    summary = f"{len(known)} rows with measured memory: {fitting} predicted to fit, but above {FITS:.0%} of the device"
    return [f"{summary}; {refused} predicted not to fit, but ran", ""] if known else []


def _left_out() -> list[str]:
    """Return the table of published rows that the constants were not fitted to: the errors to expect elsewhere."""
    titles = ("", "rows", "tokens/s: median error", "worst", "inside their bands")
    rows = [
        (name, errors["rows"], f"{errors['median']:.1%}", f"{errors['worst']:+.1%}", errors.get("inside", "-"))
        for name, errors in json.loads(LEFT_OUT.read_text()).items()
    ]
    return table(titles, rows, titles[1:])


def _groups(rows: Iterable[Scored], name: Callable[[Scored], Any]) -> list[tuple[Any, ...]]:
    """Group the rows by the name that `name` gives them, and return a row of the table for each group."""
    groups = defaultdict(list)
    for scored in rows:
        groups[name(scored)].append(scored)
    return [
        (title, len(of_group), *_speeds(of_group), *_bands(of_group), *_memories(of_group))
        for title, of_group in groups.items()
    ]


def _speeds(rows: list[Scored]) -> tuple[str, str, str]:
    errors = [scored.error for scored in rows]
    return f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}", f"{max(errors, key=abs):+.1%}"


def _bands(rows: list[Scored]) -> tuple[str, str]:
    """Return the error band of predictions like these, and how many of the rows are inside their own bands."""
    bands = [band_of(scored.shape.job) for scored in rows]
    inside = sum(abs(scored.deviation) <= band for scored, band in zip(rows, bands, strict=True))
    return f"+-{bands[0]:.0%}" if len({*bands}) == 1 else "-", str(inside)


def _memories(rows: list[Scored]) -> tuple[str, str]:
    errors = [scored.memory[1] / scored.memory[0] - 1 for scored in rows if scored.memory]
    return (f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}") if errors else ("-", "-")


def _as_json(scored: Scored) -> dict[str, Any]:
    """Return a predicted row as JSON values."""
    return {
        "id": scored.row["id"],
        "source": scored.row.get("source"),
        "technique": scored.technique,
        "overrides": " ".join(scored.overrides),
        "tokens_per_second": scored.speed,
        "memory_gib": scored.memory,
        "error": scored.error,
        "band": band_of(scored.shape.job),
        "apart": scored.apart,
    }
