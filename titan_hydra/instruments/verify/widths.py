"""`titan verify widths` and `titan verify depths`: test whether the model's width or depth affects how much training
changes the activations, or which learning rate is best.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import notes_on_stderr, table, to_json
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.experiments.compose.compose import compose_job, later_wins

WIDTHS, DEPTHS, STEPS, SEEDS = (64, 128, 256, 512, 1024), (2, 4, 8, 16), 5, 3
FLAT = 0.05  # largest slope that counts as flat: a factor of 1.15 over four doublings of the size
NEAR = 1.5  # largest ratio between the best rates of the smallest and of the largest size that counts as flat
# A job that is small enough to be trained many times on a CPU. The user's overrides replace its values.
SMALL = (
    "precision=fp32",
    "parallelism=single",
    "data=synthetic",
    "data.seq_len=32",
    "data.local_batch=8",
    "data.global_batch=8",
    "model.vocab_size=256",
    "model.n_layers=2",
    "lr_scheduler=constant",
    "lr_scheduler.warmup_steps=0",
    "checkpoint=off",
)


@dataclass(frozen=True)
class SizeCheck:
    """The models that are compared. They differ in their sizes, which are widths or depths."""

    what: str  # "width" or "depth"
    sizes: list[int]
    seeds: int
    job: Job

    def job_of(self, size: int, seed: int, rate: float | None = None) -> Job:
        """Return the job for one size. Raises ConfigError if a width of the model would be no whole number."""
        job = copy.deepcopy(self.job)
        job.seed = seed
        job.optimizer.lr = job.optimizer.lr if rate is None else rate
        if self.what == "depth":
            job.model.n_layers = size
        else:
            job.model = job.model.widened(size)
        return job


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan verify widths` and `titan verify depths`."""
    add = parser.add_argument_group("widths, depths").add_argument
    add("--sizes", type=_numbers, metavar="N,N", help="values of model.dim, or model.n_layers (64 to 1024; 2 to 16)")
    add("--seeds", type=int, default=SEEDS, metavar="N", help=f"runs of each size ({SEEDS})")
    add("--rates", type=_rates_in, metavar="LR,LR,LR", help="compare which of these learning rates is best")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result into this file")


def compare_sizes(args: argparse.Namespace) -> int:
    """Run the check. Returns 1 if a slope, or the ratio of the best rates, is too large; else 0."""
    word, *overrides = args.overrides
    if args.plot and args.plot.suffix != ".png":
        raise bad_value("--plot", str(args.plot), "is drawn as PNG", args.plot.with_suffix(".png"))
    sizes = args.sizes or list(WIDTHS if word == "widths" else DEPTHS)
    if len(sizes) < 2 or args.seeds < 1 or (args.rates and len(args.rates) < 3):
        raise ConfigError(
            f"titan verify {word}: needs two sizes, a seed, and with --rates three rates, or more of each"
        )
    job = compose_job(*later_wins(*SMALL, f"steps={STEPS}", *overrides), config_dir=args.config_dir)
    check = SizeCheck(word.removesuffix("s"), sizes, args.seeds, job)
    result = _rates(check, args.rates) if args.rates else _coordinates(check)
    if args.json:
        print(to_json(result))
    elif args.rates:
        _show_rates(check, result)
    else:
        _show_coordinates(check, result)
    if args.plot:
        from titan_hydra.experiments.report.coordinates import draw_coordinates

        with notes_on_stderr(args.json):
            print(draw_coordinates(result, args.plot))
    return Exit.DONE if result["flat"] else Exit.BUG


def _measure(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    from .coordinates import measured_sizes

    return measured_sizes(list(jobs))


def _coordinates(check: SizeCheck) -> dict[str, Any]:
    """Return for each kind of activation the mean change at each size, and the slope of log(change) over log(size)."""
    runs_of_check = [(size, seed) for size in check.sizes for seed in range(check.seeds)]
    measured = _measure([check.job_of(*run) for run in runs_of_check])
    kinds: dict[str, dict[str, Any]] = {}
    for kind in measured[0]["change"]:
        means = [
            statistics.fmean(
                result["change"][kind]
                for (size_of_run, _), result in zip(runs_of_check, measured, strict=True)
                if size_of_run == size
            )
            for size in check.sizes
        ]
        logs = [math.log2(mean) if mean > 0 else math.nan for mean in means]
        fit = statistics.linear_regression([math.log2(size) for size in check.sizes], logs)
        kinds[kind] = {"change": means, "slope": fit.slope, "flat": abs(fit.slope) <= FLAT}
    return _about(check) | {"kinds": kinds, "flat": all(result["flat"] for result in kinds.values())}


def _rates(check: SizeCheck, rates: list[float]) -> dict[str, Any]:
    """Return for each size the best learning rate, and the loss at each rate (the mean over the last quarter of steps)."""
    runs_of_check = [
        (size, seed, rate) for size in check.sizes for rate in sorted(rates) for seed in range(check.seeds)
    ]
    measured = _measure([check.job_of(*run) for run in runs_of_check])
    losses: dict[int, dict[float, list[float]]] = {}
    for (size, _, rate), result in zip(runs_of_check, measured, strict=True):
        last = result["losses"][-max(1, len(result["losses"]) // 4) :]
        losses.setdefault(size, {}).setdefault(rate, []).append(statistics.fmean(last))
    means = {size: {rate: statistics.fmean(of_seeds) for rate, of_seeds in of.items()} for size, of in losses.items()}
    best = {size: best_rate(of) for size, of in means.items()}
    ends = [best[min(best)], best[max(best)]]
    ratio = max(ends) / min(ends)
    rows = [{"size": size, "losses": list(of.values()), "best": best[size]} for size, of in means.items()]
    return _about(check) | {"rates": sorted(rates), "sizes_at_rates": rows, "ratio": ratio, "flat": ratio <= NEAR}


def best_rate(losses: dict[float, float]) -> float:
    """Return the rate with the lowest loss. A parabola over the logarithm of the rate is fitted through the lowest loss
    and its two neighbours; the result is the lowest point of the parabola. If the lowest loss is at an end of the list,
    the result is the rate there. A loss that is not a number counts as infinite.
    """
    rates = sorted(losses)
    values = [losses[rate] if math.isfinite(losses[rate]) else math.inf for rate in rates]
    index = min(range(len(rates)), key=values.__getitem__)
    if index in (0, len(rates) - 1) or math.inf in values[index - 1 : index + 2]:
        return rates[index]
    x0, x1, x2 = (math.log(rate) for rate in rates[index - 1 : index + 2])
    y0, y1, y2 = values[index - 1 : index + 2]
    left, right = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    return (
        math.exp(x1 - 0.5 * ((x1 - x0) * left - (x1 - x2) * right) / (left - right)) if left != right else rates[index]
    )


def _about(check: SizeCheck) -> dict[str, Any]:
    """Return the fields that both results have: what was varied, and the job."""
    job = check.job
    return {
        "what": check.what,
        "sizes": check.sizes,
        "seeds": check.seeds,
        "steps": job.steps,
        "model": job.model.name,
        "parametrization": job.parametrization.name,
        "optimizer": job.optimizer.name,
    }


def _show_coordinates(check: SizeCheck, result: dict[str, Any]) -> None:
    """Print how each kind of activation changes with the size, and whether it is flat."""
    rows = [
        [
            kind,
            *(f"{value:.3g}" for value in slope["change"]),
            f"{slope['slope']:+.3f}",
            "yes" if slope["flat"] else "NO",
        ]
        for kind, slope in result["kinds"].items()
    ]
    print(_title(result) + ": change of the activations of the first batch (root mean square)")
    titles = [check.what, *map(str, check.sizes), "slope", "flat"]
    print("\n".join(table(titles, rows, right=titles[1:-1])))
    word = "flat: every slope is at most" if result["flat"] else "NOT flat: a slope is more than"
    print(f"{word} {FLAT} (log2 of the change over log2 of the {check.what}; 0 is no dependence)")


def _show_rates(check: SizeCheck, result: dict[str, Any]) -> None:
    """Print the losses at each learning rate and size, and whether the best rate stays the same."""
    rows = [
        [str(of_size["size"]), *(f"{loss:.4f}" for loss in of_size["losses"]), f"{of_size['best']:.3g}"]
        for of_size in result["sizes_at_rates"]
    ]
    print(_title(result) + ": loss at each learning rate (mean of the last quarter of the steps)")
    titles = [check.what, *(f"{rate:g}" for rate in result["rates"]), "best rate"]
    print("\n".join(table(titles, rows, right=titles[1:])))
    word = "the same" if result["flat"] else "NOT the same"
    print(
        f"best rate: {word}; the ratio of smallest and largest {check.what} is {result['ratio']:.2f}, allowed is {NEAR}"
    )


def _title(result: dict[str, Any]) -> str:
    return f"{result['model']}, {result['parametrization']}, {result['optimizer']}, {result['steps']} steps, seeds {result['seeds']}"


def _rates_in(text: str) -> list[float]:
    """Parse learning rates. Raises ArgumentTypeError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: give learning rates above 0 with commas between them")
    return rates


def _numbers(text: str) -> list[int]:
    """Parse sizes. Raises ArgumentTypeError."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers of 1 or more with commas between them")
    return sizes
