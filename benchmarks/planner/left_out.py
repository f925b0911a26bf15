"""Print how well the planner predicts the rows of a publisher that its constants were not fitted to, and the error bands
that follow.

    python benchmarks/planner/left_out.py       # no GPU, one core, about ten minutes; docs/plan.md has the tables

`titan rates score` prints the second table, which is written into left_out.json beside it.

For each publisher of published.yaml beside this file, the constants that docs/plan.md calls fitted to its rows are
fitted to the rows of all other publishers instead. The fit begins at values that no row determined. The fitted constants
then predict the publisher's own rows. The bands of titan_hydra/experiments/plan/bands.py contain these predictions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import ceil, log
from pathlib import Path
from statistics import median
from typing import Any

from titan_hydra.core.base.text import to_json
from titan_hydra.experiments.plan import time
from titan_hydra.experiments.plan.bands import band_of, technique_of
from titan_hydra.experiments.plan.factors import Factors
from titan_hydra.experiments.plan.predict import changed
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.instruments.rates.calibrate import descend
from titan_hydra.instruments.rates.command_score import LEFT_OUT
from titan_hydra.instruments.rates.published import Scored, rows_of, score

# The fit begins with rates of single kernels that no row determined, scaled by data sheets, and with factors of almost no
# effect. A constant on which no remaining row depends keeps its first value.
START = {
    # cuDNN 9.1 in FlashAttention-3's paper, heads of 128, causal: 217 at 512 tokens, 393 at 2,048, 475 at 8,192, 485 at
    # 16,384 (backward: without a mask, times the forward's ratio). A step on the H200 also reached 475 at 8,192.
    "h100.attention_tflops": 505,
    "h100.short_attention": 520,
    # 25 to 40 % of 312, which the first FlashAttention reached (abstract of FlashAttention-2's paper); the H100 is 285 / 175
    # times as fast with the kernel of FlashAttention-2
    "a100_2023.attention_tflops": 101,
    "h100_2023.attention_tflops": 165,
    "b200.attention_tflops": 1150,  # 505 x 2,250 / 989
    # forward of FlashAttention-4: 660 at 1,024 tokens, 899 at 2,048, 1,062 at 4,096 (its pull request #2605)
    "b200.short_attention": 1040,
    "mi300x.bf16_tflops": 782,  # MAMF with ROCm 6.2; 450 with ROCm 6.1
    "mi300x.float8_tflops": 1802,  # 782 x 1,590 / 690
    "mi300x.attention_tflops": 628,  # 475 x 1,307 / 989
    "async_tp": 1.0,
    "contention": 0.1,
    "straggler": 5e-6,
    "latency": 25e-6,
    "launch": 4e-3,  # about the time of 40 kernels at 0.1 ms; below 1e-3 no row depends on it
    "launch_tp": 1.5,
    "copy": 6.0,  # three copies, each read and written
    "grouped": 1.0,
    "launch_experts": 1e-3,
}
EXPERTS = {"copy", "grouped", "launch_experts"}  # what only rows of models with experts depend on
# (0.1 / 0.3)^2: rows of one layout differ by about 10 %, first values are known within about 30 %
PULL = 0.1
INSIDE = 0.85  # the share of left-out rows that a band contains, at least
ENOUGH = 5  # rows from which a device has a band of its own for a technique

Constants = dict[str, float]


def predicted(one: Scored, constants: Constants, exact: bool = False) -> float:
    """Return a row's tokens/s per device, predicted with these constants."""
    job, factors = one.shape.job, {name: value for name, value in constants.items() if "." not in name}
    preset = f"{job.hardware.name}."
    rates = {name.removeprefix(preset): value for name, value in constants.items() if name.startswith(preset)}
    job = changed(job, hardware=rates)
    return time.speed(job, Factors(**factors), replace(one.shape, job=job), exact).tokens_per_second


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


def fit(rows: Iterable[Scored], error_of: dict[str, Callable[[Constants], float]]) -> Constants:
    """Return the constants fitted to some rows: those of EXPERTS to the rows of models with experts, after all others to
    the rows of dense models. Rows of experts differ more, so they would bend the others.
    """
    found, rows = START, [*rows]
    for sparse, names in ((False, START.keys() - EXPERTS), (True, EXPERTS)):
        each = [error_of[one.row["id"]] for one in rows if bool(one.shape.experts) == sparse]

        def off(changed: Constants, known: Constants = found, each: list[Any] = each) -> float:
            moved = sum(log(value / START[name]) ** 2 for name, value in changed.items())
            return sum(log(1 + error(known | changed)) ** 2 for error in each) + PULL * moved

        found = found | descend({name: START[name] for name in START if name in names}, off)
    return found


def counted_rows() -> list[Scored]:
    """Return the predictions of the rows that count in `titan rates score benchmarks/planner/published.yaml`."""
    found = []
    for row in rows_of(Path(__file__).with_name("published.yaml")):
        with suppress(NotPredictable):
            found.append(score(row))
    return [one for one in found if not one.apart]


def publisher_of(one: Scored) -> str:
    """Return who published a row: the first word of its source, without the address of a site."""
    word = str(one.row["source"]).split()[0].rstrip(",")
    return (
        "NVIDIA-NeMo/NeMo" if "nemo-framework" in word else word.removeprefix("https://github.com/").split("/issues")[0]
    )


def grouped(rows: Iterable[Scored], name: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    """Return the rows by the name that `name` gives them."""
    groups = defaultdict(list)
    for one in rows:
        groups[name(one)].append(one)
    return groups


def summary(errors: list[float]) -> str:
    return f"{median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


def shares(own: list[Scored], without: Constants) -> dict[str, float]:
    """Return what `titan rates score` prints of some rows, each predicted without its publisher."""
    errors = [without[one.row["id"]] for one in own]
    inside = sum(abs(1 / (1 + without[one.row["id"]]) - 1) <= band_of(one.shape.job) for one in own)
    return {
        "rows": len(own),
        "median": round(median(map(abs, errors)), 4),
        "worst": round(max(errors, key=abs), 4),
        "inside": inside,
    }


def line(name: str, own: list[Scored], share: dict[str, float]) -> str:
    """Return a line of the table of techniques, from what `shares` returned."""
    shipped = summary([one.error for one in own])
    return f"| {name} | {len(own)} | {shipped} | {share['median']:.1%}, {share['worst']:+.1%} | {share['inside']} |"


def bands(left_out: dict[str, list[float]]) -> dict[str, float]:
    """Return the half-width for each name that contains INSIDE of its errors, in steps of 0.05."""
    found = {}
    for name, off in left_out.items():
        ordered = sorted(abs(1 / (1 + error) - 1) for error in off)  # a band is a share of the prediction
        found[name] = max(ceil(ordered[ceil(INSIDE * len(ordered)) - 1] * 20) / 20, 0.1)
    return found


def main() -> None:
    rows = counted_rows()
    error_of = {one.row["id"]: depending(one) for one in rows}  # they remember what they computed, for all fits
    everything, without = fit(rows, error_of), {}
    print(
        "| publisher left out | rows | shipped constants | fitted to all rows | fitted without it |\n"
        + "|---" * 5
        + "|"
    )
    for name, own in grouped(rows, publisher_of).items():
        own_errors = errors(own, fit((one for one in rows if one not in own), error_of))
        without |= {one.row["id"]: error for one, error in zip(own, own_errors, strict=True)}
        texts = map(summary, ([one.error for one in own], errors(own, everything), own_errors))
        print(f"| {name} | {len(own)} | {' | '.join(texts)} |", flush=True)
    print(
        "\n| technique | rows | shipped constants | fitted without the row's publisher | inside their bands |\n"
        + "|---" * 5
        + "|"
    )
    left_out: dict[str, list[float]] = {}
    written = {}
    for name, own in sorted(grouped(rows, lambda one: technique_of(one.shape.job)).items()):
        left_out[name] = [without[one.row["id"]] for one in own]
        written[name] = shares(own, without)
        print(line(name, own, written[name]))
    for kind in ("dense", "experts"):
        own = [one for one in rows if one.technique.startswith(kind)]
        written[f"all {kind}"] = shares(own, without)
        print(line(f"all {kind}", own, written[f"all {kind}"]))
    LEFT_OUT.write_text(to_json(written) + "\n")
    for name, own in grouped(rows, lambda one: f"{one.row['hardware']}, {technique_of(one.shape.job)}").items():
        if len(own) >= ENOUGH:
            left_out[name] = [without[one.row["id"]] for one in own]
    print("\nbands:", bands(left_out))
    print("\n| constant | start | fitted to all rows |\n|---|---|---|")
    for name, value in everything.items():
        print(f"| {name} | {START[name]:.4g} | {value:.4g} |")
    print("\nleft out:", {name: round(error, 3) for name, error in without.items()})


if __name__ == "__main__":
    main()
