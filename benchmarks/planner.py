"""Print how well the planner predicts a source of published rows that its constants were not fitted to.

    python benchmarks/planner.py       # no GPU, one core; docs/plan.md has the table

For each source of titan_hydra/assets/published.yaml, the constants that docs/plan.md calls fitted to its rows are
fitted to the rows of all other sources instead. The fit begins at values that no row determined. The fitted constants
then predict the source's own rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import log
from statistics import median

from titan_hydra.plan import time
from titan_hydra.plan.calibrate import descend
from titan_hydra.plan.predict import changed
from titan_hydra.plan.published import Scored, rows_of, score
from titan_hydra.plan.shape import NotPredictable

# The fit begins with the H200's measured rates, scaled by data sheets, and with factors of almost no effect. A constant
# on which no remaining row depends keeps its first value.
START = {
    "h100.attention_tflops": 475,  # as h200
    "h100_2023.attention_tflops": 285,  # flash_tflops of h200
    "a100_2023.bf16_tflops": 218,  # 690 x 312 / 989
    "a100_2023.attention_tflops": 90,  # 285 x 312 / 989
    "b200.attention_tflops": 1080,  # 475 x 2,250 / 989
    "mi300x.bf16_tflops": 912,  # 690 x 1,307 / 989
    "mi300x.float8_tflops": 2101,  # 1,590 x 2,615 / 1,979
    "mi300x.attention_tflops": 628,  # 475 x 1,307 / 989
    "async_tp": 1.0,
    "contention": 0.1,
    "straggler": 5e-6,
    "message": 10e6,
    "launch": 4e-3,  # about the time of 40 kernels at 0.1 ms; below 1e-3 no row depends on it
    "launch_tp": 1.5,
    "imbalance": 1.2,
    "dispatch": 0.9,
}
PULL = 1e-4  # as in plan/calibrate.py, weaker, as the start is farther away

Constants = dict[str, float]


def predicted(one: Scored, constants: Constants, exact: bool = False) -> float:
    """Return a row's tokens/s per device, predicted with these constants."""
    job, factors = one.shape.job, {name: value for name, value in constants.items() if "." not in name}
    preset = f"{job.hardware.name}."
    rates = {name.removeprefix(preset): value for name, value in constants.items() if name.startswith(preset)}
    job = changed(job, hardware=rates)
    return time.speed(job, time.Factors(**factors), replace(one.shape, job=job), exact).tokens_per_second


def errors(rows: Iterable[Scored], constants: Constants) -> list[float]:
    """Return the relative errors of the predictions with these constants."""
    return [predicted(one, constants, exact=True) / one.speed[0] - 1 for one in rows]


def depending(one: Scored) -> Callable[[Constants], float]:
    """Return a function from constants to the relative error of a row's prediction. It predicts again only if a
    constant on which the row depends has changed.
    """
    known = predicted(one, START)
    names = [
        name for name in START if any(predicted(one, START | {name: START[name] * way}) != known for way in (0.5, 8))
    ]

    @cache
    def error(*values: float) -> float:
        return predicted(one, START | dict(zip(names, values, strict=True))) / one.speed[0] - 1

    return lambda constants: error(*(constants[name] for name in names))


def fit(rows: Iterable[Scored]) -> Constants:
    """Return the constants fitted to some rows."""
    each = [*map(depending, rows)]

    def off(constants: Constants) -> float:
        moved = sum(log(constants[name] / START[name]) ** 2 for name in START)
        return sum(log(1 + error(constants)) ** 2 for error in each) + PULL * moved

    return descend(START, off)


def counted_rows() -> list[Scored]:
    """Return the predictions of the rows that count in `titan plan --score`."""
    found = []
    for row in rows_of():
        with suppress(NotPredictable):
            found.append(score(row))
    return [one for one in found if not one.apart]


def left_out(rows: list[Scored]) -> dict[str, list[Scored]]:
    """Return the rows of each source and, for a publisher of several sources, of all these sources together."""
    sources, publishers = defaultdict(list), defaultdict(list)
    for one in rows:
        name = str(one.row["source"])
        sources[name.split(",")[0][:60]].append(one)
        publishers[f"all of {name.split()[0]}"].append(one)
    return sources | {name: own for name, own in publishers.items() if own not in sources.values()}


def summary(errors: list[float]) -> str:
    return f"{median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


def main() -> None:
    rows = counted_rows()
    everything = fit(rows)
    print(
        "| source left out | rows | shipped constants | fitted to all rows | fitted without it | the other rows in that fit |"
    )
    print("|---" * 6 + "|")
    for name, own in left_out(rows).items():
        others = [one for one in rows if one not in own]
        without = fit(others)
        texts = (
            summary([one.error for one in own]),
            *map(summary, (errors(own, everything), errors(own, without), errors(others, without))),
        )
        print(f"| {name} | {len(own)} | {' | '.join(texts)} |", flush=True)
    print("\n| constant | start | fitted to all rows |\n|---|---|---|")
    for name, value in everything.items():
        print(f"| {name} | {START[name]:.4g} | {value:.4g} |")


if __name__ == "__main__":
    main()
