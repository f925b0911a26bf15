"""The columns of metrics.jsonl that a report uses. Each value is stored in eight bytes, so that a thousand runs of a
thousand rows fit into memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

from titan_hydra.core.job.run import stragglers
from titan_hydra.core.job.run.records import beside_loss

KEPT = (
    "loss",
    "loss_mean",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "memory_reserved_gib",
    "mfu",
    "step_seconds",
    "tokens_seen",
    "profiled_steps",
    "first_step",
    *stragglers.FIELDS,
)


class MetricColumn(Mapping[int, float]):
    """The values of one column, by ascending step. Rows without a value are left out."""

    def __init__(self, steps: array[int] | None = None, numbers: array[float] | None = None) -> None:
        """Store the arrays without copying them, so that columns with a value in every row share one array of steps."""
        self.steps, self.numbers = steps or array("q"), numbers or array("d")

    def __getitem__(self, step: int) -> float:
        index = bisect_left(self.steps, step)
        if index == len(self.steps) or self.steps[index] != step:
            raise KeyError(step)
        return self.numbers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, step: int) -> MetricColumn:
        first = bisect_right(self.steps, step)
        return MetricColumn(self.steps[first:], self.numbers[first:])


def columns_of(rows: list[dict[str, Any]]) -> dict[str, MetricColumn]:
    """Return the columns in KEPT, those of the objective, and the column "step" with every
    step. If several rows have the same step, only the last of them counts.
    """
    ascending = {row["step"]: row for row in sorted(rows, key=lambda row: row["step"])}
    steps = array("q", ascending)
    columns = {"step": MetricColumn(steps, array("d", steps))}
    for name in (*KEPT, *dict.fromkeys(name for row in rows for name in beside_loss(row))):
        known = {step: value for step, row in ascending.items() if isinstance(value := row.get(name), int | float)}
        if known:
            columns[name] = MetricColumn(
                steps if len(known) == len(steps) else array("q", known), array("d", known.values())
            )
    return columns
