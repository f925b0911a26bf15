"""The rule that names a slow rank of a run, from the rows of metrics.jsonl."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from . import layout

NEWEST, FEWEST = 20, 6  # number of newest rows that a status reads; minimum number of rows to name a slow rank
MOST = 0.75  # fraction of the rows in which a rank must be slow
# a rank is slow if its time exceeds the median by a tenth, and by twice as much as any other rank's time does
SLOW, TIMES = 0.1, 2.0

FIELDS = ("slowest_rank", "slowest_over_median", "others_over_median")  # fields of a row; docs/metrics.md defines them


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow in most rows."""

    rank: int
    ratio: float  # median of (own time / median of other ranks with the same work) over the slow rows
    slow: int  # number of rows in which it was slow
    rows: int

    def __str__(self) -> str:
        return f"rank {self.rank} needs {self.ratio:.2f} times as long as the others"


def slow_rank(rows: Iterable[dict[str, Any]]) -> SlowRank | None:
    """Return the rank that was slow in most of the rows of a run's newest process; None if there is none, or if there
    are too few rows. How much slower a rank must be depends on the spread of all other ranks in the same row.
    """
    known: list[dict[str, Any]] = []
    for row in rows:
        if row.get("first_step"):
            known.clear()
        elif None not in (row.get(name) for name in FIELDS):
            known.append(row)
    if len(known) < FEWEST:
        return None
    ratios = [(row["slowest_rank"], row["slowest_over_median"]) for row in known if _slow(row)]
    ((rank, count),) = Counter(rank for rank, _ in ratios).most_common(1) or [(0, 0)]
    if count < MOST * len(known):
        return None
    return SlowRank(int(rank), median(ratio for of_rank, ratio in ratios if of_rank == rank), count, len(known))


def straggler_line(slow: SlowRank, attempt: Path) -> str:
    """Return a sentence about a slow rank, with the host of its process in the attempt."""
    host = layout.RANK.read(attempt, slow.rank).get("host")
    return f"{slow} ({'host ' + host if host else 'host unknown'}; slow in {slow.slow} of {slow.rows} rows)"


def _slow(row: dict[str, Any]) -> bool:
    others = row["others_over_median"] - 1
    return row["slowest_over_median"] - 1 >= max(SLOW, TIMES * others)
